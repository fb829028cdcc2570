"""Whether batches are packed, and samples kept apart: one of two is changed, the other's loss must not move."""

import itertools
import math
import sys
import time
import warnings
from typing import Any

from .contract import Contract
from .model import base_of, shape_of
from .process import ProbePiece, Process, finite

LOOKS = 8  # micro-batches that are looked at at least
TOKENS = 256  # of each of the two samples: far less than a training step holds


class Packing(ProbePiece):
    """What the first batches show. `on` is None until one was looked at."""

    def __init__(self, process: Process, contract: Contract) -> None:
        super().__init__(process)
        self.contract = contract
        self.on: bool | None = None
        self.looks, self.tested = 0, False

    def look(self, module: Any, ids: Any, kwargs: dict[str, Any]) -> None:
        # each look reads the device; a batch that is packed says so at once
        if self.on or (self.looks >= LOOKS and self.process.step >= self.settings.within):
            return
        self.looks += 1
        mask, boundaries = kwargs.get("attention_mask"), kwargs.get("cu_seq_lens_q")
        positions = kwargs.get("position_ids")
        rows = int(ids.shape[0]) if ids.dim() == 2 else 1
        packed, detail = False, f"{rows} rows of {int(ids.shape[-1])} positions"
        samples = kwargs.get("samples", 0 if boundaries is None else int(boundaries.numel()) - 1)
        if samples > 1:
            packed, detail = True, f"{samples} samples in one row (cu_seq_lens)"
        elif positions is not None and positions.dim() == 2:
            starts = int((positions == 0).sum())
            packed = mask is None and starts > int(positions.shape[0])
            detail = f"{starts} samples in {int(positions.shape[0])} row(s) (position_ids)"
        elif self.settings.packed and run_on(module, ids, mask) is not None:
            packed = True
            detail = f"samples run on in {rows} row(s), with no boundary but their end"
        if self.on is None or packed:
            self.on, state = packed, "on" if packed else "off"
            self.record.write("packing", state=state, detail=detail)
            self.contract.seen("packing", state, final=packed and self.contract.expect.get("packing") == "off")

    def test(self, module: Any, args: Any, ids: Any, kwargs: dict[str, Any], known: dict[str, Any]) -> None:
        """Once, at the first micro-batch that is packed on every rank.

        A sharded model's forward is a collective, so the ranks agree on it first; whether they ask
        each other at all depends on the settings alone, which are the same everywhere.
        """
        process = self.process
        if self.tested or not self.settings.isolation or process.step >= self.settings.within:
            return
        if not (self.on if process.world == 1 else self.settings.packed):
            return
        pair: Any = None
        error: Exception | None = None
        begun = time.perf_counter()
        try:
            pair = two_samples(module, args, ids, kwargs, known) if self.on else None
        except Exception as failure:
            error = failure
        if _all_agree(pair is not None, ids, process.world):
            self.tested = process.testing = True
            try:
                before, after = leak(module, *pair)
                self.tell(module, before, after, pair, time.perf_counter() - begun)
            except Exception as failure:
                error = failure
            finally:
                process.testing = False
        elif error is not None:
            self.tested = process.world == 1
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
            self.record.write("packing_isolation", state="untested", reason=reason)

    def tell(self, module: Any, before: float, after: float, pair: Any, seconds: float) -> None:
        inner = base_of(module)
        known = math.isfinite(before) and math.isfinite(after)
        # the same shapes give the same bits; only experts that swap places do not
        tolerance = 1e-3 if shape_of(inner).get("experts") else 1e-6
        moved = abs(after - before) > tolerance * max(1.0, abs(before))
        state = "untested" if not known else "leaking" if moved else "isolated"
        self.record.write(
            "packing_isolation",
            state=state,
            loss=finite(before),
            changed_loss=finite(after),
            attention=getattr(getattr(inner, "config", None), "_attn_implementation", None),
            samples=list(pair[2:]),
            seconds=round(seconds, 4),
            reason=None if known else "the loss is not finite",
        )
        if known:
            self.contract.seen("packing", state)


