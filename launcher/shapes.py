"""A model's `config.json` -> `Shape`: every weight's size, exactly, and what its layers keep.

Nothing is guessed: a family that is not described here, or a missing key, is an error that names it. The
counts are held against transformers' own modules by a test. The small committed table `shapes.json` has
the configs of common models, for machines that have none of them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from launcher.backends import model_config
from launcher.errors import Finding, InvalidConfig

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What one family's decoder layer does that costs memory.

    `norm_kept`: bytes an element that a norm keeps besides its output, in transformers' own bf16 code
    (its fp32 copy of the input, and the normalised values in the type they are multiplied in).
    """

    norm_kept: int = 6
    norm_weight: bool = True
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: str = ""
    """"" none, "head" over each head's width, "full" over all of them."""
    qkv_bias: bool = False
    out_bias: bool = False
    fused: bool = False
    """One weight for q, k and v, one for gate and up."""
    experts: str = ""
    """The config's key for the number of experts."""
    keys: Mapping[str, Any] | None = None
    """Defaults of transformers' config class that differ from the general ones."""


_NO_BIAS = {"attention_bias": False}
_LLAMA_BIAS = {"attention_bias": False, "mlp_bias": False}
_GEMMA = {"attention_bias": False, "head_dim": 256, "tie_word_embeddings": True}
_MIXED = {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}

