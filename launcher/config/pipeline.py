"""A pipeline file -> `Chain`: stages in order, where each one's model comes from, and where all that stands.

Nothing about the stage files themselves is judged here, only that there is one for every stage.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.config import evaluation, keys
from launcher.config.document import Document, Origin, nearest, read_yaml
from launcher.config.evaluation import Evaluation
from launcher.config.interpolation import interpolate
from launcher.config.keys import STAGES
from launcher.config.load import spelt
from launcher.errors import Finding, InvalidConfig, brief, launch_finding, usage
from launcher.paths import exists, expanded
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

    `source` is the stage whose model this one starts from, None where its own file says; `explicit`
    whether `from:` said so. `given` are the overrides under `with:`, by dotted key, and `overrides`
    those of the command line. `evaluation` is run on its model. `origins` are the places of its own keys.
    """

    name: str
    config: Path
    stage: str | None = None
    gpus: int | None = None
    source: str | None = None
    explicit: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    evaluation: Evaluation | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """What is laid over the stage file: `with:` first, then the command line."""
        return [*(f"{key}={spelt(value)}" for key, value in self.given.items()), *self.overrides]

    def origin(self, key: str = "") -> Origin:
        return nearest(self.origins, key) or self.origins[""]


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
        found = next((one for one in self.links if one.name == name), None)
        if found is None:
            help = keys.nearest(name, [one.name for one in self.links])
            raise usage("no-such-stage", f"the pipeline has no stage `{brief(name)}`", help)
        return found

    def between(self, first: str | None, last: str | None) -> tuple[Link, ...]:
        """The stages from `first` to `last`, both included. Raises UsageError where there are none."""
        # an empty name is none that was left out
        begin = 0 if first is None else self.links.index(self.link(first))
        end = len(self.links) - 1 if last is None else self.links.index(self.link(last))
        if begin > end:
            help = f"the stages are {', '.join(one.name for one in self.links)}"
            raise usage("no-such-stage", f"`{first}` comes after `{last}`: nothing is left to run", help)
        return self.links[begin : end + 1]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Chain:
    """Read a pipeline file; `overrides` are `STAGE.key=value`.

    Raises InvalidConfig with everything that is wrong with the file itself, UsageError for an override
    of a stage that there is not.
    """
    path = Path(path)
    document = read_yaml(path)
    if "stages" not in document.value and {"stage", "args", "open_instruct"} & document.value.keys():
        # nearly every line would be wrong
        message, help = "this is a stage file, not a pipeline", f"launch sft {path}, or launch dpo {path}"
        raise InvalidConfig(launch_finding("error", "bad-pipeline", message, help, file=str(path), line=1))
    interpolated = interpolate(path, document.value, document.origins)
    reader = _PipelineReader(path, replace(document, value=interpolated.value))
    chain = Chain(path=path, links=reader.links(), name=reader.name(), borrowed=interpolated.borrowed)
    for key, text in interpolated.secrets.items():
        if _OF_COMMAND.fullmatch(key):
            reader.exposed(key, text)
    if reader.findings:
        raise InvalidConfig(finding.naming_variables(chain.redactor) for finding in reader.findings)
    for text in overrides:
        name, dot, rest = text.partition(".")
        if not dot or "=" in name:
            names = ", ".join(f"{one.name}.{brief(text, 40)}" for one in chain.links[:3])
            raise usage("no-such-stage", f"`{brief(text)}`: of which stage?", f"one of {names}")
        link = chain.link(name)
        changed = replace(link, overrides=(*link.overrides, rest))
        chain = replace(chain, links=tuple(changed if one is link else one for one in chain.links))
    return chain


