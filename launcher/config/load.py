"""YAML + `extends` + `key=value` overrides -> `Config`, with the place where every key was written.

Three shapes are read: launch's own stage files, the `open_instruct: {script, args}` wrapper, and
upstream's flat files. Interpolation (`${...}`) is omegaconf's.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import yaml

from launcher.config import document
from launcher.config.document import Document, Origin, find_place, join, refuse_file
from launcher.config.interpolation import interpolate
from launcher.config.keys import KEYS
from launcher.errors import Finding, InvalidConfig, naming_variables, shorten
from launcher.lazy_dataclass import dataclass
from launcher.paths import exists, expand_user, resolve_path
from launcher.redaction import Redactor

LARGEST = 10**64
"""Numbers from here on are a mistake."""
Shape = Literal["stage", "wrapped", "flat"]
"""A file's, before it is read: the values are always those of a stage file."""
_WRAPPED_DEEPSPEED = "deepspeed_config"
PIPELINE = "is-pipeline"
"""The code of what a file is refused with that holds several stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A stage file and its parents as they were read, before any override; `named` is what else
    `${}` finds.

    `borrowed` are variables of the environment that later overrides hold values of.
    """

    path: Path
    shape: Shape
    value: dict[str, Any]
    origins: dict[str, Origin]
    named: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[Path, ...] = ()
    faults: tuple[Finding, ...]
    kept: tuple[document.KeptKey, ...]
    borrowed: frozenset[str] = frozenset()

    def config(self, overrides: Sequence[str]) -> Config:
        """What the file says with these overrides, each a `key=value`. Raises InvalidConfig;
        see `load`.
        """
        # one copy of both: the tree may be the very mapping that is named
        value, named = copy.deepcopy((self.value, self.named))
        origins = dict(self.origins)
        faults = []
        for text in overrides:
            fault = _apply_override(self.path, value, origins, text)
            if fault is not None:
                faults.append(fault)
        if faults:
            raise InvalidConfig(faults)
        interpolated = interpolate(self.path, value, origins, named)
        borrowed = self.borrowed | interpolated.borrowed
        options = interpolated.value
        with naming_variables(Redactor.of(os.environ, borrowed)):
            args = _require_mapping(self.path, origins, "args", options.pop("args", None))
        too_large = _find_too_large(self.path, {**options, "args": args}, origins)
        return Config(
            path=self.path,
            shape=self.shape,
            options=options,
            args=args,
            origins=origins,
            parents=self.parents,
            faults=(*self.faults, *too_large),
            secrets=interpolated.secrets,
            borrowed=borrowed,
            kept=self.kept,
            written=self,
            overrides=tuple(overrides),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One stage as its author wrote it: nothing checked yet beyond being YAML of a known shape.

    `args` go to upstream under exactly these names. `options` are launch's own top-level keys.
    `origins` maps dotted keys (`args.learning_rate`, `args.mixer_list[1]`) to places. `faults`
    are keys that stand twice or cannot be keys; the last value of a key that is given twice is
    held. `secrets` are the texts, by dotted key, of values that took a secret from the
    environment, `borrowed` all variables that any value was taken from. `kept` are arguments in
    comments of `--fix`, of the parents too. `written` is the file without the `overrides`.
    """

    path: Path
    shape: Shape
    options: Mapping[str, Any]
    args: Mapping[str, Any]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    parents: tuple[Path, ...] = ()
    faults: tuple[Finding, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)
    borrowed: frozenset[str] = frozenset()
    kept: tuple[document.KeptKey, ...] = ()
    written: Written | None = field(default=None, repr=False, compare=False)
    overrides: tuple[str, ...] = ()

    def with_overrides(self, overrides: Sequence[str]) -> Config:
        """The same file with further overrides, read no further time. Raises InvalidConfig;
        see `load`.
        """
        assert self.written is not None
        return self.written.config((*self.overrides, *overrides))

    def origin(self, key: str) -> Origin:
        """The place of `key`, or of the nearest enclosing key, or the start of the file."""
        return find_place(self.path, self.origins, key)

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of the values of this file."""
        return Redactor.of(os.environ, self.borrowed)

    def placed(self, finding: Finding) -> Finding:
        """The finding at the place of its key, with variables named where it would show what
        they hold.
        """
        placed = replace(finding, **self.origin(finding.key or "").place)
        if not self.borrowed:
            return placed
        return placed.naming_variables(self.redactor)


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    text: str | None = None,
    borrowed: frozenset[str] = frozenset(),
) -> Config:
    """Read a stage file of any of the three shapes, merge its parents and the overrides into it.

    `text` is taken in the place of what the file holds, which then is not read. `borrowed` are
    variables that the overrides hold values of. Raises InvalidConfig with every problem of the
    layer that failed: unreadable file, broken YAML, `extends` cycles, malformed overrides,
    unresolvable interpolation.
    """
    path = Path(path)
    content, parents = _read_with_parents(path, (), text)
    _require_one_stage(path, content)
    written = _as_stage_file(path, content)
    return replace(written, parents=parents, borrowed=borrowed).config(overrides)


