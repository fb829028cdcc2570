"""Whether batches are packed, and whether packed samples see each other.

Two samples go through the model twice: if the first is changed, the loss of the second must not
move.
"""

import itertools
import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .contract import Contract
from .hooks import Call
from .model import describe_shape, find_base
from .process import Module, ProbePiece, Process, Tensor, keep_finite

LOOKS = 8  # micro-batches that are looked at, at least
TOKENS = 256  # of each of the two samples: far less than a training step holds
UNLABELLED = -100

Span = tuple[int, int]
"""The first position of a sample in its row, and the one behind its last."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows of tokens with what is known of them; what is not known, or of another shape, is None.

    `positions` begin at 0 in each sample. `ends` are where the samples of a single row end, after a
    first 0, `samples` is their number. `mask` may have any shape, `padding` has that of `ids`.
    """

    ids: Tensor
    labels: Tensor = None
    mask: Tensor = None
    positions: Tensor = None
    ends: Tensor = None
    samples: int = 0

    @property
    def is_flat(self) -> bool:
        return bool(self.ids.dim() != 2)

    @property
    def rows(self) -> int:
        return 1 if self.is_flat else int(self.ids.shape[0])

    @property
    def padding(self) -> Tensor:
        if self.mask is None or self.mask.dim() != 2:
            return None
        return self.mask

    def count(self) -> tuple[Any, Any]:
        """Samples and tokens without padding; they may lie on the device."""
        if self.ends is not None:
            return self.samples, self.ends[-1]
        if self.padding is not None:
            return self.rows, self.padding.sum()
        if self.positions is not None:
            starts = self.positions == 0
            # padding behind the last sample has position 0 throughout
            padding = (starts[:, 1:] & starts[:, :-1]).sum()
            tokens = self.positions.numel() - padding
            return starts.sum() - padding, tokens
        return self.rows, self.ids.numel()


def read_batch(ids: Tensor, arguments: Mapping[str, Any]) -> TokenBatch:
    """What a model is given, by the names of transformers' and OLMo-core's arguments."""
    ends = arguments.get("cu_seq_lens_q")
    batch = TokenBatch(
        ids,
        labels=_keep_if_shaped_as(ids, arguments.get("labels")),
        mask=arguments.get("attention_mask"),
        positions=_keep_if_shaped_as(ids, arguments.get("position_ids")),
        ends=ends,
        samples=_count_samples(ends),
    )
    lengths = arguments.get("doc_lens")
    if lengths is None or ids.dim() != 2:
        return batch
    return _read_olmo_core(batch, lengths)


def _read_olmo_core(batch: TokenBatch, lengths: Tensor) -> TokenBatch:
    """A batch of OLMo-core's with the positions and labels that transformers would have.

    OLMo-core passes the lengths of documents, of which the last may be padding, and as labels the
    next token.
    """
    torch = sys.modules["torch"]
    pad = torch.nn.functional.pad
    ids = batch.ids
    rows, width = ids.shape
    ends = lengths.to(ids.device).cumsum(1)
    places = torch.arange(width, device=ids.device).expand(rows, width)
    document = torch.searchsorted(ends, places.contiguous(), right=True)
    begins = pad(ends, (1, 0)).gather(1, document)
    positions = places - begins
    if batch.labels is None:
        return replace(batch, positions=positions)
    labels = pad(batch.labels[:, :-1], (1, 0), value=UNLABELLED)
    # padding repeats one token to the end of the row, without a label
    repeats = (ids == ids[:, -1:]) & (labels == UNLABELLED)
    from_end = repeats.int().flip(1)
    padding = from_end.cumprod(1).flip(1).bool()
    positions = positions.masked_fill(padding, 0)
    return replace(batch, labels=labels, positions=positions)


