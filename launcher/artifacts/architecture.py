"""A model's `config.json` -> `Shape`: every weight's size, exactly, and what its layers keep.

Nothing is guessed: a family that is not described here, or a missing key, is an error that names
it. The counts are compared with transformers' own modules by a test. The small committed table
`shapes.json` has the configs of common models, for machines that have none of them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.artifacts import model_config
from launcher.errors import InvalidConfig, launch_finding, shorten
from launcher.lazy_dataclass import dataclass
from launcher.paths import PACKAGE

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What one family's decoder layer does that costs memory.

    `norm_kept`: bytes an element that a norm keeps besides its output, in transformers' own bf16
    code (its fp32 copy of the input, and the normalised values in the type they are multiplied in).
    """

    norm_kept: int = 6
    post_norm: bool = False  # the norms lie behind the attention and the MLP, not before them
    qk_norm: str = ""  # "" none, "head" over each head's width, "full" over all of them
    qkv_bias: bool = False
    divided: bool = False  # transformers refuses a hidden size that the heads do not divide
    windows: str = ""
    """Whether layers look back over `sliding_window` tokens alone: "" never, "always" all or most
    of them, "switchable" where `use_sliding_window`.
    """
    keys: Mapping[str, Any]
    """What transformers' config class takes where a key is absent, as far as it is not derived."""
    nulls: frozenset[str] = frozenset({"num_key_value_heads"})
    """Keys that the class lets be null: then they are derived."""


_NO_BIAS = {"attention_bias": False}
_LLAMA = {"attention_bias": False, "mlp_bias": False}
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN3 = {"attention_bias": False, "head_dim": 128, "num_key_value_heads": 32}
_OLMO2 = Layout(norm_kept=8, post_norm=True, qk_norm="full", keys=_NO_BIAS)

