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
from launcher.errors import Finding, InvalidConfig, brief

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
    wide_routing: bool = False
    """The experts' results are weighed in fp32 (transformers/models/mixtral/modeling_mixtral.py:107)."""
    divided: bool = False
    """transformers refuses a hidden size that the heads do not divide."""
    windows: str = ""
    """Which layers look back over `sliding_window` tokens alone: "" none, "all", "asked" the upper ones
    where `use_sliding_window`, or all but every so many-th, by the config's key or this default."""
    keys: Mapping[str, Any] | None = None
    """What transformers' config class takes where a key is absent, as far as it is not derived."""
    nulls: frozenset[str] = frozenset({"num_key_value_heads"})
    """Keys that the class lets be null: then they are derived."""


_NO_BIAS = {"attention_bias": False}
_LLAMA_BIAS = {"attention_bias": False, "mlp_bias": False}
_SMOLLM = {**_LLAMA_BIAS, "num_key_value_heads": 4, "tie_word_embeddings": True}
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN3 = {"attention_bias": False, "head_dim": 128, "num_key_value_heads": 32}
_GEMMA = {"attention_bias": False, "head_dim": 256, "num_key_value_heads": 16,
          "tie_word_embeddings": True}  # fmt: skip
_GEMMA3 = {**_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096}
_GEMMA2 = {**_GEMMA3, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_OLMO3 = {"attention_bias": False, "sliding_window": 4096}
_MIXTRAL = {"num_key_value_heads": 8, "num_experts_per_tok": 2}
_MIXED = {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
          "num_key_value_heads": 4, "num_experts_per_tok": 8}  # fmt: skip
_QWEN2_MOE = {**_MIXED, "num_key_value_heads": 16, "num_experts_per_tok": 4, "qkv_bias": True}
_OLMOE = {"attention_bias": False, "num_experts_per_tok": 8}
_HEAD_DIM = frozenset({"head_dim"})
_NONE: frozenset[str] = frozenset()

FAMILIES: Mapping[str, Layout] = {
    "llama": Layout(divided=True, keys=_LLAMA_BIAS, nulls=Layout().nulls | _HEAD_DIM),
    "mistral": Layout(windows="all", keys=_MISTRAL, nulls=_HEAD_DIM),
    "smollm3": Layout(windows="asked", keys=_SMOLLM),
    "granite": Layout(keys=_LLAMA_BIAS),
    "qwen2": Layout(qkv_bias=True, windows="asked", keys={"num_key_value_heads": 32}),
    "qwen3": Layout(qk_norm="head", windows="asked", keys=_QWEN3),
    "olmo": Layout(norm_kept=4, norm_weight=False, keys=_NO_BIAS),
    "olmo2": Layout(norm_kept=8, pre_norm=False, post_norm=True, qk_norm="full", keys=_NO_BIAS),
    "olmo3": Layout(norm_kept=8, pre_norm=False, post_norm=True, qk_norm="full", windows="4",
                    keys=_OLMO3),
    "phi3": Layout(fused=True, windows="all"),
    "gemma": Layout(norm_kept=8, keys=_GEMMA, nulls=_NONE),
    "gemma2": Layout(norm_kept=8, post_norm=True, divided=True, windows="2", keys=_GEMMA2, nulls=_NONE),
    "gemma3_text": Layout(norm_kept=8, post_norm=True, qk_norm="head", divided=True, windows="6",
                          keys=_GEMMA3, nulls=_NONE),
    "mixtral": Layout(experts="num_local_experts", wide_routing=True, windows="all", keys=_MIXTRAL,
                      nulls=_HEAD_DIM),
    "qwen2_moe": Layout(experts="num_experts", windows="asked", keys=_QWEN2_MOE, nulls=_NONE),
    "qwen3_moe": Layout(qk_norm="head", experts="num_experts", windows="asked", keys=_MIXED,
                        nulls=_NONE),
    "olmoe": Layout(qk_norm="full", experts="num_experts", keys=_OLMOE),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder model's widths (in elements) and weights.

    `layer` are the sizes of one layer's weights, under transformers' names; `outer` those outside the
    layers. A tied output layer is not listed twice. Of `experts` a token uses `experts_used`, each
    `intermediate` wide, and an expert of `shared` that all use. `source` says where the config was
    found. Of the layers `windowed` look back over `window` tokens alone. `capped` logits go through a
    tanh, `scores_capped` those of the attention too. `dtype` is that of
    the weights, empty where the config does not say.
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
    shared: int
    layer: Mapping[str, Size]
    outer: Mapping[str, Size]
    window: int = 0
    windowed: int = 0
    capped: bool = False
    scores_capped: bool = False

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
    def expert_weights(self) -> tuple[int, int]:
        """Elements of all experts' gate and up weights, which are one, and of their down weights."""
        wide, narrow = self.layer[f"{_EXPERTS}.gate_up_proj"], self.layer[f"{_EXPERTS}.down_proj"]
        return math.prod(wide), math.prod(narrow)

    @property
    def sizes(self) -> list[int]:
        """Elements of every weight in the model's order: the embedding, the layers, what comes after them."""
        first, *after = (math.prod(size) for size in self.outer.values())
        layer = [math.prod(size) for size in self.layer.values()]
        return [first, *layer * self.layers, *after]

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
        """The layer's linear weights by their last name: (out, in); a router is no linear module."""
        found: dict[str, tuple[int, int]] = {}
        for name, size in self.layer.items():
            if len(size) == 2 and name.endswith(".weight") and name != _ROUTER:
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
    path, source = model_config.where(name, environ, revision), f"config.json of {name}"
    config: Mapping[str, Any] = {}
    if path is not None and not (config := model_config.read(name, environ, revision)):
        raise InvalidConfig(_unknown(
            f"{path} is no config of a model: it holds no mapping of keys",
            "download it again, or name another model",
        ))  # fmt: skip
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
    if config.get("quantization_config"):
        raise InvalidConfig(_unknown(
            f"{name}: its weights are quantised (`quantization_config`), which is not described",
            "name the model that it was made from, or --shape MODEL",
        ))  # fmt: skip
    heads, hidden = reader.whole("num_attention_heads"), reader.whole("hidden_size")
    if layout.divided and hidden % heads:
        raise reader.fault(
            f"`hidden_size: {hidden}` is no multiple of `num_attention_heads: {heads}`"
        )
    kv_heads = reader.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        said = f"`num_attention_heads: {heads}` is no multiple of `num_key_value_heads: {kv_heads}`"
        raise reader.fault(said)
    head_dim = reader.whole("head_dim", hidden // heads)
    if family == "olmoe" and head_dim * heads != hidden:
        wide = f"{heads} heads of {head_dim} are not as wide as `hidden_size: {hidden}`"
        raise reader.fault(f"{wide} and the norms of q and k")
    mixed = "mlp_only_layers" in (layout.keys or {})
    inner = reader.whole("moe_intermediate_size" if mixed else "intermediate_size")
    experts = _experts(reader)
    shared = reader.whole("shared_expert_intermediate_size") if family == "qwen2_moe" else 0
    if mixed and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise InvalidConfig(
            _unknown(f"{name}: layers with and without experts are not described", _KNOWN)
        )
    vocab, tied = reader.whole("vocab_size"), reader.flag("tie_word_embeddings")
    sizes = _Sizes(
        layout, hidden, inner, heads * head_dim, kv_heads * head_dim, head_dim, experts, shared
    )
    outer: dict[str, Size] = {"model.embed_tokens.weight": (vocab, hidden)}
    if layout.norm_weight:
        outer["model.norm.weight"] = (hidden,)
    if not tied:
        outer["lm_head.weight"] = (vocab, hidden)
    # of the other families no module reads it, whatever the config holds
    biased = any(
        key in (layout.keys or {}) and reader.flag(key) for key in ("attention_bias", "qkv_bias")
    )
    layers = reader.whole("num_hidden_layers")
    window, windowed = _windows(reader, layers)
    return Shape(
        name=name, family=str(family), source=source, layout=layout, hidden=hidden,
        intermediate=inner, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=vocab, tied=tied,
        dtype=model_config.weights_type(config),
        positions=config.get("max_position_embeddings"), experts=experts,
        experts_used=reader.whole("num_experts_per_tok") if experts else 0, shared=shared,
        layer=sizes.layer(
            qkv_bias=layout.qkv_bias or biased,
            out_bias=family in _OUT_BIAS and biased,
            mlp_bias="mlp_bias" in (layout.keys or {}) and reader.flag("mlp_bias"),
        ),
        outer=outer, window=window, windowed=windowed,
        capped=family in _CAPPED and reader.value("final_logit_softcapping") is not None,
        scores_capped=family in _CAPPED and reader.value("attn_logit_softcapping") is not None,
    )  # fmt: skip


def _experts(reader: _Reader) -> int:
    """How many there are; transformers writes one name of the key for the other."""
    key = reader.layout.experts
    if not key:
        return 0
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[key]
    if (
        key in reader.config
        and other in reader.config
        and reader.config[key] != reader.config[other]
    ):
        raise reader.fault(f"`{key}` and `{other}` are two names of one number, and differ")
    return reader.whole(other if key not in reader.config and other in reader.config else key)


def _windows(reader: _Reader, layers: int) -> tuple[int, int]:
    """How far windowed layers look back, and how many they are; (0, 0) where all see everything."""
    config, said = reader.config, reader.layout.windows
    size = reader.value("sliding_window")
    if not said or not isinstance(size, int) or size < 1:
        return 0, 0
    types = config.get("layer_types")
    if said == "asked" and not config.get("use_sliding_window"):
        return 0, 0
    if said != "all" and isinstance(types, list):
        count = types.count("sliding_attention")
    elif said == "asked":
        above = config.get("max_window_layers", 28)
        count = layers - above if isinstance(above, int) else layers
    elif said == "all":
        count = layers
    else:
        every = config.get("sliding_window_pattern")
        count = layers - layers // (every if isinstance(every, int) and every > 0 else int(said))
    return (size, min(count, layers)) if count > 0 else (0, 0)


_ROUTER, _EXPERTS = "mlp.gate.weight", "mlp.experts"
_CAPPED = frozenset({"gemma2", "gemma3_text"})
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
    shared: int

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
                _ROUTER: (self.experts, self.hidden),
                f"{_EXPERTS}.gate_up_proj": (self.experts, 2 * self.inner, self.hidden),
                f"{_EXPERTS}.down_proj": (self.experts, self.hidden, self.inner),
                **self._shared(),
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

    def _shared(self) -> dict[str, Size]:
        if not self.shared:
            return {}
        name = "mlp.shared_expert"
        return {
            f"{name}.gate_proj.weight": (self.shared, self.hidden),
            f"{name}.up_proj.weight": (self.shared, self.hidden),
            f"{name}.down_proj.weight": (self.hidden, self.shared),
            f"{name}_gate.weight": (1, self.hidden),
        }

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
        """A key's value: where it is absent what transformers' class takes, null only where that derives."""
        if key not in self.config:
            return (self.layout.keys or {}).get(key, default)
        given = self.config[key]
        return default if given is None and key in self.layout.nulls else given

    def flag(self, key: str) -> bool:
        value = self.value(key, False)
        if not isinstance(value, bool):
            raise self.fault(f"`{key}` is {_shown(value)}", "it is true or false")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _LARGEST:
            said = "is missing" if key not in self.config else f"is {_shown(value)}"
            raise self.fault(
                f"`{key}` {said}", "its config.json must hold it as a whole number above 0"
            )
        return value

    def fault(
        self, message: str, help: str = "transformers does not run such a model"
    ) -> InvalidConfig:
        return InvalidConfig(
            _unknown(f"{message} in the config of {self.name or 'the model'}", help)
        )


# no size of a model comes near it
_LARGEST = 2**31


def _shown(value: object) -> str:
    return "null" if value is None else brief(repr(value), 40)


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
