"""Two optimizer steps, looked at: losses, whether weights moved, and what was saved."""

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
    bad = [loss for loss in losses if not math.isfinite(loss)]
    if bad:
        raise Refused(f"the loss of the first {STEPS} steps is not finite: {bad[0]}")


def require_moved(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise Refused where no tensor has moved, or where they are worthless."""
    names = before.keys() & after.keys()
    moved, largest, start = False, 0.0, 1.0
    for name in names:
        # what is trained in 16 bits began at the rounded weights
        new = after[name].detach()
        old, new = before[name].detach().to(new.dtype).float(), new.float()
        if not new.numel():
            continue
        # what is no number has moved too
        moved |= not float((new - old).abs().max()) <= STILL
        # max() of Python forgets a NaN
        size = float(new.abs().max()) if bool(new.isfinite().all()) else math.inf
        largest, start = max(largest, size), max(start, float(old.abs().max()))
    if names and not moved:
        raise Refused(f"{STEPS} steps change no weight")
    if largest > BLOWN_UP * start:
        how = f"of {largest:.0e}" if math.isfinite(largest) else "that are not finite"
        raise Refused(f"{STEPS} steps make weights {how}, from at most {start:.0e}")


def weights(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    paths = sorted(glob.glob(os.path.join(folder, "*.safetensors")))
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def holds_adapter(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "adapter_config.json"))


def require_trained(folder: str, start: str) -> bool:
    """Raise Refused where what lies in `folder` is no model, has no numbers, or is still that of `start`.

    False where it is `RAW` alone.
    """
    now = weights(folder)
    if not now:
        if os.path.exists(os.path.join(folder, RAW)):
            return False
        raise Refused("no model was saved")
    if holds_adapter(folder):
        # what is added to the model begins at 0
        before = {name: tensor * 0 for name, tensor in now.items() if "lora_B" in name}
    else:
        before = weights(start)
    require_moved(before, now)
    return True


def load_again(folder: str) -> None:
    """Load the saved model as whoever uses it would."""
    if holds_adapter(folder):
        from peft import AutoPeftModelForCausalLM as Auto
    else:
        from transformers import AutoModelForCausalLM as Auto
    Auto.from_pretrained(folder)


def special_tokens(folder: str) -> dict[str, int | None]:
    """The end-of-sequence token of a model's tokenizer, by its text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {tokenizer.eos_token: tokenizer.eos_token_id} if tokenizer.eos_token else {}