def _find_too_large(path: Path, tree: Any, origins: Mapping[str, Origin]) -> Iterator[Finding]:
    """A finding for each number that no float can hold: YAML's `1e999`, or an integer of many
    digits.
    """
    for steps, value in document.walk_leaves(tree):
        if isinstance(value, int | float) and not abs(value) < LARGEST:
            key = reduce(join, steps, "")
            message = f"the number of `{key}` is too large"
            yield document.report_misplaced(path, origins, key, "bad-value", message)


def _read_with_parents(
    path: Path, children: tuple[Path, ...], text: str | None = None
) -> tuple[Document, tuple[Path, ...]]:
    """The file with its parents merged into it, and their paths, the nearest first."""
    if text is None:
        content = document.read_yaml(path)
    else:
        content = document.parse(path, text)
    if content.value.get("extends") is None:
        content.value.pop("extends", None)
        return content, ()
    parent = content.value.pop("extends")
    line = content.origins.pop("extends").line
    target = _require_parent(path, parent, line)
    chain = (*children, path)
    if resolve_path(target) in map(resolve_path, chain):
        loop = " -> ".join(map(str, (*chain, target)))
        raise refuse_file(path, "extends-cycle", f"`extends` is circular: {loop}", line)
    if not exists(target):
        message = f"`extends: {shorten(parent)}`: there is no {shorten(target, 200)}"
        help = "`extends` is relative to the file that holds it"
        raise refuse_file(path, "missing-parent", message, line, help)
    base, parents = _read_with_parents(target, chain)
    return _inherit(base, content), (target, *parents)


def _inherit(base: Document, content: Document) -> Document:
    """A file's content merged into that of its parent."""
    origins = dict(base.origins)
    value = _merge_mappings(base.value, content.value, origins)
    return Document(
        value=value,
        origins=origins | content.origins,
        faults=(*base.faults, *content.faults),
        kept=(*base.kept, *content.kept),
    )


def _require_parent(path: Path, parent: object, line: int | None) -> Path:
    if not isinstance(parent, str) or not parent.strip():
        message = "`extends` names one file, relative to this one"
        raise refuse_file(path, "bad-extends", message, line)
    target = path.parent / expand_user(parent)
    if not {target.suffix, resolve_path(target).suffix} <= document.SUFFIXES:
        # whoever wrote the file may not be who may read what it names
        message = f"`extends: {shorten(parent)}` names no `.yaml` or `.yml` file"
        raise refuse_file(path, "bad-extends", message, line)
    return target


def _merge_mappings(
    base: Mapping[str, Any], top: Mapping[str, Any], origins: dict[str, Origin], path: str = ""
) -> dict[str, Any]:
    """Deep merge, lists replaced whole; `origins` forget the places of what was replaced."""
    merged = dict(base)
    for key, value in top.items():
        place = join(path, key)
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[key] = _merge_mappings(below, value, origins, place)
        else:
            merged[key] = value
            _forget_below(origins, place)
    return merged


def _require_one_stage(path: Path, content: Document) -> None:
    if isinstance(content.value.get("stages"), list) and "args" not in content.value:
        help = f"launch pipeline {path}, or name one of its stage files"
        line = content.origins["stages"].line
        raise refuse_file(path, PIPELINE, "this is a pipeline, not a stage file", line, help)
    tool = recognise_tool(content.value)
    if tool is not None:
        message = f"this is a file of {TOOLS[tool]}, not a stage file"
        help = f"launch init --from {path} converts it"
        raise refuse_file(path, "foreign-file", message, 1, help)


TOOLS = {
    "axolotl": "Axolotl",
    "llama_factory": "LLaMA-Factory",
    "trl": "TRL",
    "handbook": "the alignment handbook",
    "torchtune": "torchtune",
}
# each set alone is a sign, together with a model
_AXOLOTL = {"datasets", "sequence_len", "micro_batch_size", "adapter", "sample_packing"}
_LLAMA_FACTORY = {"finetuning_type", "cutoff_len", "template"}
# arguments that no script of open-instruct has
_TRL = set(
    "use_peft lora_r max_length max_steps eval_strategy save_strategy save_steps bf16 optim "
    "warmup_steps dtype torch_dtype dataset_text_field datasets accelerate_config".split()
)
_TRL_ALONE = _TRL | set(
    "fp16 evaluation_strategy max_prompt_length gradient_checkpointing_kwargs do_eval hub_model_id "
    "hub_strategy log_level dataset_splits packing logging_strategy per_device_eval_batch_size "
    "overwrite_output_dir".split()
)
_OPEN_INSTRUCT = set(
    "with_tracking checkpointing_steps use_slow_tokenizer dataset_mixer_list mixer_list "
    "tokenizer_name max_train_steps exp_name add_bos chat_template_name dataset_mix_dir num_epochs "
    "use_flash_attn clip_grad_norm".split()
)


