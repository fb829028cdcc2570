"""Two optimizer steps, looked at: losses, whether weights moved, and what was saved."""

from __future__ import annotations

import contextlib
import glob
import math
import os
from collections.abc import Iterator
from typing import Any

STEPS = 2
STILL = 1e-12
"""A change up to this is none: a bias that begins at 0 moves by any learning rate."""
BLOWN_UP = 1e3
"""No learning rate that trains makes weights so many times as large within two steps."""
RAW = "model_state_dict.pt"
"""What dpo.py saves of a model that OLMo-core cannot export (olmo_core_utils.py:292)."""


class Refused(Exception):
    """What no exception of the trainer's says, and what makes its result worthless."""


@contextlib.contextmanager
def losses() -> Iterator[list[float]]:
    """The loss of every backward pass within."""
    import torch

    backward, losses = torch.Tensor.backward, list[float]()

    def listen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.numel() == 1:
            losses.append(float(self.detach()))
        return backward(self, *args, **kwargs)

    torch.Tensor.backward = listen
    try:
        yield losses
    finally:
        torch.Tensor.backward = backward


def require_finite(losses: list[float]) -> None:
    """Raise Refused for a loss that is no number."""
    bad = [loss for loss in losses if not math.isfinite(loss)]
    if bad:
        raise Refused(f"the loss of the first {STEPS} steps is not finite: {bad[0]}")


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """How many tensors have moved. Raises Refused where none has, or where they are worthless."""
    names = before.keys() & after.keys()
    moved, largest, start = 0, 0.0, 1.0
    for name in names:
        # what is trained in 16 bits began at the rounded weights
        new = after[name].detach()
        old, new = before[name].detach().to(new.dtype).float(), new.float()
        if not new.numel():
            continue
        # what is no number has moved too
        moved += not float((new - old).abs().max()) <= STILL
        # max() of Python forgets a NaN
        size = float(new.abs().max()) if bool(new.isfinite().all()) else math.inf
        largest, start = max(largest, size), max(start, float(old.abs().max()))
    if names and not moved:
        raise Refused(f"{STEPS} steps change no weight")
    if largest > BLOWN_UP * start:
        how = f"of {largest:.0e}" if math.isfinite(largest) else "that are not finite"
        raise Refused(f"{STEPS} steps make weights {how}, from at most {start:.0e}")
    return moved


def weights(folder: str) -> dict[str, Any]:
    """The tensors of a model that was saved: its own files, or an adapter's."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        found.update(load_file(path))
    return found


def look_at_saved(folder: str, start: str | None) -> dict[str, Any]:
    """Raise Refused where what lies in `folder` is no model, has no numbers, or is still that of `start`."""
    now = weights(folder)
    if not now and os.path.exists(os.path.join(folder, RAW)):
        return {"raw": True, "moved": None}
    if not now:
        raise Refused("no model was saved")
    adapter = os.path.exists(os.path.join(folder, "adapter_config.json"))
    if adapter:
        # what is added to the model begins at 0
        parts = {name: tensor for name, tensor in now.items() if "lora_B" in name}
        before = {name: tensor * 0 for name, tensor in parts.items()}
    else:
        before = {} if start is None else weights(start)
    return {"tensors": len(now), "moved": compare(before, now), "adapter": adapter}


def load_again(folder: str) -> None:
    """Load the saved model as whoever uses it would."""
    if os.path.exists(os.path.join(folder, "adapter_config.json")):
        from peft import AutoPeftModelForCausalLM

        AutoPeftModelForCausalLM.from_pretrained(folder)
        return
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder)


def special_tokens(folder: str) -> dict[str, int | None]:
    """The end-of-sequence token of a model's tokenizer, by its text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {str(tokenizer.eos_token): tokenizer.eos_token_id} if tokenizer.eos_token else {}
