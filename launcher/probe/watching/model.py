"""What was loaded: the model's class, attention and shape; the device, its memory, and the packages."""

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .process import EventLog, ProbePiece, Process

PACKAGES = "torch transformers accelerate deepspeed trl liger_kernel flash_attn bitsandbytes peft".split()


def base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def described(model: Any, record: EventLog) -> dict[str, Any]:
    inner = model
    with record.quietly("unwrap"):
        inner = base_of(model)
    config = getattr(inner, "config", None)
    sizes = [(numel_of(p), p.requires_grad) for p in model.parameters()]
    shape: dict[str, Any] = {}
    with record.quietly("shape"):
        shape = shape_of(inner)
    return {
        "class": type(inner).__name__,
        "model_type": getattr(config, "model_type", None),
        "attention": getattr(config, "_attn_implementation", None) or _olmo_attention(inner),
        "dtype": str(next(iter(model.parameters())).dtype).removeprefix("torch."),
        "parameters": sum(n for n, _ in sizes),
        "trainable": sum(n for n, trainable in sizes if trainable),
        **shape,
    }


def numel_of(parameter: Any) -> int:
    # DeepSpeed ZeRO-3 leaves a placeholder of size 0 and keeps the real count beside it
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def shape_of(model: Any) -> dict[str, Any]:
    """What the cost of a token follows from; the text part of a model that also sees."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    layers: Any
    if config is None and (block := _olmo_block(model)) is not None:
        table, text, config = model.embeddings, getattr(block, "attention", None), model
        layers, hidden, heads = len(model.blocks), getattr(model, "d_model", None), "n_heads"
        experts = getattr(getattr(block, "feed_forward_moe", None), "num_experts", None)
    else:
        table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        layers, hidden = getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", None)
        heads = "num_attention_heads"
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        found = (getattr(text, name, None) for name in names)
        experts = next((one for one in found if isinstance(one, int)), None)
    weight = getattr(table, "weight", None)
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": getattr(text, heads, None),
        "head_dim": getattr(text, "head_dim", None),
        "embedding": None if weight is None else numel_of(weight),
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
        "experts": experts,
        "checkpointing": bool(getattr(model, "is_gradient_checkpointing", False)),
    }


def _olmo_block(model: Any) -> Any:
    blocks: Any = getattr(model, "blocks", None)
    return next(iter(blocks.values()), None) if hasattr(blocks, "values") else None


def _olmo_attention(model: Any) -> str | None:
    """The attention of an OLMo-core model, under transformers' names; None for any other."""
    backend = getattr(getattr(_olmo_block(model), "attention", None), "backend", None)
    name = type(backend).__name__.lower().replace("attention", "").replace("_", "")
    flash = next((f"flash_attention_{version}" for version in (4, 3, 2) if f"flash{version}" in name), None)
    return flash or ("sdpa" if "torch" in name else None)


def device(cpu: bool) -> dict[str, Any]:
    """The accelerator by name; what its peak is worth is looked up when the run is judged."""
    torch = torch_in_use(cpu)
    name, gib = "cpu", None
    if torch is not None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, gib = properties.name, round(properties.total_memory / 2**30, 2)
    versions = {}
    for package in PACKAGES:
        if package in sys.modules:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
    return {"name": name, "total_gib": gib, "versions": versions}


def torch_in_use(cpu: bool) -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and not cpu and torch.cuda.is_initialized() else None


_COUNTERS = {"allocated_gib": "allocated_bytes", "reserved_gib": "reserved_bytes"}


class PeakMemory(ProbePiece):
    """Peaks of torch's counters. Upstream reads them too, so they are never reset."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.phases: set[str] = set()

    def peaks(self) -> dict[str, float]:
        counters = self.counters()
        return {name: counters[f"peak_{name}"] for name in _COUNTERS if counters}

    def counters(self) -> dict[str, float]:
        """What is allocated and reserved, in GiB; nothing where no GPU is in use."""
        torch = torch_in_use(self.settings.cpu)
        if torch is None:
            return {}
        counters, stats = dict[str, float](), torch.cuda.memory_stats_as_nested_dict()
        for name, counter in _COUNTERS.items():
            sizes = stats.get(counter, {}).get("all", {})
            counters[name] = round(sizes.get("current", 0) / 2**30, 3)
            counters[f"peak_{name}"] = round(sizes.get("peak", 0) / 2**30, 3)
        return counters

    def mark(self, phase: str, *, again: bool = False) -> None:
        """Memory at the end of a phase, once each unless it ends `again`."""
        if phase in self.phases and not again:
            return
        self.phases.add(phase)
        with self.record.quietly("memory"):
            counters = self.counters()
            with contextlib.suppress(Exception):
                import resource

                # KiB
                counters["peak_host_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)
            self.record.write("memory", phase=phase, step=self.process.at, **counters)


FREQUENCIES = "inv_freq"
"""How the names of the buffers with rotary frequencies end, in every model of transformers."""
ROUNDED = 1e-5
"""The least relative error of a frequency that is no rounding of float32: bfloat16 makes 4e-3 of it."""

LEAST = 1e-30
"""Below every frequency but 0."""


class Rotary(ProbePiece):
    """Whether the model's rotary frequencies are those that its config describes, and are put right where not.

    DeepSpeed's `zero.Init` makes every float tensor in the precision of training, so that transformers computes
    the frequencies in bfloat16 under ZeRO-3; a cast of the whole model rounds them, too. They are then off by up
    to 0.4 %: position 1,000 is turned by as much as 3 radians more or less than in what later loads the model.
    deepspeedai/DeepSpeed#4932, huggingface/transformers#28596.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.largest_error = 0.0

    def restore(self, model: Any) -> None:
        """Replace rounded frequencies by those that the module's class computes of its config."""
        for frequency in frequencies(model):
            error = frequency.error()
            if frequency.true is not None and error >= ROUNDED:
                self.largest_error = max(self.largest_error, error)
                setattr(frequency.module, frequency.name, frequency.true.to(frequency.tensor.device))

    def report(self, model: Any) -> None:
        """Write the state of the model that is about to be trained: exact, restored or rounded."""
        errors = [frequency.error() for frequency in frequencies(model)]
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
    """One tensor of a rotary embedding; `true` is None where its class cannot be made of a config."""

    module: Any
    name: str
    tensor: Any
    true: Any

    def error(self) -> float:
        """The largest error of a frequency, as a share of it."""
        if self.true is None:
            # what a rounding to this precision can make of it
            return float(sys.modules["torch"].finfo(self.tensor.dtype).eps) / 2
        true = self.true.detach().cpu().float()
        difference = (self.tensor.detach().cpu().float() - true).abs()
        # some models do not turn a part of each head: those frequencies are 0, and exact in any precision
        return float((difference / true.abs().clamp(min=LEAST)).max())


def frequencies(model: Any) -> Iterator[Frequency]:
    """The frequencies of every rotary embedding in the model."""
    modules = model.named_modules() if hasattr(model, "named_modules") else ()
    for _, module in modules:
        names = [name for name in (*vars(module), *module._buffers) if name.endswith(FREQUENCIES)]
        tensors = {name: getattr(module, name) for name in names}
        tensors = {name: tensor for name, tensor in tensors.items() if hasattr(tensor, "dtype") and not tensor.is_meta}
        if not tensors:
            continue
        fresh = None
        # a class that is made in another way leaves its precision alone to tell
        with contextlib.suppress(Exception):
            fresh = type(module)(module.config)
        for name, tensor in tensors.items():
            true = getattr(fresh, name, None)
            known = true is not None and true.shape == tensor.shape
            yield Frequency(module, name, tensor, true if known else None)