FAMILIES: Mapping[str, Layout] = {
    "llama": Layout(keys=_LLAMA_BIAS),
    "mistral": Layout(),
    "smollm3": Layout(keys={"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
    "granite": Layout(keys=_LLAMA_BIAS),
    "qwen2": Layout(qkv_bias=True),
    "qwen3": Layout(qk_norm="head", keys={"attention_bias": False, "head_dim": 128}),
    "olmo": Layout(norm_kept=4, norm_weight=False, keys={"attention_bias": False}),
    "olmo2": Layout(norm_kept=8, pre_norm=False, post_norm=True, qk_norm="full", keys=_NO_BIAS),
    "olmo3": Layout(norm_kept=8, pre_norm=False, post_norm=True, qk_norm="full", keys=_NO_BIAS),
    "phi3": Layout(fused=True),
    "gemma": Layout(norm_kept=8, keys=_GEMMA),
    "gemma2": Layout(norm_kept=8, post_norm=True, keys=_GEMMA),
    "gemma3_text": Layout(norm_kept=8, post_norm=True, qk_norm="head", keys=_GEMMA),
    "mixtral": Layout(experts="num_local_experts"),
    "qwen3_moe": Layout(qk_norm="head", experts="num_experts", keys=_MIXED),
    "olmoe": Layout(qk_norm="full", experts="num_experts", keys={"attention_bias": False}),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder model's widths (in elements) and weights.

    `layer` are the sizes of one layer's weights, under transformers' names; `outer` those outside the
    layers. A tied output layer is not listed twice. `source` says where the config was found.
    """

    name: str
    family: str
    source: str
    layout: Layout
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    dtype: str
    positions: int | None
    experts: int
    experts_used: int
    layer: Mapping[str, Size]
    outer: Mapping[str, Size]

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return sum(math.prod(size) for size in self.layer.values())

    @property
    def embedding(self) -> int:
        """Elements of the embedding, the largest weight of most models."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; shared ones are counted once."""
        outer = sum(math.prod(size) for size in self.outer.values())
        return outer + self.layers * self.layer_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: of the experts only those that are used."""
        if not self.experts:
            return self.parameters
        held = sum(math.prod(s) for name, s in self.layer.items() if ".experts." in name)
        return self.parameters - self.layers * (held - held * self.experts_used // self.experts)

    @property
    def largest(self) -> int:
        """Elements of the largest single weight."""
        sizes = (*self.layer.values(), *self.outer.values())
        return max(math.prod(size) for size in sizes)

    def smaller_than(self, elements: int) -> int:
        """Elements in all of the weights that have fewer than so many: ZeRO-3 keeps those whole."""
        few = sum(math.prod(s) for s in self.layer.values() if math.prod(s) < elements)
        return few * self.layers + sum(
            math.prod(s) for s in self.outer.values() if math.prod(s) < elements
        )

    def linears(self) -> Mapping[str, tuple[int, int]]:
        """The layer's linear weights by their last name: (out, in)."""
        found: dict[str, tuple[int, int]] = {}
        for name, size in self.layer.items():
            if len(size) == 2 and name.endswith(".weight"):
                found[name.split(".")[-2]] = (size[0], size[1])
        return found


def untied(shape: Shape) -> Shape:
    """The same model with an output layer of its own."""
    if not shape.tied:
        return shape
    own = {"lm_head.weight": (shape.vocab, shape.hidden)}
    return replace(shape, tied=False, outer={**shape.outer, **own})


def find(
    name: object,
    environ: Mapping[str, str],
    revision: str | None = None,
    replaced: Mapping[str, Any] | None = None,
) -> Shape:
    """The shape of a model by folder, hub name or committed table, in that order; no network.

    `replaced` are single config keys given beside the model. Raises InvalidConfig (`unknown-shape`) where
    no config is here, or it describes something that this module does not.
    """
    if not isinstance(name, str) or not name:
        raise InvalidConfig(_unknown("no model is named", "set `model_name_or_path`"))
    config = model_config.read(name, environ, revision)
    source = f"config.json of {name}"
    if not config:
        config, source = table().get(name.lower(), {}), f"launcher/shapes.json, {name}"
    if not config:
        raise InvalidConfig(_unknown(
            f"the shape of {name} is not known: no config.json of it is here, nor in the hub's cache",
            "download its config.json, or name a folder that has one",
        ))  # fmt: skip
    return shape_of({**config, **(replaced or {})}, name=name, source=source)


def shape_of(config: Mapping[str, Any], *, name: str = "", source: str = "config.json") -> Shape:
    """A parsed config.json -> `Shape`; raises InvalidConfig (`unknown-shape`) naming what is missing."""
    family = config.get("model_type")
    if "vision_config" in config or "audio_config" in config:
        raise InvalidConfig(_unknown(f"{name}: {family} has more than a language model", _KNOWN))
    layout = FAMILIES.get(family) if isinstance(family, str) else None
    if layout is None:
        said = f"`model_type: {family}`" if family else "no `model_type`"
        raise InvalidConfig(_unknown(f"{name}: a model with {said} is not described", _KNOWN))
    reader = _Reader(config, layout, name)
    heads = reader.whole("num_attention_heads")
    hidden = reader.whole("hidden_size")
    kv_heads = reader.whole("num_key_value_heads", heads)
    head_dim = reader.whole("head_dim", hidden // heads)
    inner = reader.whole("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size")
    # transformers writes one name for the other
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
    key = layout.experts if layout.experts in config else other.get(layout.experts, "")
    experts = reader.whole(key if key in config else layout.experts) if layout.experts else 0
    if family == "qwen3_moe" and (
        config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    ):
        raise InvalidConfig(
            _unknown(f"{name}: layers with and without experts are not described", _KNOWN)
        )
    vocab, tied = reader.whole("vocab_size"), bool(reader.value("tie_word_embeddings", False))
    sizes = _Sizes(layout, hidden, inner, heads * head_dim, kv_heads * head_dim, head_dim, experts)
    outer: dict[str, Size] = {"model.embed_tokens.weight": (vocab, hidden)}
    if layout.norm_weight:
        outer["model.norm.weight"] = (hidden,)
    if not tied:
        outer["lm_head.weight"] = (vocab, hidden)
    # of the other families no module reads it, whatever the config holds
    biased = "attention_bias" in (layout.keys or {}) and bool(reader.value("attention_bias", False))
    return Shape(
        name=name, family=str(family), source=source, layout=layout, hidden=hidden,
        intermediate=inner, layers=reader.whole("num_hidden_layers"), heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, vocab=vocab, tied=tied,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        positions=config.get("max_position_embeddings"), experts=experts,
        experts_used=reader.whole("num_experts_per_tok") if experts else 0,
        layer=sizes.layer(
            qkv_bias=layout.qkv_bias or biased,
            out_bias=family in _OUT_BIAS and biased,
            mlp_bias="mlp_bias" in (layout.keys or {}) and bool(reader.value("mlp_bias", False)),
        ),
        outer=outer,
    )  # fmt: skip


_OUT_BIAS = frozenset({"llama", "granite", "smollm3", "olmo", "olmo2", "olmo3", "gemma", "gemma2",
                       "gemma3_text", "qwen3", "qwen3_moe", "olmoe"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Sizes:
    layout: Layout
    hidden: int
    inner: int
    query: int
    key: int
    head_dim: int
    experts: int

    def layer(self, *, qkv_bias: bool, out_bias: bool, mlp_bias: bool) -> dict[str, Size]:
        sizes = {**self._attention(qkv_bias, out_bias), **self._mlp(mlp_bias)}
        for name in self._norms():
            sizes[f"{name}.weight"] = (self.hidden,)
        return sizes

    def _attention(self, qkv_bias: bool, out_bias: bool) -> dict[str, Size]:
        sizes: dict[str, Size] = {}
        if self.layout.fused:
            sizes["self_attn.qkv_proj.weight"] = (self.query + 2 * self.key, self.hidden)
        else:
            for name, width in (("q", self.query), ("k", self.key), ("v", self.key)):
                sizes[f"self_attn.{name}_proj.weight"] = (width, self.hidden)
                if qkv_bias:
                    sizes[f"self_attn.{name}_proj.bias"] = (width,)
        sizes["self_attn.o_proj.weight"] = (self.hidden, self.query)
        if out_bias:
            sizes["self_attn.o_proj.bias"] = (self.hidden,)
        if self.layout.qk_norm:
            whole = self.layout.qk_norm == "full"
            sizes["self_attn.q_norm.weight"] = (self.query if whole else self.head_dim,)
            sizes["self_attn.k_norm.weight"] = (self.key if whole else self.head_dim,)
        return sizes

    def _mlp(self, bias: bool) -> dict[str, Size]:
        if self.experts:
            return {
                "mlp.gate.weight": (self.experts, self.hidden),
                "mlp.experts.gate_up_proj": (self.experts, 2 * self.inner, self.hidden),
                "mlp.experts.down_proj": (self.experts, self.hidden, self.inner),
            }
        if self.layout.fused:
            return {
                "mlp.gate_up_proj.weight": (2 * self.inner, self.hidden),
                "mlp.down_proj.weight": (self.hidden, self.inner),
            }
        sizes: dict[str, Size] = {}
        for name, out, width in (
            ("gate", self.inner, self.hidden),
            ("up", self.inner, self.hidden),
            ("down", self.hidden, self.inner),
        ):
            sizes[f"mlp.{name}_proj.weight"] = (out, width)
            if bias:
                sizes[f"mlp.{name}_proj.bias"] = (out,)
        return sizes

    def _norms(self) -> tuple[str, ...]:
        if not self.layout.norm_weight:
            return ()
        if self.layout.pre_norm and self.layout.post_norm:
            return ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                    "post_feedforward_layernorm")  # fmt: skip
        if self.layout.post_norm:
            return ("post_attention_layernorm", "post_feedforward_layernorm")
        return ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class _Reader:
    """The config's keys, transformers' defaults for a family, and errors that name what is missing."""

    config: Mapping[str, Any]
    layout: Layout
    name: str

    def value(self, key: str, default: Any = None) -> Any:
        given = self.config.get(key)
        return given if given is not None else (self.layout.keys or {}).get(key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            said = "is missing" if value is None else f"is {value!r}"
            raise InvalidConfig(_unknown(
                f"`{key}` {said} in the config of {self.name or 'the model'}",
                "its config.json must hold it as a whole number above 0",
            ))  # fmt: skip
        return value


@functools.cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Common models by lower-case hub name; aliases are written out."""
    text = resources.files("launcher").joinpath("shapes.json").read_text(encoding="utf-8")
    data = json.loads(text)
    entries: dict[str, Mapping[str, Any]] = {}
    for entry in data["models"]:
        for name in entry["names"]:
            entries[name.lower()] = entry["config"]
    return entries


_KNOWN = "described are: " + ", ".join(sorted(FAMILIES))


def _unknown(message: str, help: str) -> Finding:
    return Finding(
        severity="error", layer="launch", code="unknown-shape", key="args.model_name_or_path",
        message=message, help=help,
    )  # fmt: skip