FAMILIES: Mapping[str, Layout] = {
    "llama": Layout(
        divided=True, keys=_LLAMA, nulls=frozenset({"num_key_value_heads", "head_dim"})
    ),
    "mistral": Layout(windows="always", keys=_MISTRAL, nulls=frozenset({"head_dim"})),
    "granite": Layout(keys=_LLAMA),
    "qwen2": Layout(qkv_bias=True, windows="switchable", keys={"num_key_value_heads": 32}),
    "qwen3": Layout(qk_norm="head", windows="switchable", keys=_QWEN3),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, windows="always", keys={**_NO_BIAS, "sliding_window": 4096}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder model's widths (in elements) and weights.

    `layer` are the sizes of one layer's weights, under transformers' names; `outer` those outside
    the layers. A tied output layer is not listed twice. `source` says where the config was found.
    `window` is how far layers look back that do not see everything. `dtype` is that of the weights,
    empty where the config does not say. `query` and `key` are the widths of all such heads
    together.
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
    layer: Mapping[str, Size]
    outer: Mapping[str, Size]
    window: int = 0

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        return sum(math.prod(size) for size in self.layer.values())

    @property
    def embedding(self) -> int:
        """Elements of the embedding, the largest weight of most models."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; shared ones are counted once."""
        return sum(self.sizes)

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: an embedding only looked up is none."""
        if self.tied:
            return self.parameters
        return self.parameters - self.embedding

    @property
    def sizes(self) -> list[int]:
        """Elements of every weight in the model's order: the embedding, the layers, what comes
        after them.
        """
        first, *after = (math.prod(size) for size in self.outer.values())
        layer = [math.prod(size) for size in self.layer.values()]
        return [first, *layer * self.layers, *after]

    def smaller_than(self, elements: int) -> int:
        """Elements in all of the weights that have fewer than so many: ZeRO-3 keeps those whole."""
        return sum(size for size in self.sizes if size < elements)

    def linears(self) -> Mapping[str, tuple[int, int]]:
        """(out, into) of each linear weight of a layer, by its name such as `q_proj`."""
        linears: dict[str, tuple[int, int]] = {}
        for name, size in self.layer.items():
            if len(size) == 2:
                linears[name.split(".")[-2]] = (size[0], size[1])
        return linears

    @property
    def linear_elements(self) -> int:
        """Elements of all layers' linear weights."""
        return self.layers * sum(math.prod(size) for size in self.linears().values())

    @property
    def widest_linear(self) -> int:
        """Elements of the largest linear weight of a layer."""
        return max(math.prod(size) for size in self.linears().values())


def untie_embeddings(shape: Shape) -> Shape:
    if not shape.tied:
        return shape
    output = (shape.vocab, shape.hidden)
    return replace(shape, tied=False, outer={**shape.outer, "lm_head.weight": output})


def find(
    name: object,
    environ: Mapping[str, str],
    revision: str | None = None,
    replaced: Mapping[str, Any] | None = None,
) -> Shape:
    """The shape of a model by folder, hub name or committed table, in that order; no network.

    `replaced` are single config keys that stand beside the model. Raises InvalidConfig
    (`unknown-shape`) where no config is here, or it describes something that this module does not.
    """
    if not isinstance(name, str) or not name:
        raise _report_unknown("no model is named", "set `model_name_or_path`")
    source = f"config.json of {name}"
    config = model_config.read_model_config(name, environ, revision)
    if not config:
        path = model_config.find_config_file(name, environ, revision)
        if path is not None:
            message = f"{path} is not a model config: it is not a mapping"
            raise _report_unknown(message, "download it again, or name another model")
        source = f"launcher/artifacts/shapes.json, {name}"
        config = load_known_shapes().get(name.lower(), {})
    if not config:
        where = "no config.json of it is here, nor in the hub's cache"
        help = "download its config.json, or name a folder that has one"
        raise _report_unknown(f"the shape of {name} is not known: {where}", help)
    return parse_shape({**config, **(replaced or {})}, name=name, source=source)


def parse_shape(config: Mapping[str, Any], *, name: str = "", source: str = "config.json") -> Shape:
    """A parsed config.json -> `Shape`; raises InvalidConfig (`unknown-shape`) naming what is
    missing.
    """
    family = config.get("model_type")
    if "vision_config" in config or "audio_config" in config:
        raise _report_unknown(f"{name}: {family} has more than a language model", _DESCRIBED)
    if not isinstance(family, str) or family not in FAMILIES:
        kind = f"`model_type: {family}`" if family else "no `model_type`"
        raise _report_unknown(f"{name}: a model with {kind} is not described", _DESCRIBED)
    if config.get("quantization_config"):
        message = (
            f"{name}: its weights are quantised (`quantization_config`), which is not described"
        )
        raise _report_unknown(message, "name the model that it was made from, or --shape MODEL")
    layout = FAMILIES[family]
    reader = _ConfigReader(config, layout, name)
    heads = reader.whole("num_attention_heads")
    hidden = reader.whole("hidden_size")
    kv_heads = reader.whole("num_key_value_heads", heads)
    head_count = f"`num_attention_heads: {heads}`"
    if layout.divided and hidden % heads:
        raise reader.fault(f"`hidden_size: {hidden}` is not a multiple of {head_count}")
    if heads % kv_heads:
        raise reader.fault(f"{head_count} is not a multiple of `num_key_value_heads: {kv_heads}`")
    vocab = reader.whole("vocab_size")
    shape = Shape(
        name=name,
        family=family,
        source=source,
        layout=layout,
        hidden=hidden,
        intermediate=reader.whole("intermediate_size"),
        layers=reader.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=reader.whole("head_dim", hidden // heads),
        vocab=vocab,
        tied=True,
        dtype=model_config.find_weights_type(config),
        layer={},
        outer={"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)},
        window=reader.window(),
    )
    shape = replace(shape, layer=_size_layer(reader, shape))
    if reader.flag("tie_word_embeddings"):
        return shape
    return untie_embeddings(shape)


def _size_layer(reader: _ConfigReader, shape: Shape) -> dict[str, Size]:
    """The sizes of one layer's weights in transformers' order."""
    layout = shape.layout
    hidden = shape.hidden
    inner = shape.intermediate
    # a family whose class does not have the key reads none, whatever the config holds
    biased = "attention_bias" in layout.keys and reader.flag("attention_bias")
    mlp_bias = "mlp_bias" in layout.keys and reader.flag("mlp_bias")
    qkv_bias = layout.qkv_bias or biased
    linears = (
        ("self_attn.q_proj", shape.query, hidden, qkv_bias),
        ("self_attn.k_proj", shape.key, hidden, qkv_bias),
        ("self_attn.v_proj", shape.key, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, shape.query, biased),
        ("mlp.gate_proj", inner, hidden, mlp_bias),
        ("mlp.up_proj", inner, hidden, mlp_bias),
        ("mlp.down_proj", hidden, inner, mlp_bias),
    )
    sizes: dict[str, Size] = {}
    for name, out, into, bias in linears:
        sizes[f"{name}.weight"] = (out, into)
        if bias:
            sizes[f"{name}.bias"] = (out,)
        if layout.qk_norm == "full" and name == "self_attn.o_proj":
            sizes["self_attn.q_norm.weight"] = (shape.query,)
            sizes["self_attn.k_norm.weight"] = (shape.key,)
        if layout.qk_norm == "head" and name == "self_attn.o_proj":
            sizes["self_attn.q_norm.weight"] = (shape.head_dim,)
            sizes["self_attn.k_norm.weight"] = (shape.head_dim,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if layout.post_norm:
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
    for name in norms:
        sizes[f"{name}.weight"] = (hidden,)
    return sizes


# no size of a model comes near it
_LARGEST = 2**31


@dataclass(frozen=True, slots=True)
class _ConfigReader:
    """The config's keys, else transformers' defaults for a family."""

    config: Mapping[str, Any]
    layout: Layout
    name: str

    def value(self, key: str, default: Any = None) -> Any:
        """A key's value: where it is absent what transformers' class takes, null only where that
        derives.
        """
        if key not in self.config:
            return self.layout.keys.get(key, default)
        value = self.config[key]
        if value is None and key in self.layout.nulls:
            return default
        return value

    def flag(self, key: str) -> bool:
        value = self.value(key, False)
        if not isinstance(value, bool):
            raise self.fault(f"`{key}` is {_render_value(value)}", "it is true or false")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _LARGEST:
            fault = f"`{key}` is missing"
            if key in self.config:
                fault = f"`{key}` is {_render_value(value)}"
            raise self.fault(fault, "its config.json must hold it as a whole number above 0")
        return value

    def window(self) -> int:
        """How far layers look back that do not see everything; 0 without such."""
        windows = self.layout.windows
        is_on = windows == "switchable" and self.config.get("use_sliding_window")
        window = self.value("sliding_window")
        if windows != "always" and not is_on:
            return 0
        if isinstance(window, int) and window > 0:
            return window
        return 0

    def fault(
        self, message: str, help: str = "transformers does not run such a model"
    ) -> InvalidConfig:
        return _report_unknown(f"{message} in the config of {self.name or 'the model'}", help)


def _render_value(value: object) -> str:
    if value is None:
        return "null"
    return shorten(repr(value), 40)


@functools.cache
def load_known_shapes() -> Mapping[str, Mapping[str, Any]]:
    """Common models by lower-case hub name; aliases are written out."""
    file = PACKAGE / "artifacts" / "shapes.json"
    configs: dict[str, Mapping[str, Any]] = {}
    for model in json.loads(file.read_text(encoding="utf-8"))["models"]:
        for name in model["names"]:
            configs[name.lower()] = model["config"]
    return configs


_DESCRIBED = "described are: " + ", ".join(sorted(FAMILIES))


def _report_unknown(message: str, help: str) -> InvalidConfig:
    return InvalidConfig(
        launch_finding("error", "unknown-shape", message, help, key="args.model_name_or_path")
    )
