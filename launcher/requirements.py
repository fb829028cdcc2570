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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from launcher.machine import Trainer

_EXTRA = re.compile(r";.*\bextra\s*==")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One requirement that holds for the trainer's Python: a version range, or a git commit."""

    name: str
    specifier: str
    by: str
    commit: str | None = None

    @property
    def text(self) -> str:
        """What pip takes."""
        return f"{self.name}{self.specifier}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a project asks for: a range of Pythons and packages."""

    by: str
    python: str | None = None
    packages: tuple[Wanted, ...] = ()


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
        return {"name": self.name, "found": self.found, "wanted": self.wanted, "by": self.by}


def of_checkout(root: Path, trainer: Trainer) -> Declared | None:
    """What the checkout's pyproject.toml asks for; None where it is not there or cannot be read."""
    try:
        told = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    project = told.get("project")
    if not isinstance(project, Mapping):
        return None
    listed = project.get("dependencies")
    python = project.get("requires-python")
    commits = _commits(told)
    by = "the checkout's pyproject.toml"
    return Declared(
        by=by,
        python=python if isinstance(python, str) else None,
        packages=tuple(_wanted(listed if isinstance(listed, list) else [], trainer, by, commits)),
    )


def _commits(told: Mapping[str, Any]) -> dict[str, str]:
    """The packages that are to come from a git commit (uv's own table)."""
    sources: Any = told
    for key in ("tool", "uv", "sources"):
        sources = sources.get(key) if isinstance(sources, Mapping) else None
    found = {}
    for name, source in sources.items() if isinstance(sources, Mapping) else ():
        if isinstance(source, Mapping) and isinstance(source.get("rev"), str):
            found[canonicalize_name(name)] = source["rev"]
    return {str(name): commit for name, commit in found.items()}


def of_packages(names: Iterable[str], trainer: Trainer) -> tuple[Wanted, ...]:
    """What installed distributions ask for, and those that they ask for in turn."""
    waiting = [canonicalize_name(name) for name in names]
    seen, found = set(waiting), list[Wanted]()
    while waiting:
        name = waiting.pop(0)
        version = trainer.packages.get(name)
        if version is None:
            continue
        for wanted in _wanted(_metadata(name, trainer), trainer, f"{name} {version}", {}):
            found.append(wanted)
            if wanted.name not in seen:
                seen.add(canonicalize_name(wanted.name))
                waiting.append(canonicalize_name(wanted.name))
    return tuple(found)


def deviations(wanted: Iterable[Wanted], trainer: Trainer) -> tuple[Deviation, ...]:
    """What is missing or here in another version, each package once."""
    found: dict[str, Deviation] = {}
    for one in wanted:
        version = trainer.packages.get(one.name)
        if version is None or not _within(version, one.specifier):
            text = one.specifier or "any version"
            found.setdefault(
                one.name, Deviation(name=one.name, found=version, wanted=text, by=one.by)
            )
        elif one.commit is not None and (at := _installed_from(one.name, trainer)) is not False:
            fits = isinstance(at, str) and (at.startswith(one.commit) or one.commit.startswith(at))
            if not fits:
                text = f"git commit {one.commit[:12]}"
                found.setdefault(
                    one.name, Deviation(name=one.name, found=version, wanted=text, by=one.by)
                )
    return tuple(found.values())


def satisfied(requirement: str, version: str) -> bool:
    """Whether a version is one that a requirement, as pip takes it, allows."""
    try:
        return _within(version, str(Requirement(requirement).specifier))
    except InvalidRequirement:
        return True


def python_deviation(declared: Declared, trainer: Trainer) -> Deviation | None:
    """Where the trainer's Python is not one that is asked for."""
    version = ".".join(map(str, trainer.version))
    if declared.python is None or _within(version, declared.python):
        return None
    return Deviation(name="Python", found=version, wanted=declared.python, by=declared.by)


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


def _distribution(name: str, trainer: Trainer) -> importlib.metadata.Distribution | None:
    path = [str(folder) for folder in trainer.path]
    return next(iter(importlib.metadata.Distribution.discover(name=name, path=path)), None)


def _metadata(name: str, trainer: Trainer) -> list[str]:
    """The requirements of a distribution, as it states them."""
    found = _distribution(name, trainer)
    if found is None:
        return []
    try:
        head, _, _ = (found.read_text("METADATA") or "").partition("\n\n")
        # without parsing the whole, which may hold a book of a description
        listed = [line for line in head.splitlines() if line.startswith("Requires-Dist:")]
        return [line.partition(":")[2].strip() for line in listed] or (
            [] if head else list(found.requires or [])
        )
    except (OSError, ValueError):
        return []


def _installed_from(name: str, trainer: Trainer) -> str | bool:
    """The git commit that a distribution was installed from; True for a published one, False for what
    does not say (a folder that is edited).
    """
    found = _distribution(name, trainer)
    if found is None:
        return False
    try:
        told = json.loads(found.read_text("direct_url.json") or "null")
    except (OSError, ValueError):
        return False
    if told is None:
        return True
    source = told.get("vcs_info") if isinstance(told, Mapping) else None
    commit = source.get("commit_id") if isinstance(source, Mapping) else None
    return commit if isinstance(commit, str) else False
