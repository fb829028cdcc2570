"""What upstream itself asks for, and how the trainer's environment differs from it.

For open-instruct that is the checkout's pyproject.toml, for TRL the metadata of the installed
distributions; in both the packages that are needed are asked in turn what they need. Nothing is
imported, and a difference is no proof of a fault: that is what importing is for.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from launcher.machine import Trainer

PYTHON = "Python"
_EXTRA = re.compile(r";.*\bextra\s*==")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One requirement that holds for the trainer's Python: a version range, or a git commit.

    `name` is a distribution, or `Python`.
    """

    name: str
    specifier: str
    by: str
    commit: str | None = None

    @property
    def text(self) -> str:
        """What pip takes."""
        return f"{self.name}{self.specifier}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Something that is here in another version; `found` is None for what is missing."""

    name: str
    found: str | None
    wanted: str
    by: str

    @property
    def text(self) -> str:
        """For messages."""
        return f"{self.name} {self.found or 'is missing'} ({self.wanted})"

    def as_json(self) -> dict[str, Any]:
        """For envelopes."""
        return asdict(self)


def of_checkout(root: Path, trainer: Trainer) -> tuple[Wanted, ...] | None:
    """What the checkout's pyproject.toml asks for; None where it is not there or cannot be read."""
    try:
        told = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        project = told["project"]
        listed, python = project.get("dependencies", ()), project.get("requires-python")
        # uv's own table names the packages that come from a git commit
        sources = told.get("tool", {}).get("uv", {}).get("sources", {})
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return None
    commits = {
        str(canonicalize_name(name)): str(source["rev"])
        for name, source in sources.items()
        if isinstance(source, Mapping) and "rev" in source
    }
    by = "the checkout's pyproject.toml"
    own = [Wanted(name=PYTHON, specifier=python, by=by)] if isinstance(python, str) else []
    return (*own, *_wanted(listed, trainer, by, commits))


def of_packages(names: Iterable[str], trainer: Trainer) -> tuple[Wanted, ...]:
    """What installed distributions ask for, and those that they ask for in turn."""
    waiting = [str(canonicalize_name(name)) for name in names]
    found = list[Wanted]()
    for name in waiting:
        version = trainer.packages.get(name)
        if version is not None:
            for one in _wanted(_metadata(name, trainer), trainer, f"{name} {version}", {}):
                found.append(one)
                if one.name not in waiting:
                    waiting.append(one.name)
    return tuple(found)


def deviations(wanted: Iterable[Wanted], trainer: Trainer) -> tuple[Deviation, ...]:
    """What is missing or here in another version, each package once."""
    versions = {**trainer.packages, PYTHON: ".".join(map(str, trainer.version))}
    found: dict[str, Deviation] = {}
    for one in wanted:
        version = versions.get(one.name)
        text = one.specifier or "any version"
        if version is not None and _within(version, one.specifier):
            if one.commit is None or _is_from(one.commit, one.name, trainer):
                continue
            text = f"git commit {one.commit[:12]}"
        found.setdefault(one.name, Deviation(name=one.name, found=version, wanted=text, by=one.by))
    return tuple(found.values())


def satisfied(requirement: str, version: str) -> bool:
    """Whether a version is one that a requirement, as pip takes it, allows."""
    try:
        return _within(version, str(Requirement(requirement).specifier))
    except InvalidRequirement:
        return True


def _wanted(
    listed: Sequence[Any], trainer: Trainer, by: str, commits: Mapping[str, str]
) -> Iterator[Wanted]:
    """The requirements whose condition holds for the trainer's Python, without extras."""
    environment = {**trainer.markers, "extra": ""}
    for text in (one for one in listed if isinstance(one, str)):
        if _EXTRA.search(text) and " or " not in text:
            # most of what packages list, and costly to read
            continue
        try:
            one = Requirement(text)
            holds = one.marker is None or one.marker.evaluate(environment)
        except (InvalidRequirement, ValueError, KeyError):
            continue
        name = str(canonicalize_name(one.name))
        if holds:
            yield Wanted(name=name, specifier=str(one.specifier), by=by, commit=commits.get(name))


def _within(version: str, specifier: str) -> bool:
    """Whether a version is in a range; what cannot be read as either is not judged."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True


def _read(name: str, file: str, trainer: Trainer) -> str:
    """A file of a distribution's metadata; empty where it has none."""
    path = [str(folder) for folder in trainer.path]
    for found in importlib.metadata.Distribution.discover(name=name, path=path):
        try:
            return found.read_text(file) or ""
        except (OSError, ValueError):
            break
    return ""


def _metadata(name: str, trainer: Trainer) -> list[str]:
    """The requirements of a distribution. Its description, which may be a book, is not parsed."""
    head = _read(name, "METADATA", trainer).partition("\n\n")[0]
    lines = (line.partition(":") for line in head.splitlines())
    return [value.strip() for key, _, value in lines if key == "Requires-Dist"]


def _is_from(commit: str, name: str, trainer: Trainer) -> bool:
    """Whether a distribution was installed from a git commit, or does not say (an editable one)."""
    try:
        told = json.loads(_read(name, "direct_url.json", trainer) or '{"vcs_info": {}}')
        source = told.get("vcs_info")
    except (ValueError, AttributeError):
        return True
    if source is None:
        return True
    at = str(source.get("commit_id") or "none")
    return at.startswith(commit) or commit.startswith(at)