def take_side(pairs: Mapping[str, Any], branch: str) -> TokenBatch:
    """The chosen or the rejected answers of a micro-batch of pairs, under open-instruct's names."""
    ends = pairs.get(f"{branch}_cu_seq_lens_k")
    return TokenBatch(
        pairs[f"{branch}_input_ids"],
        labels=pairs.get(f"{branch}_labels"),
        mask=pairs.get(f"{branch}_attention_mask"),
        ends=ends,
        samples=_count_samples(ends),
    )


def _count_samples(ends: Tensor) -> int:
    return 0 if ends is None else int(ends.numel()) - 1


def _keep_if_shaped_as(ids: Tensor, tensor: Tensor) -> Tensor:
    if tensor is None or ids.dim() != 2 or tensor.shape != ids.shape:
        return None
    return tensor


class Packing(ProbePiece):
    """What the first batches show. `on` is None until one was looked at."""

    def __init__(self, process: Process, contract: Contract) -> None:
        super().__init__(process)
        self.contract = contract
        self.on: bool | None = None
        self.looks = 0
        self.tested = False

    def look(self, module: Module, batch: TokenBatch) -> None:
        """Record whether this micro-batch is packed."""
        # each look reads the device; a packed batch settles it
        if self.on or (self.looks >= LOOKS and self.process.step >= self.settings.within):
            return
        self.looks += 1
        detail = self._describe_packing(module, batch)
        packed = detail is not None
        if self.on is not None and not packed:
            return
        self.on = packed
        state = "on" if packed else "off"
        if detail is None:
            detail = f"{batch.rows} rows of {int(batch.ids.shape[-1])} positions"
        self.record.write("packing", state=state, detail=detail)
        if packed and self.contract.expect.get("packing") == "off":
            self.contract.saw("packing", state)
        else:
            self.contract.note("packing", state)

    def _describe_packing(self, module: Module, batch: TokenBatch) -> str | None:
        """How the batch shows that its rows hold several samples; None if it does not."""
        if batch.samples > 1:
            return f"{batch.samples} samples in one row (cu_seq_lens)"
        if batch.positions is not None:
            starts = int((batch.positions == 0).sum())
            rows = int(batch.positions.shape[0])
            if batch.mask is None and starts > rows:
                return f"{starts} samples in {rows} row(s) (position_ids)"
        elif self.settings.packed and end_of_first(module, batch) is not None:
            return f"samples run on in {batch.rows} row(s), with no boundary but their end"
        return None

    def test(self, call: Call, batch: TokenBatch) -> None:
        """Test isolation, once, at the first micro-batch that is packed on every rank.

        `call` is that of the model. The forward pass of a sharded model is a collective, so the
        ranks agree on it first. Whether they ask each other depends on the settings alone, which
        are the same on all.
        """
        process = self.process
        if self.tested or not self.settings.isolation or process.step >= self.settings.within:
            return
        may_be_packed = self.on if process.world == 1 else self.settings.packed
        if not may_be_packed:
            return
        pair: SamplePair | None = None
        error: Exception | None = None
        begun = time.perf_counter()
        try:
            if self.on:
                pair = cut_two_samples(call, batch)
        except Exception as failure:
            error = failure
        is_packed = _all_agree(pair is not None, batch.ids.device, process.world)
        if is_packed and pair is not None:
            self.tested = True
            process.testing = True
            try:
                before, after = measure_leak(call.owner, pair)
                seconds = time.perf_counter() - begun
                self._tell_losses(call.owner, before, after, pair, seconds)
            except Exception as failure:
                error = failure
            finally:
                process.testing = False
        elif error is not None:
            self.tested = process.world == 1
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
            self.record.write("packing_isolation", state="untested", reason=reason)

    def _tell_losses(
        self, module: Module, before: float, after: float, pair: "SamplePair", seconds: float
    ) -> None:
        base = find_base(module)
        # the same shapes give the same bits; only experts change their order
        tolerance = 1e-3 if describe_shape(base).get("experts") else 1e-6
        reason = None
        if not math.isfinite(before) or not math.isfinite(after):
            state = "untested"
            reason = "the loss is not finite"
        elif abs(after - before) > tolerance * max(1.0, abs(before)):
            state = "leaking"
        else:
            state = "isolated"
        self.record.write(
            "packing_isolation",
            state=state,
            loss=keep_finite(before),
            changed_loss=keep_finite(after),
            attention=getattr(getattr(base, "config", None), "_attn_implementation", None),
            samples=[pair.first, pair.second],
            seconds=round(seconds, 4),
            reason=reason,
        )
        if reason is None:
            self.contract.saw("packing", state)