def recognise_tool(tree: Mapping[str, Any]) -> str | None:
    """Whose file this looks like, a key of `TOOLS`; None where it is none of them."""
    names = set(tree)
    if names & {"args", "open_instruct"}:
        return None
    if any(isinstance(value, dict) and "_component_" in value for value in tree.values()):
        return "torchtune"
    if "model_name_or_path" in names and _is_handbook(names):
        return "handbook"
    if "base_model" in names and names & _AXOLOTL:
        return "axolotl"
    if "model_name_or_path" not in names:
        return None
    if names & _LLAMA_FACTORY:
        return "llama_factory"
    if names & {"dataset_mixer_list", "dataset_mixer", "mixer_list", "backend", "extends"}:
        return None
    if names & _TRL and names & {"dataset_name", "datasets"}:
        return "trl"
    return None


def _is_handbook(names: set[str]) -> bool:
    """Whether a recipe is of the alignment handbook; open-instruct's older files have a
    `dataset_mixer` too.
    """
    if "dataset_mixture" in names:
        return True
    return "dataset_mixer" in names and len(names & _TRL_ALONE) > len(names & _OPEN_INSTRUCT)


def _as_stage_file(path: Path, content: Document) -> Written:
    """Any shape as the keys of a stage file, and what `${}` finds beside them.

    Of upstream's own shape every key is an argument: options of ours can come from overrides only.
    The wrapped one is `open_instruct: {script, deepspeed_config, args}` with `num_gpus` beside it.
    """
    value = content.value
    written = Written(
        path=path,
        shape="stage",
        value=value,
        origins=content.origins,
        faults=content.faults,
        kept=content.kept,
    )
    names = value.keys()
    if "open_instruct" in names and not names & {"stage", "args"}:
        return _unwrap(written)
    if names & {"stage", "args", "backend"}:
        return written
    origins = {"args": Origin(str(path), _find_first_line(content.origins))}
    for key, origin in content.origins.items():
        origins[f"args.{key}"] = origin
    return replace(written, shape="flat", value={"args": value}, origins=origins, named=value)


def _find_first_line(origins: Mapping[str, Origin]) -> int:
    return min((origin.line for origin in origins.values() if origin.line is not None), default=1)


def _unwrap(written: Written) -> Written:
    value = dict(written.value)
    section = value.pop("open_instruct")
    inner = _require_mapping(written.path, written.origins, "open_instruct", section)
    value |= inner
    origins = {}
    for key, origin in written.origins.items():
        origins[key.removeprefix("open_instruct.")] = origin
    if _WRAPPED_DEEPSPEED in value:
        value["deepspeed"] = value.pop(_WRAPPED_DEEPSPEED)
        origins["deepspeed"] = origins.pop(_WRAPPED_DEEPSPEED)
    named = {"open_instruct": inner}
    return replace(written, shape="wrapped", value=value, origins=origins, named=named)


def _require_mapping(
    path: Path, origins: Mapping[str, Origin], key: str, value: Any
) -> dict[str, Any]:
    if value is None or isinstance(value, dict):
        return value or {}
    message = f"`{key}` is a mapping of names to values, not `{shorten(value)}`"
    fault = document.report_misplaced(path, origins, key, "bad-args", message)
    raise InvalidConfig(replace(fault, key=None))


_OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]{1,200}|\[[0-9]{1,6}\])*\Z")
_STEPS = re.compile(r"\[([0-9]+)\]|([\w-]+)")


def _apply_override(
    path: Path, tree: dict[str, Any], origins: dict[str, Origin], text: str
) -> Finding | None:
    """Apply one `key=value` in place; what is wrong with it instead where it cannot be."""
    # what is no UTF-8 cannot be printed
    shown = text.encode("utf-8", "backslashreplace").decode()
    try:
        key, value = _read_override(text)
    except _BadOverride as error:
        key = error.key
        fault = error
    else:
        key = _complete_key(key)
        try:
            _set_value(tree, origins, key, value, Origin(str(path), None, text))
            return None
        except _BadOverride as error:
            fault = error
    message = f"`{shorten(shown)}`{fault.why}"
    finding = document.bad(path, "bad-override", message, None, fault.help)
    return replace(finding, key=key or None, override=shown)