def told_by_lengths(ids: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What OLMo-core says of its rows, under transformers' names; nothing where it says nothing.

    It tells the lengths of documents (`doc_lens`), of which the last may be padding, and labels of the token behind.
    """
    lengths, labels = kwargs.get("doc_lens"), kwargs.get("labels")
    if lengths is None or ids.dim() != 2:
        return {}
    torch = sys.modules["torch"]
    rows, width = ids.shape
    ends = lengths.to(ids.device).cumsum(1)
    places = torch.arange(width, device=ids.device).expand(rows, width)
    document = torch.searchsorted(ends, places.contiguous(), right=True)
    begins = torch.nn.functional.pad(ends, (1, 0)).gather(1, document)
    position_ids = places - begins
    known: dict[str, Any] = {}
    if labels is not None and tuple(labels.shape) == tuple(ids.shape):
        own = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=-100)
        known["labels"] = own
        # the same token to the end of the row, and none of it is learnt
        last = (ids == ids[:, -1:]) & (own == -100)
        padding = last.int().flip(1).cumprod(1).flip(1).bool()
        position_ids = position_ids.masked_fill(padding, 0)
    known["position_ids"] = position_ids
    return known


def _all_agree(mine: bool, ids: Any, world: int) -> bool:
    if world == 1:
        return mine
    torch = sys.modules["torch"]
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    flag = torch.tensor([int(mine)], device=ids.device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
    return bool(flag.item())


def run_on(module: Any, ids: Any, mask: Any) -> int | None:
    """Where the first sample of a full row without boundaries ends, by its end-of-text token."""
    if ids.dim() != 2 or (mask is not None and (mask.dim() != 2 or not bool(mask[0].all()))):
        return None
    end = getattr(getattr(module, "config", None), "eos_token_id", None)
    ends = end if isinstance(end, (list, tuple)) else [] if end is None else [end]
    row = ids[0].tolist()
    found = [i + 1 for i, token in enumerate(row) if token in ends]
    return next((i for i in found if 2 <= i <= len(row) - 2), None)


def _spans(module: Any, ids: Any, kwargs: dict[str, Any]) -> tuple[int, list[tuple[int, int]]]:
    ends, places = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if ends is not None:
        return 0, list(itertools.pairwise(ends.tolist()))
    if places is not None and places.dim() == 2:
        for row, values in enumerate(places.tolist()):
            marks = [i for i, place in enumerate(values) if place == 0] + [len(values)]
            if len(marks) > 2:
                return row, list(itertools.pairwise(marks))
    split = run_on(module, ids, kwargs.get("attention_mask"))
    return 0, [] if split is None else [(0, split), (split, int(ids.shape[-1]))]


def two_samples(
    module: Any, args: Any, ids: Any, kwargs: dict[str, Any], seen: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Any, int, int] | None:
    """The first two samples of a packed batch as a batch of their own, and other tokens for the first.

    `kwargs` are what the model is given, `seen` also what is known of the batch besides. None where
    there are no two; raises ValueError where the batch has parts whose meaning is not
    known. Each sample is cut to `TOKENS`.
    """
    torch = sys.modules["torch"]
    if ids.dim() != 2 or len(args) > 1:
        raise ValueError("the batch is not plain rows of tokens")
    if kwargs.get("shift_labels") is not None:
        raise ValueError("the sequence is split over several GPUs")
    row, spans = _spans(module, ids, kwargs if seen is None else seen)
    whole = int(ids.shape[-1])
    long = [(a, b) for a, b in spans if b - a >= 2]
    near = [(x, y) for x, y in itertools.pairwise(long) if x[1] == y[0]]
    if not near:
        return None
    (begin, split), (_, end) = near[0]
    first, second = min(split - begin, TOKENS), min(end - split, TOKENS)

    def cut(tensor: Any) -> Any:
        line = tensor[row : row + 1]
        return torch.cat([line[:, begin : begin + first], line[:, split : split + second]], dim=1)

    made: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name == "num_items_in_batch" or value is None:
            continue
        if name == "doc_lens":
            made[name] = torch.tensor([[first, second]], dtype=value.dtype, device=value.device)
        elif name == "max_doc_lens":
            made[name] = [max(first, second)]
        elif name.startswith("cu_seq_lens"):
            made[name] = torch.tensor([0, first, first + second], dtype=value.dtype, device=value.device)
        elif name.startswith("max_length"):
            made[name] = max(first, second)
        elif hasattr(value, "dim") and value.dim() == 2 and tuple(value.shape) == tuple(ids.shape):
            made[name] = cut(value)
        elif hasattr(value, "dim") and value.dim() and whole in tuple(value.shape):
            raise ValueError(f"`{name}` has a shape that is not known")
        else:
            made[name] = value
    made["input_ids"] = cut(ids)
    if "seq_idx" in made:
        made["seq_idx"] = (torch.arange(first + second, device=ids.device)[None] >= first).to(made["seq_idx"].dtype)
    if "labels" in made:
        # the loss is the second sample's alone, its first token belongs to nobody
        labels = made["input_ids"].clone()
        labels[:, : first + 1] = -100
        if "doc_lens" in made:
            # OLMo-core's are those of the token behind
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        made["labels"] = labels
    other = made["input_ids"].clone()
    other[:, :first] = other[:, :first].flip(1)
    if bool((other == made["input_ids"]).all()):
        other[:, :first] = made["input_ids"][:, -1:]
    if bool((other == made["input_ids"]).all()):
        return None
    return made, other, first, second


def leak(module: Any, made: dict[str, Any], other: Any, first: int, second: int) -> tuple[float, float]:
    """The second sample's loss beside the first sample as it is, and beside a changed one.

    In the mode of training, with the same random numbers for both; nothing is left behind of it: no
    gradient, no random number drawn, no weight cast without its history.
    """
    torch = sys.modules["torch"]
    ids = made["input_ids"]
    host = torch.get_rng_state()
    card = torch.cuda.get_rng_state(ids.device) if ids.is_cuda else None

    def rewind() -> None:
        torch.set_rng_state(host)
        if card is not None:
            torch.cuda.set_rng_state(card, ids.device)

    losses = []
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for tokens in (ids, other):
                rewind()
                losses.append(_loss_of(module(**{**made, "input_ids": tokens}), ids, first))
        before, after = torch.stack(losses).tolist()
    finally:
        rewind()
        # a cast made without gradients would be used again by the forward that needs them
        torch.clear_autocast_cache()
    return before, after


def _loss_of(result: Any, ids: Any, first: int) -> Any:
    """The mean loss of the tokens behind `first`, in whatever form the model tells it."""
    torch = sys.modules["torch"]
    if (log_probs := getattr(result, "log_probs", None)) is not None:
        return -log_probs.double().sum() / (ids.shape[1] - first - 1)
    loss = getattr(result, "loss", None)
    if loss is not None and loss.numel() > 1:
        # OLMo-core's head under DPO: one log-probability a token, of the token behind it
        return -loss[0, first:-1].detach().double().mean()
    if loss is not None:
        return loss.detach().double().reshape(())
    logits = result.logits[0, first:-1]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, first + 1 :]).double()
