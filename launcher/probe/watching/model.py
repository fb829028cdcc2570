"""The model's class, attention, shape and frequencies; the device and its memory."""

import contextlib
import importlib.metadata
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .process import EventLog, Module, ProbePiece, Process, Tensor

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "trl",
    "liger_kernel",
    "flash_attn",
    "bitsandbytes",
    "peft",
)
GIB = 2**30


def find_base(model: Module) -> Module:
    """The model without its adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def describe(model: Module, record: EventLog) -> dict[str, Any]:
    """The event `model`."""
    base = model
    with record.quietly("unwrap"):
        base = find_base(model)
    config = getattr(base, "config", None)
    shape: dict[str, Any] = {}
    with record.quietly("shape"):
        shape = describe_shape(base)
    parameters = list(model.parameters())
    return {
        "class": type(base).__name__,
        "model_type": getattr(config, "model_type", None),
        "attention": getattr(config, "_attn_implementation", None) or _name_olmo_attention(base),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "parameters": sum(map(count_elements, parameters)),
        "trainable": sum(count_elements(each) for each in parameters if each.requires_grad),
        **shape,
    }


def count_elements(parameter: Tensor) -> int:
    # DeepSpeed ZeRO-3 leaves a placeholder of size 0 and keeps the real count beside it
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def describe_shape(model: Module) -> dict[str, Any]:
    """The figures that the cost of a token follows from."""
    config = getattr(model, "config", None)
    block = _find_olmo_block(model)
    table: Any = None
    if config is None and block is not None:
        table = model.embeddings
        attention = getattr(block, "attention", None)
        shape = {
            "layers": len(model.blocks),
            "hidden": getattr(model, "d_model", None),
            "heads": getattr(attention, "n_heads", None),
            "head_dim": getattr(attention, "head_dim", None),
            "experts": getattr(getattr(block, "feed_forward_moe", None), "num_experts", None),
        }
    else:
        if hasattr(model, "get_input_embeddings"):
            table = model.get_input_embeddings()
        # a model that also sees has a config of its text part
        text = getattr(config, "text_config", None) or config
        shape = {
            "layers": getattr(text, "num_hidden_layers", None),
            "hidden": getattr(text, "hidden_size", None),
            "heads": getattr(text, "num_attention_heads", None),
            "head_dim": getattr(text, "head_dim", None),
            "experts": _count_experts(text),
        }
    weight = getattr(table, "weight", None)
    return {
        **shape,
        "embedding": None if weight is None else count_elements(weight),
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
        "checkpointing": bool(getattr(model, "is_gradient_checkpointing", False)),
    }


def _count_experts(config: Any) -> int | None:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        number = getattr(config, name, None)
        if isinstance(number, int):
            return number
    return None


def _find_olmo_block(model: Module) -> Any:
    """The first block of an OLMo-core model; None for any other."""
    blocks: Any = getattr(model, "blocks", None)
    return next(iter(blocks.values()), None) if hasattr(blocks, "values") else None


def _name_olmo_attention(model: Module) -> str | None:
    """The attention of an OLMo-core model, under transformers' names; None for any other."""
    backend = getattr(getattr(_find_olmo_block(model), "attention", None), "backend", None)
    name = type(backend).__name__.lower().replace("attention", "").replace("_", "")
    for version in (4, 3, 2):
        if f"flash{version}" in name:
            return f"flash_attention_{version}"
    return "sdpa" if "torch" in name else None


def describe_device(cpu: bool) -> dict[str, Any]:
    """The event `device`."""
    torch = find_torch(cpu)
    name = "cpu"
    gib = None
    if torch is not None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name = properties.name
        gib = round(properties.total_memory / GIB, 2)
    versions = {}
    for package in PACKAGES:
        if package in sys.modules:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
    return {"name": name, "total_gib": gib, "versions": versions}


def find_torch(cpu: bool) -> Any:
    """The module torch if it uses a GPU; None otherwise."""
    torch = sys.modules.get("torch")
    if torch is None or cpu or not torch.cuda.is_initialized():
        return None
    return torch


