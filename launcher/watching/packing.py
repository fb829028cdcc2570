"""Whether batches are packed, and whether their samples are kept apart."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from .contract import Contract
from .isolation import leak, run_on, two_samples
from .model import base_of, shape_of
from .process import Process
from .record import finite

LOOKS = 8  # micro-batches that are looked at at least


class Packing:
    """What the first batches show. `on` is None until one was looked at."""

    def __init__(self, process: Process, contract: Contract) -> None:
        self.process = process
        self.settings = process.settings
        self.record = process.record
        self.contract = contract
        self.on: bool | None = None
        self.looks = 0
        self.tested = False

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
            self.on = packed
            self.record.write("packing", state="on" if packed else "off", detail=detail)
            wanted_off = self.contract.wanted("packing") == "off"
            self.contract.seen("packing", "on" if packed else "off", final=packed and wanted_off)

    def test(
        self, module: Any, args: Any, ids: Any, kwargs: dict[str, Any], seen: dict[str, Any]
    ) -> None:
        """Once, at the first micro-batch that is packed on every rank.

        A sharded model's forward is a collective, so the ranks agree on it first; whether they ask
        each other at all depends on the settings alone, which are the same everywhere.
        """
        process = self.process
        if self.tested or not self.settings.isolation or process.step >= self.settings.within:
            return
        if process.world == 1 and not self.on:
            return
        if process.world > 1 and not self.settings.packed:
            return
        pair: Any = None
        begun = time.perf_counter()
        reason = None
        try:
            pair = two_samples(module, args, ids, kwargs, seen) if self.on else None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if not _all_agree(pair is not None, ids, process.world):
            if reason is not None:
                self.tested = process.world == 1
                self.record.write("packing_isolation", state="untested", reason=reason)
            return
        self.tested, process.testing = True, True
        try:
            before, after = leak(module, *pair)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.record.write("packing_isolation", state="untested", reason=reason)
            return
        finally:
            process.testing = False
        self.tell(module, before, after, pair, time.perf_counter() - begun)

    def tell(self, module: Any, before: float, after: float, pair: Any, seconds: float) -> None:
        inner = base_of(module)
        config = getattr(inner, "config", None)
        state, known = "untested", math.isfinite(before) and math.isfinite(after)
        if known:
            # the same shapes give the same bits; only experts that swap places do not
            tolerance = 1e-3 if shape_of(inner, config).get("experts") else 1e-6
            moved = abs(after - before) > tolerance * max(1.0, abs(before))
            state = "leaking" if moved else "isolated"
        _, _, first, second = pair
        self.record.write(
            "packing_isolation", state=state, loss=finite(before), changed_loss=finite(after),
            attention=getattr(config, "_attn_implementation", None), samples=[first, second],
            seconds=round(seconds, 4), reason=None if known else "the loss is not finite",
        )  # fmt: skip
        if state != "untested":
            self.contract.seen("packing", state)


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
