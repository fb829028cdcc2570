"""Findings as GitHub's workflow commands and as SARIF 2.1.0."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from hypothesis import given
from hypothesis import strategies as st

from launcher import annotations, config, stage
from launcher.errors import Finding

COMMAND = re.compile(r"::(error|warning|notice) ([^\r\n]*?)::([^\r\n]*)\Z")


def finding(message: str = "wrong", **more: Any) -> Finding:
    standard: dict[str, Any] = {"severity": "error", "layer": "parser", "code": "unknown-key"}
    return Finding(message=message, **{**standard, **more})


def unescaped(text: str) -> str:
    """As GitHub's runner reads it: `%25` last."""
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ",")):
        text = text.replace(code, character)
    return text.replace("%25", "%")


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as the runner takes it apart."""
    found = COMMAND.match(line)
    assert found is not None, line
    pairs = (pair.partition("=") for pair in found[2].split(","))
    return found[1], {name: unescaped(value) for name, _, value in pairs}, unescaped(found[3])


def one_result(of: Finding, root: Path = Path("/srv")) -> dict[str, Any]:
    (result,) = annotations.sarif([of], root=root)["runs"][0]["results"]
    assert isinstance(result, dict)
    return result


# --- GitHub ---------------------------------------------------------------------------------------


def test_a_finding_is_one_workflow_command() -> None:
    told = annotations.github([finding(file="configs/a.yaml", line=14, help="write `b`")])
    assert told == (
        "::error file=configs/a.yaml,line=14,title=unknown-key::wrong%0Ahelp: write `b`"
    )


def test_severities() -> None:
    found = [finding(severity=severity) for severity in ("error", "warning", "note")]
    lines = annotations.github(found).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::notice"]


@given(st.text(), st.text(st.characters(exclude_characters="\0"), min_size=1))
def test_any_text_stays_one_command_and_comes_back(message: str, name: str) -> None:
    told = annotations.github([finding(message, file=f"/elsewhere/{name}", line=3)])
    assert len(told.split("\n")) == 1 and "\r" not in told
    told.encode("utf-8")
    _, properties, text = parsed(told)
    assert text == message.encode("utf-8", "backslashreplace").decode()
    assert properties["line"] == "3"
    assert properties["title"] == "unknown-key"


def test_a_message_cannot_smuggle_in_another_command() -> None:
    told = annotations.github([finding("x\n::add-mask::y\r\n::error::z", file="a,b:c%.yaml")])
    assert told == (
        "::error file=a%2Cb%3Ac%25.yaml,title=unknown-key::x%0A::add-mask::y%0D%0A::error::z"
    )


# --- SARIF ----------------------------------------------------------------------------------------


def test_the_log_names_its_tool_and_rules() -> None:
    found = [
        finding(code="unknown-key"),
        finding(code="bad-value", severity="warning", layer="launch"),
        finding(code="unknown-key", layer="launch"),
    ]
    log = annotations.sarif(found)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "launch" and driver["version"]
    assert [rule["id"] for rule in driver["rules"]] == ["unknown-key", "bad-value"]
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"] and rule["fullDescription"]["text"]
    for result, of in zip(run["results"], found, strict=True):
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == of.code
        assert result["level"] == of.severity
        assert result["properties"]["layer"] == of.layer
    assert json.loads(json.dumps(log, allow_nan=False)) == log


def test_a_result_says_what_where_and_what_to_do() -> None:
    result = one_result(finding("{1}", key="args.x", help="do y", file="a.yaml", line=7))
    assert result["message"]["text"] == "{{1}}\nhelp: do y"
    assert result["properties"] == {"layer": "parser", "key": "args.x"}
    (place,) = result["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "a.yaml"},
        "region": {"startLine": 7},
    }


@pytest.mark.parametrize(
    ("file", "uri"),
    [
        ("configs/a.yaml", "configs/a.yaml"),
        ("/srv/configs/a.yaml", "configs/a.yaml"),
        ("/elsewhere/a b.yaml", "file:///elsewhere/a%20b.yaml"),
        ("a:b.yaml", "a%3Ab.yaml"),
        ("ä/猫.yaml", "%C3%A4/%E7%8C%AB.yaml"),
        ("\udcff.yaml", "%FF.yaml"),
    ],
)
def test_uris(file: str, uri: str) -> None:
    (place,) = one_result(finding(file=file))["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == uri


def test_a_path_through_a_link_is_resolved(tmp_path: Path) -> None:
    (tmp_path / "deep" / "folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "folder")
    (place,) = one_result(finding(file="link/../a.yaml"), tmp_path)["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "deep/a.yaml"


def fingerprints(*found: Finding) -> list[str]:
    results = annotations.sarif(found)["runs"][0]["results"]
    return [result["partialFingerprints"]["codeKeyFile/v1"] for result in results]


def test_fingerprints_tell_findings_apart() -> None:
    moved = finding("reworded", key="args.x", file="a.yaml", line=30)
    assert fingerprints(moved) == fingerprints(finding(key="args.x", file="a.yaml", line=3))
    told = fingerprints(
        finding(key="args.x", file="a.yaml"),
        finding(key="args.y", file="a.yaml"),
        finding(key="args.x", file="b.yaml"),
        finding(key="args.x", file="a.yaml", code="bad-value"),
        finding(key="args.x"),
        finding(key="args.x", file="a.yaml"),
    )
    assert len(set(told)) == len(told)
    assert all(re.fullmatch(r"[0-9a-f]{64}", one) for one in told)


# --- of a real file -------------------------------------------------------------------------------


def test_the_findings_of_a_file_in_both_formats(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write("my files/a.yaml", "stage: sft\nargs:\n  learning_rat: 1\n  seed: x\nbatch: 3\n")
    found = stage.judge(config.load("my files/a.yaml")).findings
    lines = annotations.github(found).splitlines()
    assert len(lines) == len(found)
    for line, of in zip(lines, found, strict=True):
        _, properties, text = parsed(line)
        assert properties["file"] == of.file
        assert properties["line"] == str(of.line)
        assert text.startswith(of.message)
    (run,) = annotations.sarif(found)["runs"]
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    assert {place["artifactLocation"]["uri"] for place in places} == {"my%20files/a.yaml"}
    assert [place["region"]["startLine"] for place in places] == [of.line for of in found]