def _all_agree(agrees: bool, device: Any, world: int) -> bool:
    if world == 1:
        return agrees
    torch = sys.modules["torch"]
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return agrees
    flag = torch.tensor([int(agrees)], device=device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
    return bool(flag.item())


def end_of_first(module: Module, batch: TokenBatch) -> int | None:
    """Where the first sample of a full row without boundaries ends, by its end-of-text token."""
    if batch.is_flat:
        return None
    padding = batch.padding
    if batch.mask is not None and (padding is None or not bool(padding[0].all())):
        return None
    ends = getattr(getattr(module, "config", None), "eos_token_id", None)
    if not isinstance(ends, (list, tuple)):
        ends = [ends]
    row = batch.ids[0].tolist()
    for position in range(2, len(row) - 1):
        if row[position - 1] in ends:
            return position
    return None


def find_starts(positions: Sequence[int]) -> list[int]:
    """Where samples begin in a row, by its `position_ids`, and the length of the row."""
    starts = [place for place, position in enumerate(positions) if position == 0]
    return [*starts, len(positions)]


def _find_spans(module: Module, batch: TokenBatch) -> tuple[int, list[Span]]:
    """A row with several samples, and where they are; no spans if there is none."""
    if batch.ends is not None:
        ends = batch.ends.tolist()
        return 0, list(itertools.pairwise(ends))
    if batch.positions is not None:
        for row, positions in enumerate(batch.positions.tolist()):
            starts = find_starts(positions)
            if len(starts) > 2:
                return row, list(itertools.pairwise(starts))
    end = end_of_first(module, batch)
    if end is None:
        return 0, []
    length = int(batch.ids.shape[-1])
    return 0, [(0, end), (end, length)]


@dataclass(frozen=True, slots=True)
class SamplePair:
    """Two samples as a batch of their own: the model's arguments, and its ids with a changed first.

    `first` and `second` are their lengths in tokens.
    """

    batch: dict[str, Any]
    changed: Tensor
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class PairPlace:
    """Where two adjacent samples begin in a row, and how many tokens of each are taken."""

    row: int
    begin: int
    split: int
    first: int
    second: int

    @property
    def tokens(self) -> int:
        return self.first + self.second

    def cut(self, tensor: Tensor) -> Tensor:
        line = tensor[self.row : self.row + 1]
        first = line[:, self.begin : self.begin + self.first]
        second = line[:, self.split : self.split + self.second]
        return sys.modules["torch"].cat([first, second], dim=1)


def cut_two_samples(call: Call, whole: TokenBatch) -> SamplePair | None:
    """The first two adjacent samples of a packed batch, each cut to `TOKENS`.

    `call` is the model's. None if there are no two such samples. Raises ValueError if the batch has
    parts of unknown meaning.
    """
    ids = whole.ids
    # the model itself, and its ids
    if whole.is_flat or len(call.args) > 2:
        raise ValueError("the batch is not plain rows of tokens")
    if call.kwargs.get("shift_labels") is not None:
        raise ValueError("the sequence is split over several GPUs")
    row, spans = _find_spans(call.owner, whole)
    place = _find_pair(row, spans)
    if place is None:
        return None
    batch: dict[str, Any] = {"input_ids": place.cut(ids)}
    for name, value in call.kwargs.items():
        if name not in ("input_ids", "num_items_in_batch") and value is not None:
            batch[name] = _cut_argument(name, value, place, tuple(ids.shape))
    first = place.first
    if "seq_idx" in batch:
        torch = sys.modules["torch"]
        is_second = torch.arange(place.tokens, device=ids.device)[None] >= first
        batch["seq_idx"] = is_second.to(batch["seq_idx"].dtype)
    if "labels" in batch:
        batch["labels"] = _label_second(batch, first)
    changed = _change_first(batch["input_ids"], first)
    if changed is None:
        return None
    return SamplePair(batch, changed, first, place.second)


def _cut_argument(name: str, value: Any, place: PairPlace, shape: tuple[int, ...]) -> Any:
    """An argument of the model for the pair alone; `shape` is that of the batch's ids."""
    longer = max(place.first, place.second)
    if name == "doc_lens":
        return value.new_tensor([[place.first, place.second]])
    if name == "max_doc_lens":
        return [longer]
    if name == "loss_div_factor":
        # OLMo-core divides by the tokens of the whole batch, the pair has these alone
        return float(place.second - 1)
    if name.startswith("cu_seq_lens"):
        return value.new_tensor([0, place.first, place.tokens])
    if name.startswith("max_length"):
        return longer
    own_shape = tuple(getattr(value, "shape", ()))
    if own_shape == shape:
        return place.cut(value)
    if shape[-1] in own_shape:
        raise ValueError(f"`{name}` has a shape that is not known")
    return value


def _find_pair(row: int, spans: list[Span]) -> PairPlace | None:
    """The first two adjacent samples of two tokens or more."""
    long = [span for span in spans if span[1] - span[0] >= 2]
    for (begin, split), (start, end) in itertools.pairwise(long):
        if split == start:
            first = min(split - begin, TOKENS)
            second = min(end - split, TOKENS)
            return PairPlace(row, begin, split, first, second)
    return None


def _label_second(batch: dict[str, Any], first: int) -> Tensor:
    """Labels of the second sample alone, without its first token, which nobody predicts."""
    labels = batch["input_ids"].clone()
    labels[:, : first + 1] = UNLABELLED
    if "doc_lens" in batch:
        # OLMo-core's labels are those of the next token
        pad = sys.modules["torch"].nn.functional.pad
        labels = pad(labels[:, 1:], (0, 1), value=UNLABELLED)
    return labels


def _change_first(ids: Tensor, first: int) -> Tensor:
    """The ids with other tokens in their first sample; None if all tokens are the same."""
    changed = ids.clone()
    changed[:, :first] = ids[:, :first].flip(1)
    if bool((changed == ids).all()):
        changed[:, :first] = ids[:, -1:]
    if bool((changed == ids).all()):
        return None
    return changed


def measure_leak(module: Module, pair: SamplePair) -> tuple[float, float]:
    """The second sample's loss beside the first sample, and beside the changed one.

    In training mode, with the same random numbers for both. It leaves nothing behind: no gradient,
    no random number drawn, no weight cast without its history.
    """
    torch = sys.modules["torch"]
    ids = pair.batch["input_ids"]
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
            for tokens in (ids, pair.changed):
                rewind()
                result = module(**{**pair.batch, "input_ids": tokens})
                losses.append(_read_loss(result, ids, pair.first))
        before, after = torch.stack(losses).tolist()
    finally:
        rewind()
        # the forward that needs gradients would use a cast that was made without
        torch.clear_autocast_cache()
    return before, after


def _read_loss(result: Any, ids: Tensor, first: int) -> Tensor:
    """The mean loss of the tokens behind `first`, whatever form the model returns it in."""
    torch = sys.modules["torch"]
    log_probs = getattr(result, "log_probs", None)
    if log_probs is not None:
        predicted = ids.shape[1] - first - 1
        return -log_probs.double().sum() / predicted
    loss = getattr(result, "loss", None)
    if loss is None:
        logits = result.logits[0, first:-1].float()
        targets = ids[0, first + 1 :]
        return torch.nn.functional.cross_entropy(logits, targets).double()
    loss = loss.detach().double()
    if loss.numel() > 1:
        # OLMo-core's head under DPO: the log-probability of the next token, at each token
        return -loss[0, first:-1].mean()
    return loss.reshape(())