class PeakMemory(ProbePiece):
    """Memory by torch's counters, in GiB. Upstream reads the peaks too, so they are never reset."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.phases: set[str] = set()

    def counters(self) -> dict[str, float]:
        """What is allocated and reserved; empty if no GPU is in use."""
        torch = find_torch(self.settings.cpu)
        if torch is None:
            return {}
        counters = {}
        stats = torch.cuda.memory_stats_as_nested_dict()
        for kind in ("allocated", "reserved"):
            sizes = stats.get(f"{kind}_bytes", {}).get("all", {})
            counters[f"{kind}_gib"] = round(sizes.get("current", 0) / GIB, 3)
            counters[f"peak_{kind}_gib"] = round(sizes.get("peak", 0) / GIB, 3)
        return counters

    def mark(self, phase: str, *, again: bool = False) -> None:
        """Record memory at the end of a phase: the first time only, unless it ends `again`."""
        if phase in self.phases and not again:
            return
        self.phases.add(phase)
        with self.record.quietly("memory"):
            kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.record.write(
                "memory",
                phase=phase,
                step=self.process.at,
                **self.counters(),
                peak_host_gib=round(kib / 2**20, 3),
            )


FREQUENCIES = "inv_freq"
"""How the names of the buffers with rotary frequencies end, in every model of transformers."""

ROUNDED = 1e-5
"""The least relative error of a frequency that float32 does not explain; bfloat16 makes 4e-3."""

LEAST = 1e-30
"""Below every frequency but 0."""


class Rotary(ProbePiece):
    """Whether the model's rotary frequencies are those of its config; restores rounded ones.

    DeepSpeed's `zero.Init` creates every float tensor in the precision of training, so transformers
    computes the frequencies in bfloat16 under ZeRO-3; a cast of the whole model rounds them, too.
    They are then off by up to 0.4 %: position 1,000 is turned by up to 3 radians more or less than
    in what later loads the model. deepspeedai/DeepSpeed#4932, huggingface/transformers#28596.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.largest_error = 0.0

    def restore(self, model: Module) -> list[float]:
        """Replace rounded frequencies by computed ones; returns the errors that remain."""
        errors = []
        for frequency in find_frequencies(model):
            error = frequency.error()
            if frequency.true is not None and error >= ROUNDED:
                self.largest_error = max(self.largest_error, error)
                frequency.restore()
                error = 0.0
            errors.append(error)
        return errors

    def report(self, model: Module) -> None:
        """Restore the model that is about to be trained, and record its state."""
        errors = self.restore(model)
        if not errors:
            return
        if max(errors) >= ROUNDED:
            state = "rounded"
        elif self.largest_error:
            state = "restored"
        else:
            state = "exact"
        self.record.write("rotary", state=state, largest_error=max(self.largest_error, *errors))


@dataclass(frozen=True, slots=True)
class Frequency:
    """One tensor of a rotary embedding; `true` is None if the config does not give its values."""

    module: Module
    name: str
    tensor: Tensor
    true: Tensor

    def error(self) -> float:
        """The largest relative error of a frequency."""
        if self.true is None:
            # what a rounding to this precision can make of it
            return float(sys.modules["torch"].finfo(self.tensor.dtype).eps) / 2
        true = self.true.detach().cpu().float()
        difference = (self.tensor.detach().cpu().float() - true).abs()
        # some models do not turn a part of each head: 0 is exact in any precision
        return float((difference / true.abs().clamp(min=LEAST)).max())

    def restore(self) -> None:
        setattr(self.module, self.name, self.true.to(self.tensor.device))


def find_frequencies(model: Module) -> Iterator[Frequency]:
    """The frequencies of every rotary embedding in the model."""
    modules = model.modules() if hasattr(model, "modules") else ()
    for module in modules:
        fresh: Any = None
        for name in (*vars(module), *module._buffers):
            if not name.endswith(FREQUENCIES):
                continue
            tensor = getattr(module, name)
            if not hasattr(tensor, "dtype") or tensor.is_meta:
                continue
            if fresh is None:
                # the precision tells of a class that takes something else than a config
                with contextlib.suppress(Exception):
                    fresh = type(module)(module.config)
            true: Any = getattr(fresh, name, None)
            if true is not None and true.shape != tensor.shape:
                true = None
            yield Frequency(module, name, tensor, true)
