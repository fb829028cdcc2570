"""Findings in the formats of other tools: GitHub's workflow commands, SARIF 2.1.0."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from launcher import __version__
from launcher.errors import Finding, Layer

Json = dict[str, Any]

SARIF_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
SARIF_VERSION = "2.1.0"
_COMMAND = {"error": "error", "warning": "warning", "note": "notice"}
_OBJECTS: dict[Layer, str] = {
    "parser": "Upstream's own parser or `__post_init__` refuses it.",
    "run": "Upstream's parser takes it, and the run would crash, ignore it, or do something else.",
    "launch": "launch's own file format and rules.",
}


def github(findings: Iterable[Finding], *, root: Path | None = None) -> str:
    """One workflow command a line, which GitHub shows as annotations of a pull request.

    Files below `root` (the working directory) are named relative to it.
    """
    return "\n".join(_workflow_command(finding, root or Path.cwd()) for finding in findings)


def _workflow_command(finding: Finding, root: Path) -> str:
    properties = {"title": finding.code}
    if finding.file is not None:
        line = {} if finding.line is None else {"line": str(finding.line)}
        properties = {"file": _printable(_relative(finding.file, root)), **line, **properties}
    told = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{_COMMAND[finding.severity]} {told}::{_data(_text(finding))}"


def _text(finding: Finding) -> str:
    help = "" if finding.help is None else f"\nhelp: {finding.help}"
    return _printable(f"{finding.message}{help}")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def sarif(findings: Iterable[Finding], *, root: Path | None = None) -> Json:
    """A SARIF log of one run, whose rules are the codes that occur.

    Files below `root` (the working directory) have URIs relative to it, others absolute ones.
    Fingerprints hold on when lines move: they are made of code, key and file, and a count where one
    of these occurs again.
    """
    found, root = list(findings), root or Path.cwd()
    codes = list(dict.fromkeys(finding.code for finding in found))
    driver = {"name": "launch", "version": __version__, "rules": [_rule(c, found) for c in codes]}
    seen: Counter[str] = Counter()
    return {
        "$schema": SARIF_SCHEMA,
        "version": SARIF_VERSION,
        "runs": [
            {
                "tool": {"driver": driver},
                "results": [_result(finding, codes, root, seen) for finding in found],
            }
        ],
    }


def _rule(code: str, findings: Sequence[Finding]) -> Json:
    """What all findings of a code have in common; docs/findings.md explains each."""
    layers = [f.layer for f in findings if f.code == code]
    told = " ".join(_OBJECTS[layer] for layer in dict.fromkeys(layers))
    return {
        "id": code,
        "name": "".join(part.capitalize() for part in code.split("-")),
        "shortDescription": {"text": code.replace("-", " ")},
        "fullDescription": {"text": told},
        "help": {"text": f"`{code}` in docs/findings.md of launch"},
    }


def _result(finding: Finding, codes: Sequence[str], root: Path, seen: Counter[str]) -> Json:
    uri = None if finding.file is None else _uri(finding.file, root)
    about = "\0".join((finding.code, finding.key or "", uri or ""))
    seen[about] += 1
    fingerprint = hashlib.sha256(_printable(f"{about}\0{seen[about]}").encode()).hexdigest()
    key = {} if finding.key is None else {"key": _printable(finding.key)}
    result: Json = {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": finding.severity,
        # `{0}` would be a placeholder (2.1.0, section 3.11.5): every brace is doubled
        "message": {"text": _text(finding).replace("{", "{{").replace("}", "}}")},
        "partialFingerprints": {"codeKeyFile/v1": fingerprint},
        "properties": {"layer": finding.layer, **key},
    }
    if uri is not None:
        region = {} if finding.line is None else {"region": {"startLine": finding.line}}
        place = {"artifactLocation": {"uri": uri}, **region}
        result["locations"] = [{"physicalLocation": place}]
    return result


def _uri(file: str, root: Path) -> str:
    """A relative or absolute URI (RFC 3986); any bytes that a file's name may hold are encoded."""
    path = _relative(file, root)
    encoded = quote(os.fsencode(path))
    return f"file://{encoded}" if path.startswith("/") else encoded


def _relative(file: str, root: Path) -> str:
    """The path below `root` where it lies there, else the absolute one; without `.` and `..`."""
    try:
        os.fsencode(file)
    except UnicodeEncodeError:
        # no file can have such a name
        file = _printable(file)
    path = os.path.join(root, file)
    # behind a link to a folder `..` is not what stands before it
    whole = os.path.realpath if ".." in Path(path).parts else os.path.abspath
    path, top = whole(path), whole(root)
    return os.path.relpath(path, top) if path.startswith(top.rstrip("/") + "/") else path


def _printable(text: str) -> str:
    """The text without lone surrogates (a file's name that is no UTF-8): no stream takes them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
