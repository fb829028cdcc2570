"""Two optimizer steps, looked at: losses, whether weights moved, and what was saved."""

import contextlib
import glob
import math
import os
from collections.abc import Iterator
from typing import Any

from .calls import Refused, call_trainer
from .records import ServerResponse

STEPS = 2
STILL = 1e-12
"""A change up to this is none: a bias that begins at 0 moves by any learning rate."""
BLOWN_UP = 1e3
"""No learning rate that trains makes weights so many times as large within two steps."""


@contextlib.contextmanager
def record_losses(response: ServerResponse) -> Iterator[list[float]]:
    """The loss of every optimizer step; from the first backward pass on the phase is `train`.

    A step minimises the sum of what its backward passes begin with: where a trainer accumulates,
    each of them begins with the loss of its micro-batch divided by their number. A pass whose
    gradients are thrown away (OLMo-core tries a batch before it trains) belongs to no step.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    backward = torch.Tensor.backward
    zero_grad = torch.optim.Optimizer.zero_grad
    accumulated = list[float]()
    losses = list[float]()

    def listen(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() == 1:
            accumulated.append(float(tensor.detach()))
        if response.phase == "construct":
            response.phase = "train"
        return call_trainer(backward, tensor, *args, **kwargs)

    def forget(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        accumulated.clear()
        return call_trainer(zero_grad, optimizer, *args, **kwargs)

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
    for loss in losses:
        if not math.isfinite(loss):
            raise Refused(f"the loss of the first {STEPS} steps is not finite: {loss}")


def require_moved(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise Refused where no tensor has moved, or where they are worthless."""
    is_compared = False
    has_moved = False
    largest = 0.0
    start = 1.0
    for name in before.keys() & after.keys():
        old, new = make_comparable(before[name].detach(), after[name].detach())
        if not new.numel():
            continue
        is_compared = True
        # a change that is no number is one too
        if not float((new - old).abs().max()) <= STILL:
            has_moved = True
        size = math.inf
        # max() of Python forgets a NaN
        if bool(new.isfinite().all()):
            size = float(new.abs().max())
        largest = max(largest, size)
        start = max(start, float(old.abs().max()))
    if is_compared and not has_moved:
        raise Refused(f"{STEPS} steps change no weight")
    if largest > BLOWN_UP * start:
        how = f"of {largest:.0e}" if math.isfinite(largest) else "that are not finite"
        raise Refused(f"{STEPS} steps make weights {how}, from at most {start:.0e}")


def make_comparable(old: Any, new: Any) -> tuple[Any, Any]:
    """Two states of a tensor, in float32 and of one shape.

    What is trained in 16 bits began at the rounded weights. An embedding that was made larger for
    new tokens is compared in the rows that were there before; of a tensor with other dimensions
    nothing is.
    """
    old = old.to(new.dtype).float()
    new = new.float()
    if old.dim() != new.dim():
        return old.flatten()[:0], new.flatten()[:0]
    common = tuple(slice(min(sizes)) for sizes in zip(old.shape, new.shape, strict=True))
    return old[common], new[common]


def read_weights(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        tensors.update(load_file(path))
    return tensors


def holds_adapter(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "adapter_config.json"))


def require_trained(folder: str, start: str) -> None:
    """Raise Refused if `folder` holds no model, one without numbers, or still that of `start`."""
    now = read_weights(folder)
    if not now:
        raise Refused("no model was saved")
    if holds_adapter(folder):
        # what is added to the model begins at 0
        before = {name: tensor * 0 for name, tensor in now.items() if "lora_B" in name}
    else:
        before = read_weights(start)
    require_moved(before, now)


def load_again(folder: str) -> None:
    """Load the saved model as whoever uses it would."""
    if holds_adapter(folder):
        from peft import AutoPeftModelForCausalLM as Auto
    else:
        from transformers import AutoModelForCausalLM as Auto
    call_trainer(Auto.from_pretrained, folder)