class _BadOverride(Exception):
    """An override that cannot be applied: what is said of it, behind its text, and what to write.

    `key` is empty where it has none.
    """

    def __init__(self, why: str, help: str | None = None, *, key: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.help = help
        self.key = key


def _read_override(text: str) -> tuple[str, Any]:
    """The key as it is written, and the value. Raises _BadOverride."""
    key, equals, raw = text.partition("=")
    if document.UNUSABLE.search(text):
        raise _BadOverride(" is not UTF-8")
    if not equals or not _OVERRIDE.match(key):
        raise _BadOverride(" is not of the form key=value", "write for example learning_rate=1e-5")
    if key == "extends":
        raise _BadOverride(": a parent is named in the file", key=key)
    if not raw:
        # a variable of the shell that is not set, as often as not
        help = f"write {key}=null to leave it to upstream, or {key}='\"\"' for an empty text"
        raise _BadOverride(" has no value", help, key=key)
    if raw == "None":
        raise _BadOverride(" would be the text 'None'", f"write {key}=null", key=key)
    try:
        return key, _parse_override_value(raw)
    except InvalidConfig as error:
        why = error.findings[0].message
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None)
        why = "the value is not valid YAML"
        if problem:
            why += f": {problem}"
    raise _BadOverride(f": {why}", f"for a text, quote it for YAML too: '{key}=\"...\"'", key=key)


def _set_value(
    tree: dict[str, Any], origins: dict[str, Origin], key: str, value: Any, origin: Origin
) -> None:
    """Set what a dotted key names. Raises _BadOverride."""
    *above, last = _split_key(key)
    node: Any = tree
    path = ""
    for written in above:
        step = _resolve_step(node, written, path)
        path = join(path, step)
        if isinstance(node, dict) and node.get(step) is None:
            # what is empty, or not there, can become a mapping: its place is this override
            node[step] = {}
            # but for all the arguments: that is the place of those that are missing
            if path != "args":
                origins[path] = origin
        node = node[step]
    step = _resolve_step(node, last, path)
    node[step] = value
    path = join(path, step)
    _forget_below(origins, path)
    origins[path] = origin


def _split_key(key: str) -> list[str | int]:
    """The names and indexes of a dotted key."""
    steps: list[str | int] = []
    for index, name in _STEPS.findall(key):
        if index:
            steps.append(int(index))
        else:
            steps.append(name)
    return steps


def _resolve_step(node: Any, step: str | int, path: str) -> str | int:
    """The key or index that a step means in this value. Raises _BadOverride."""
    reason = "is not a mapping or a list"
    if isinstance(node, dict):
        if isinstance(step, str):
            return step
        reason = "is not a list"
    elif isinstance(node, list):
        # `.1`, as omegaconf writes it, is [1]
        if isinstance(step, str) and step.isdecimal():
            step = int(step)
        if isinstance(step, int) and step < len(node):
            return step
        reason = f"is a list of {len(node)} entries, the first is [0]"
    raise _BadOverride(f": `{path.removeprefix('args.')}` {reason}")


def _parse_override_value(raw: str) -> Any:
    """What stands after `=`: a YAML list, mapping or quoted text, else one plain value.

    Text that only looks like YAML (`a: b`, `x # y`, `- z`, `{% if %}`) is kept whole.
    """
    text = raw.strip()
    is_quoted = text.startswith(("'", '"'))
    is_template = text.startswith(("{%", "{{", "{#"))
    if not is_quoted and (is_template or not text.startswith(("[", "{"))):
        value = document.parse_scalar(text)
        if isinstance(value, str):
            return raw
        return value
    builder = document.Builder("override")
    try:
        value = builder.build(text)
        if builder.findings:
            raise InvalidConfig(builder.findings)
    except (yaml.YAMLError, InvalidConfig):
        if not is_quoted:
            raise
        return raw
    return value


def _complete_key(key: str) -> str:
    """`args.` may be left out: what is no option of ours is an argument of upstream's."""
    key = key.removeprefix("open_instruct.")
    first = re.split(r"[.\[]", key, maxsplit=1)[0]
    if first == _WRAPPED_DEEPSPEED:
        return "deepspeed" + key.removeprefix(first)
    if first == "num_gpus" or (first in KEYS and first != "extends"):
        return key
    return f"args.{key}"


def _forget_below(origins: dict[str, Origin], path: str) -> None:
    """Drop the places of what lies below a path."""
    for key in list(origins):
        if key.startswith((f"{path}.", f"{path}[")):
            del origins[key]


def spell_override(value: Any) -> str:
    """A value as an override on the command line spells it, so that it is read as the same
    value.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)
    # a JSON text is YAML's too, and quotes keep `1e-5` or `no` a text; it is interpolated once more
    return json.dumps(value, ensure_ascii=False).replace("${", r"\\${")
