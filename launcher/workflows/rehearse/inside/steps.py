"""Two optimizer steps, looked at: losses, whether weights moved, and what was saved."""

import contextlib
import glob
import math
import os
from collections.abc import Iterator
from typing import Any

from .calls import Refused, call_trainer

STEPS = 2
STILL = 1e-12
"""A change up to this is none: a bias that begins at 0 moves by any learning rate."""
BLOWN_UP = 1e3
"""No learning rate that trains makes weights so many times as large within two steps."""
RAW = "model_state_dict.pt"
"""What dpo.py saves, at commits before #1671, of a model that OLMo-core cannot export."""


@contextlib.contextmanager
def losses(report: dict[str, Any]) -> Iterator[list[float]]:
    """The loss of every optimizer step within; `report` says from the first backward pass on that it trains.

    A step minimises the sum of what its backward passes begin with: where a trainer accumulates, each of them
    begins with the loss of its micro-batch divided by their number. A pass whose gradients are thrown away
    (OLMo-core tries a batch before it trains) belongs to no step.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    backward = torch.Tensor.backward
    zero_grad = torch.optim.Optimizer.zero_grad
    accumulated = list[float]()
    losses = list[float]()

    def listen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.numel() == 1:
            accumulated.append(float(self.detach()))
        if report["phase"] == "construct":
            report["phase"] = "train"
        return call_trainer(backward, self, *args, **kwargs)

    def forget(self: Any, *args: Any, **kwargs: Any) -> Any:
        accumulated.clear()
        return call_trainer(zero_grad, self, *args, **kwargs)

    def end_step(*_: Any) -> None:
        if accumulated:
            losses.append(sum(accumulated))
        accumulated.clear()

    torch.Tensor.backward = listen
    torch.optim.Optimizer.zero_grad = forget
    hook = register_optimizer_step_post_hook(end_step)
    try:
        yield losses
    finally:
        hook.remove()
        torch.Tensor.backward = backward
        torch.optim.Optimizer.zero_grad = zero_grad


def require_finite(losses: list[float]) -> None:
    bad = [loss for loss in losses if not math.isfinite(loss)]
    if bad:
        raise Refused(f"the loss of the first {STEPS} steps is not finite: {bad[0]}")


def require_moved(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise Refused where no tensor has moved, or where they are worthless."""
    names = before.keys() & after.keys()
    compared = False
    moved, largest, start = False, 0.0, 1.0
    for name in names:
        old, new = comparable(before[name].detach(), after[name].detach())
        if not new.numel():
            continue
        compared = True
        # what is no number has moved too
        moved |= not float((new - old).abs().max()) <= STILL
        # max() of Python forgets a NaN
        size = float(new.abs().max()) if bool(new.isfinite().all()) else math.inf
        largest, start = max(largest, size), max(start, float(old.abs().max()))
    if compared and not moved:
        raise Refused(f"{STEPS} steps change no weight")
    if largest > BLOWN_UP * start:
        how = f"of {largest:.0e}" if math.isfinite(largest) else "that are not finite"
        raise Refused(f"{STEPS} steps make weights {how}, from at most {start:.0e}")


def comparable(old: Any, new: Any) -> tuple[Any, Any]:
    """Two states of a tensor, in float32 and of one shape.

    What is trained in 16 bits began at the rounded weights. An embedding that was made larger for new tokens
    is compared in the rows that were there before; of a tensor with other dimensions nothing is.
    """
    old = old.to(new.dtype).float()
    new = new.float()
    if old.dim() != new.dim():
        return old.flatten()[:0], new.flatten()[:0]
    common = tuple(slice(min(sizes)) for sizes in zip(old.shape, new.shape, strict=True))
    return old[common], new[common]


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
    call_trainer(Auto.from_pretrained, folder)


def special_tokens(folder: str) -> dict[str, int | None]:
    """The end-of-sequence token of a model's tokenizer, by its text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {tokenizer.eos_token: tokenizer.eos_token_id} if tokenizer.eos_token else {}