class _PipelineReader:
    """Collects what is wrong instead of stopping at the first."""

    def __init__(self, path: Path, document: Document) -> None:
        self.path, self.value, self.origins = path, document.value, document.origins
        self.findings: list[Finding] = list(document.faults)

    def name(self) -> str:
        given = self.value.get("name")
        if isinstance(given, dict | list):
            self._bad("name", "`name` is one word for the pipeline")
        return self.path.stem if given is None else str(given)

    def links(self) -> tuple[Link, ...]:
        self._unknown("", self.value, KEYS)
        gpus = self._gpus("gpus", self.value.get("gpus"))
        listed = self.value.get("stages")
        if not isinstance(listed, list) or not listed:
            help = "stages:\n    - {name: sft, config: sft.yaml}\n    - {name: dpo, config: dpo.yaml}"
            self._bad("stages", "`stages` is a list of the stages in their order", help)
            return ()
        links: list[Link] = []
        for number, entry in enumerate(listed):
            if (link := self._link(f"stages[{number}]", entry, [one.name for one in links], gpus)) is not None:
                links.append(link)
        return tuple(links)

    def _link(self, where: str, entry: Any, before: Sequence[str], gpus: int | None) -> Link | None:
        if isinstance(entry, str):
            entry = {"config": entry}
        if not isinstance(entry, dict):
            self._bad(where, f"a stage is a mapping, not `{brief(entry)}`", "{config: sft.yaml}")
            return None
        self._unknown(where, entry, STAGE_KEYS)
        config, listed = None, entry.get("config")
        if not isinstance(listed, str) or not listed.strip():
            self._bad(f"{where}.config", "`config` names the stage file", "config: sft.yaml")
        elif not exists(config := self.path.parent / expanded(listed)):
            message, help = f"there is no {brief(config, 200)}", "`config` is relative to the pipeline file"
            self._bad(f"{where}.config", message, help)
            config = None
        name = self._name(f"{where}.name", entry.get("name"), config, before)
        source = self._source(f"{where}.from", entry, before)
        kind = entry.get("stage")
        if kind not in (None, *STAGES):
            self._bad(f"{where}.stage", f"`{brief(kind)}` is not a stage", " or ".join(STAGES))
        own = self._gpus(f"{where}.gpus", entry.get("gpus"))
        given = self._given(f"{where}.with", entry.get("with"))
        measured = None
        if entry.get("eval") is not None:
            measured = evaluation.read(f"{where}.eval", entry["eval"], self._bad)
        if config is None or name is None:
            return None
        origins = {
            key[len(where) :].removeprefix("."): origin
            for key, origin in self.origins.items()
            if key == where or key.startswith((f"{where}.", f"{where}["))
        }
        return Link(
            name=name,
            config=config,
            stage=kind,
            gpus=gpus if own is None else own,
            source=source,
            explicit="from" in entry,
            given=given,
            evaluation=measured,
            origins={"": self._at(where), **origins},
        )

    def _name(self, where: str, given: Any, config: Path | None, before: Sequence[str]) -> str | None:
        if given is None and config is None:
            return None
        name = str(config.stem if given is None and config is not None else given)
        if not _NAME.match(name) or name in ("none", "null"):
            help = "letters, digits, `_` and `-`; --from and --until take it"
            self._bad(where, f"`{brief(name)}` cannot be a stage's name", help)
            return None
        if name in before:
            self._bad(where, f"two stages are called `{name}`", "add a `name:`")
            return None
        return name

    def _source(self, where: str, entry: Mapping[str, Any], before: Sequence[str]) -> str | None:
        if "from" not in entry:
            return before[-1] if before else None
        given = entry["from"]
        # a plain `no` is a boolean in YAML
        if given is None or given is False or given == "none":
            return None
        if str(given) not in before:
            help = f"one of {', '.join(before)}, or none" if before else "leave it out: this is the first"
            self._bad(where, f"`from: {brief(given)}` is not an earlier stage", help)
        return str(given)

    def _given(self, where: str, given: Any) -> dict[str, Any]:
        if given is not None and not isinstance(given, dict):
            self._bad(where, "`with` is a mapping of keys to values", "with: {learning_rate: 1e-5}")
            return {}
        flat: dict[str, Any] = {}
        for key, value in (given or {}).items():
            merged = key in _MERGED and isinstance(value, dict)
            flat |= {f"{key}.{name}": v for name, v in value.items()} if merged else {key: value}
        return flat

    def _gpus(self, where: str, given: Any) -> int | None:
        if given is None or (isinstance(given, int) and given is not True and given >= 0):
            return given
        self._bad(where, f"`gpus` is a number, 0 for the CPU, not `{brief(given)}`")
        return None

    def _unknown(self, where: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
        what = "a stage in a pipeline (`with:` holds changes of its file)" if where else "a pipeline file"
        for key in (key for key in given if key not in names):
            message, help = f"`{brief(key)}` is not a key of {what}", keys.nearest(str(key), names)
            self._bad(f"{where}.{key}".removeprefix("."), message, help)

    def exposed(self, key: str, text: str) -> None:
        """Note that a word of an evaluation's command holds a secret out of the environment."""
        message = f"`{text}` would stand on a command line, which every user of the machine can read"
        help = "leave it out: the command has the environment of launch, and the program can read the variable itself"
        self.findings.append(launch_finding("error", "exposed-secret", message, help, key=key, **self._at(key).place))

    def _at(self, key: str) -> Origin:
        return nearest(self.origins, key) or Origin(str(self.path), 1)

    def _bad(self, key: str, message: str, help: str | None = None) -> None:
        place = self._at(key).place
        self.findings.append(launch_finding("error", "bad-pipeline", message, help, key=key, **place))


def placed(link: Link, finding: Finding) -> Finding:
    """A finding about what an override set: at its place under `with:`, or as it was said for this stage."""
    if finding.override is None:
        return finding
    if finding.override in link.overrides:
        return replace(finding, override=f"{link.name}.{finding.override}")
    key = next((k for k, v in link.given.items() if finding.override == f"{k}={spelt(v)}"), None)
    return finding if key is None else replace(finding, **link.origin(f"with.{key}").place)
