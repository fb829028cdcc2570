"""Rules about the modules that a TRL stage puts adapters on: PEFT looks for them in the loaded model.

The names are those of transformers' own classes, known from the model's config (`shapes`). What PEFT 0.21
does with each was seen on the demo's model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from launcher import shapes
from launcher.backends import model_config
from launcher.backends.context import Context, StageRule
from launcher.backends.rule import Rule, say
from launcher.backends.trl_resolved import inline
from launcher.errors import Finding, InvalidConfig, brief
from launcher.schema import Values
from launcher.shapes import Shape

_KEY = "lora_target_modules"
_RELEASE = (0, 21)
# peft/utils/constants.py:67: the types of models for which PEFT chooses the modules itself
DEFAULTS = frozenset({
    "t5", "mt5", "bart", "gpt2", "bloom", "blip-2", "opt", "gptj", "gpt_neox", "gpt_neo", "bert",
    "roberta", "xlm-roberta", "electra", "deberta-v2", "deberta", "layoutlm", "llama", "llama4",
    "chatglm", "gpt_bigcode", "mpt", "RefinedWebModel", "RefinedWeb", "falcon", "btlm", "codegen",
    "mistral", "mixtral", "stablelm", "phi", "gemma", "gemma2", "gemma3_text", "gemma4", "qwen2",
    "qwen3", "nemotron_h", "rwkv", "rwkv7",
})  # fmt: skip
# names between commas or spaces: no module has either, and no pattern is made of such
_SEVERAL = re.compile(r"[\w.-]+(?:\s*,\s*|\s+)[\w.,\s-]*")


def _words(values: Values) -> list[str]:
    given = values[_KEY]
    return [str(word) for word in (given if isinstance(given, list) else [given]) if word]


def lora_targets(values: Values) -> Iterator[Finding]:
    """trl/trainer/model_config.py:177: a single word is a pattern, and peft wants it to match a module."""
    words = _words(values)
    joined = [word for word in words if _SEVERAL.fullmatch(word)]
    if not values["use_peft"]:
        return
    others = values["lora_target_parameters"]
    # a word without dots or stars is the name of no module inside of another
    if len(words) == 1 and re.fullmatch(r"\w+", words[0]) and words[0] != "lm_head":
        yield say(
            "warning" if others else "error", "run", "lora-targets", _KEY,
            f"`{_KEY}: {brief(words[0])}`: a single word is a pattern for whole names, which "
            "begin with model.layers, and matches none",
            f"write `{_KEY}: .*{words[0]}`, or a list of several",
        )  # fmt: skip
    elif len(words) == 1 and (fault := _broken(words[0])) is not None:
        yield say(
            "error", "run", "lora-targets", _KEY,
            f"`{_KEY}: {brief(words[0])}`: a single word is a pattern, and this is none: {fault}",
            "write a list of several names, or a pattern such as .*q_proj",
        )  # fmt: skip
    if not joined:
        return
    alone = joined == words and not others
    names = [name for name in re.split(r"[,\s]+", joined[0]) if name]
    yield say(
        "error" if alone else "warning", "run", "lora-targets", _KEY,
        f"`{_KEY}: {brief(joined[0])}` is one name, which no module has: "
        + ("peft refuses it" if alone else "nothing is trained for it"),
        f"write a list: `{_KEY}: [{', '.join(names)}]`",
    )  # fmt: skip


def _broken(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return None


def no_default(context: Context) -> Iterator[Finding]:
    """peft/tuners/lora/model.py:704: without a name PEFT has modules for some types of models only."""
    values = context.values
    if not values["use_peft"] or _words(values) or values["lora_target_parameters"]:
        return
    config = model_config.read(
        values["model_name_or_path"], context.environ, values["model_revision"]
    )
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in DEFAULTS:
        return
    have = (context.packages or {}).get("peft")
    newer = have is not None and tuple(map(int, re.findall(r"\d+", have)[:2])) > _RELEASE
    yield say(
        "warning" if newer else "error", "run", "lora-targets", _KEY,
        f"PEFT itself chooses no `{_KEY}` for {brief(kind)} models, and refuses to go on",
        f"add `{_KEY}: all-linear`",
    )  # fmt: skip


def targets_of_model(context: Context) -> Iterator[Finding]:
    """peft/tuners/tuners_utils.py:1066 refuses names that no module has, peft/tuners/lora/model.py:559
    those of modules that are no linear layers nor embeddings; peft/tuners/tuners_utils.py:2376 compares.
    """
    values = context.values
    words = _words(values)
    if not values["use_peft"] or not words or any(lora_targets(values)):
        return
    shape = _shape(context)
    if shape is None or (len(words) == 1 and words[0].lower() == "all-linear"):
        return
    fitting, others = _modules(shape)
    known = f"one or several of {', '.join(shape.linears())}, or all-linear"
    matched = {word: _matched(word, fitting, whole=len(words) == 1) for word in words}
    refused = next(
        (one for word in words for one in _matched(word, others, whole=len(words) == 1)), None
    )
    if refused is not None:
        yield say(
            "error", "run", "lora-targets", _KEY,
            f"`{_KEY}`: {refused} of {shape.family} models is no linear layer: PEFT refuses it", known,
        )  # fmt: skip
        return
    missed = [word for word in words if not matched[word]]
    if missed:
        alone = missed == words and not values["lora_target_parameters"]
        yield say(
            "error" if alone else "warning", "run", "lora-targets", _KEY,
            f"`{_KEY}`: no module of {shape.family} models is called {brief(', '.join(missed))}: "
            + ("PEFT refuses it" if alone else "nothing is trained for it"), known,
        )  # fmt: skip


def _shape(context: Context) -> Shape | None:
    """The model's shape, where its class is the one whose names are known."""
    values = context.values
    name, revision = values["model_name_or_path"], values["model_revision"]
    kwargs = inline(values["model_init_kwargs"]) or {}
    built: Any = model_config.read(name, context.environ, revision).get("architectures")
    if built and not (isinstance(built, list) and str(built[0]).endswith("ForCausalLM")):
        return None
    try:
        return shapes.find(name, context.environ, kwargs.get("revision", revision), kwargs)
    except InvalidConfig:
        return None


def _modules(shape: Shape) -> tuple[list[str], list[str]]:
    """The modules' whole names: those that an adapter can be put on, and those that it cannot."""
    linears = {
        name.removesuffix(".weight")
        for name, size in shape.layer.items()
        if len(size) == 2 and name.split(".")[-2] in shape.linears()
    }
    held = {".".join(name.split(".")[:-1]) for name in shape.layer}
    held |= {"mlp.act_fn"}
    inside = {part for name in held for part in accumulate(name.split("."), "{}.{}".format)}
    layers = [f"model.layers.{index}" for index in range(shape.layers)]
    fitting = [f"{layer}.{name}" for layer in layers for name in sorted(linears)]
    others = [f"{layer}.{name}" for layer in layers for name in sorted(inside - linears)]
    return (
        [*fitting, "model.embed_tokens", "lm_head"],
        ["model", "model.layers", *layers, "model.norm", "model.rotary_emb", *others],
    )


def _matched(word: str, names: list[str], *, whole: bool) -> list[str]:
    if whole:
        return [name for name in names if re.fullmatch(word, name)]
    return [name for name in names if name == word or name.endswith(f".{word}")]


RULES: tuple[Rule, ...] = (lora_targets,)
STAGE_RULES: tuple[StageRule, ...] = (no_default, targets_of_model)
