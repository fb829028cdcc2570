"""A pipeline file -> `Chain`: stages in order, where each one's model comes from, and where all
that stands.

Nothing about the stage files themselves is judged here, only that there is one for every stage.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from launcher.config import evaluation, keys
from launcher.config.document import (
    Document,
    Origin,
    find_nearest_origin,
    find_place,
    read_yaml,
    refuse_file,
    report_misplaced,
)
from launcher.config.evaluation import Evaluation
from launcher.config.interpolation import interpolate
from launcher.config.keys import STAGES
from launcher.config.load import spell_override
from launcher.errors import Finding, InvalidConfig, shorten, usage
from launcher.lazy_dataclass import dataclass
from launcher.paths import exists, expand_user
from launcher.redaction import Redactor

KEYS = ("name", "gpus", "stages")
STAGE_KEYS = ("name", "config", "stage", "gpus", "from", "with", "eval")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,60}\Z")
_OF_COMMAND = re.compile(r"stages\[\d+\]\.eval\.(?:command|metrics)\b.*")
# mappings whose entries are set one by one; any other value is replaced whole
_MERGED = ("args", "batch", "expect", "probe", "slurm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One stage of a pipeline.

    `source` is the stage whose model this one starts from, None where its own file says;
    `explicit` whether `from:` said so. `given` are the overrides under `with:`, by dotted key,
    and `overrides` those of the command line. `evaluation` is run on its model. `origins` are the
    places of its own keys.
    """

    name: str
    config: Path
    stage: str | None = None
    gpus: int | None = None
    source: str | None = None
    explicit: bool = False
    written: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    evaluation: Evaluation | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """What is laid over the stage file: `with:` first, then the command line."""
        changes = [f"{key}={spell_override(value)}" for key, value in self.written.items()]
        return [*changes, *self.overrides]

    def origin(self, key: str = "") -> Origin:
        return find_nearest_origin(self.origins, key) or self.origins[""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A whole pipeline; every `source` is the name of an earlier stage.

    `borrowed` are variables of the environment that the file took values from.
    """

    path: Path
    name: str
    links: tuple[Link, ...]
    borrowed: frozenset[str] = frozenset()

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of the values of this file."""
        return Redactor.of(os.environ, self.borrowed)

    def link(self, name: str) -> Link:
        """The stage of that name. Raises UsageError with the names that there are."""
        for link in self.links:
            if link.name == name:
                return link
        help = keys.suggest_name(name, [link.name for link in self.links])
        raise usage("no-such-stage", f"the pipeline has no stage `{shorten(name)}`", help)

    def between(self, first: str | None, last: str | None) -> tuple[Link, ...]:
        """The stages from `first` to `last`, both included. Raises UsageError without any."""
        begin = 0
        end = len(self.links) - 1
        # an empty name is none that was left out
        if first is not None:
            begin = self.links.index(self.link(first))
        if last is not None:
            end = self.links.index(self.link(last))
        if begin > end:
            help = f"the stages are {', '.join(link.name for link in self.links)}"
            message = f"`{first}` comes after `{last}`: nothing is left to run"
            raise usage("no-such-stage", message, help)
        return self.links[begin : end + 1]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Chain:
    """Read a pipeline file; `overrides` are `STAGE.key=value`.

    Raises InvalidConfig with everything that is wrong with the file itself, UsageError for an
    override of a stage that there is not.
    """
    path = Path(path)
    document = read_yaml(path)
    names = document.value.keys()
    if "stages" not in names and names & {"stage", "args", "open_instruct"}:
        # nearly every line would be wrong
        message = "this is a stage file, not a pipeline"
        help = f"launch sft {path}, or launch dpo {path}"
        raise refuse_file(path, "bad-pipeline", message, 1, help)
    interpolated = interpolate(path, document.value, document.origins)
    reader = _PipelineReader(path, replace(document, value=interpolated.value))
    links = reader.links()
    chain = Chain(path=path, links=links, name=reader.name(), borrowed=interpolated.borrowed)
    for key, text in interpolated.secrets.items():
        if _OF_COMMAND.fullmatch(key):
            reader.add_exposed(key, text)
    if reader.findings:
        redactor = chain.redactor
        raise InvalidConfig(finding.naming_variables(redactor) for finding in reader.findings)
    for text in overrides:
        chain = _add_override(chain, text)
    return chain


def _add_override(chain: Chain, text: str) -> Chain:
    name, dot, override = text.partition(".")
    if not dot or "=" in name:
        examples = [f"{link.name}.{shorten(text, 40)}" for link in chain.links[:3]]
        message = f"`{shorten(text)}`: of which stage?"
        raise usage("no-such-stage", message, f"one of {', '.join(examples)}")
    chosen = chain.link(name)
    links = list(chain.links)
    changed = replace(chosen, overrides=(*chosen.overrides, override))
    links[links.index(chosen)] = changed
    return replace(chain, links=tuple(links))


class _PipelineReader:
    """Collects what is wrong instead of stopping at the first."""

    def __init__(self, path: Path, document: Document) -> None:
        self.path = path
        self.value = document.value
        self.origins = document.origins
        self.findings: list[Finding] = list(document.faults)

    def name(self) -> str:
        name = self.value.get("name")
        if isinstance(name, dict | list):
            self._add_finding("name", "`name` is one word for the pipeline")
        if name is None:
            return self.path.stem
        return str(name)

    def links(self) -> tuple[Link, ...]:
        self._refuse_others("", self.value, KEYS)
        gpus = self._read_gpus("gpus", self.value.get("gpus"))
        stages = self.value.get("stages")
        if not isinstance(stages, list) or not stages:
            help = (
                "stages:\n    - {name: sft, config: sft.yaml}\n    - {name: dpo, config: dpo.yaml}"
            )
            self._add_finding("stages", "`stages` is a list of the stages in their order", help)
            return ()
        links: list[Link] = []
        for number, entry in enumerate(stages):
            before = [link.name for link in links]
            link = self._read_link(f"stages[{number}]", entry, before, gpus)
            if link is not None:
                links.append(link)
        return tuple(links)

    def _read_link(
        self, where: str, entry: Any, before: Sequence[str], gpus: int | None
    ) -> Link | None:
        if isinstance(entry, str):
            entry = {"config": entry}
        if not isinstance(entry, dict):
            message = f"a stage is a mapping, not `{shorten(entry)}`"
            self._add_finding(where, message, "{config: sft.yaml}")
            return None
        self._refuse_others(where, entry, STAGE_KEYS)
        config = self._read_config(f"{where}.config", entry.get("config"))
        name = self._read_name(f"{where}.name", entry.get("name"), config, before)
        source = self._read_source(f"{where}.from", entry, before)
        stage = entry.get("stage")
        if stage not in (None, *STAGES):
            message = f"`{shorten(stage)}` is not a stage"
            self._add_finding(f"{where}.stage", message, " or ".join(STAGES))
        if entry.get("gpus") is not None:
            gpus = self._read_gpus(f"{where}.gpus", entry["gpus"])
        changes = self._read_changes(f"{where}.with", entry.get("with"))
        measured = None
        command = entry.get("eval")
        if command is not None:
            place = f"{where}.eval"
            measured = evaluation.read_evaluation_key(place, command, self._add_finding)
        if config is None or name is None:
            return None
        origins = {"": self._find_origin(where)}
        for key, origin in self.origins.items():
            if key.startswith(f"{where}."):
                origins[key.removeprefix(f"{where}.")] = origin
        return Link(
            name=name,
            config=config,
            stage=stage,
            gpus=gpus,
            source=source,
            explicit="from" in entry,
            written=changes,
            evaluation=measured,
            origins=origins,
        )

    def _read_config(self, where: str, name: Any) -> Path | None:
        if not isinstance(name, str) or not name.strip():
            self._add_finding(where, "`config` names the stage file", "config: sft.yaml")
            return None
        path = self.path.parent / expand_user(name)
        if not exists(path):
            help = "`config` is relative to the pipeline file"
            self._add_finding(where, f"there is no {shorten(path, 200)}", help)
            return None
        return path

    def _read_name(
        self, where: str, name: Any, config: Path | None, before: Sequence[str]
    ) -> str | None:
        if name is None:
            if config is None:
                return None
            name = config.stem
        text = str(name)
        if not _NAME.match(text) or text in ("none", "null"):
            help = "letters, digits, `_` and `-`; --from and --until take it"
            self._add_finding(where, f"`{shorten(text)}` cannot be a stage's name", help)
            return None
        if text in before:
            self._add_finding(where, f"two stages are called `{text}`", "add a `name:`")
            return None
        return text

    def _read_source(
        self, where: str, entry: Mapping[str, Any], before: Sequence[str]
    ) -> str | None:
        if "from" not in entry and not before:
            return None
        if "from" not in entry:
            return before[-1]
        source = entry["from"]
        # a plain `no` is a boolean in YAML
        if source is None or source is False or source == "none":
            return None
        if str(source) not in before:
            help = "leave it out: this is the first"
            if before:
                help = f"one of {', '.join(before)}, or none"
            self._add_finding(where, f"`from: {shorten(source)}` is not an earlier stage", help)
        return str(source)

    def _read_changes(self, where: str, changes: Any) -> dict[str, Any]:
        """What `with:` changes, by dotted key."""
        if changes is None:
            return {}
        if not isinstance(changes, dict):
            message = "`with` is a mapping of keys to values"
            self._add_finding(where, message, "with: {learning_rate: 1e-5}")
            return {}
        flat: dict[str, Any] = {}
        for key, value in changes.items():
            if key in _MERGED and isinstance(value, dict):
                for name, below in value.items():
                    flat[f"{key}.{name}"] = below
            else:
                flat[key] = value
        return flat

    def _read_gpus(self, where: str, gpus: Any) -> int | None:
        if gpus is None or (isinstance(gpus, int) and gpus is not True and gpus >= 0):
            return gpus
        self._add_finding(where, f"`gpus` is a number, 0 for the CPU, not `{shorten(gpus)}`")
        return None

    def _refuse_others(self, where: str, entry: Mapping[str, Any], names: Sequence[str]) -> None:
        what = "a pipeline file"
        if where:
            what = "a stage in a pipeline (`with:` holds changes of its file)"
        for key in entry:
            if key not in names:
                place = f"{where}.{key}".removeprefix(".")
                message = f"`{shorten(key)}` is not a key of {what}"
                self._add_finding(place, message, keys.suggest_name(str(key), names))

    def add_exposed(self, key: str, text: str) -> None:
        """Note that a word of an evaluation's command holds a secret out of the environment."""
        message = (
            f"`{text}` would stand on a command line, which every user of the machine can read"
        )
        help = "leave it out: the command has the environment of launch, "
        help += "and the program can read the variable itself"
        fault = report_misplaced(self.path, self.origins, key, "exposed-secret", message, help)
        self.findings.append(fault)

    def _find_origin(self, key: str) -> Origin:
        return find_place(self.path, self.origins, key)

    def _add_finding(self, key: str, message: str, help: str | None = None) -> None:
        fault = report_misplaced(self.path, self.origins, key, "bad-pipeline", message, help)
        self.findings.append(fault)


def place_finding(link: Link, finding: Finding) -> Finding:
    """A finding about what an override set: at its place under `with:`, or as this stage's."""
    override = finding.override
    if override is None:
        return finding
    if override in link.overrides:
        return replace(finding, override=f"{link.name}.{override}")
    for key, value in link.written.items():
        if override == f"{key}={spell_override(value)}":
            return replace(finding, **link.origin(f"with.{key}").place)
    return finding
