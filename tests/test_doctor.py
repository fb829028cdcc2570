"""What a machine lacks for a plan, each with what mends it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from plans import CONFIGS, SFT, TRL, from_text, planned, staged, trainer

from launcher import doctor, machine
from launcher.backends import BACKENDS
from launcher.errors import Finding, NotReady
from launcher.plan import Plan

TULU = CONFIGS / "tulu" / "sft_qwen7b.yaml"
ALL = (*BACKENDS["open_instruct"].NEEDS, "liger-kernel", "flash-attn")


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: 2)


def lacking(made: Plan, *packages: str) -> list[str]:
    found = list(doctor.packages(made, trainer(*packages)))
    return found[0].message.partition(" lacks ")[2].split(", ") if found else []


def test_a_machine_that_is_ready() -> None:
    doctor.require_ready(planned(staged(TULU), 2), trainer(*ALL))


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    stage = from_text(tmp_path, SFT.format(more="").replace("[set,", f"[{data},"))
    stage = replace(stage, upstream=replace(stage.upstream, root=None))
    made = planned(stage, 8)
    with pytest.raises(NotReady) as caught:
        doctor.require_ready(made, trainer("torch", version=(3, 9, 2)))
    found = caught.value.findings
    assert [f.code for f in found] == [
        "no-checkout", "old-python", "missing-packages", "too-few-gpus", "missing-data",
    ]  # fmt: skip
    assert {f.severity for f in found} == {"error"}
    assert all(f.help for f in found)


def test_the_command_that_installs(tmp_path: Path) -> None:
    made = planned(staged(TULU), 2)
    (finding,) = doctor.packages(made, trainer(*set(ALL) - {"flash-attn", "deepspeed"}))
    assert finding.message == "/env/bin/python (a test) lacks deepspeed, flash-attn"
    assert "/env/bin/python -m pip install deepspeed flash-attn" in (finding.help or "")


@pytest.mark.parametrize(
    ("more", "gpus", "expected"),
    [
        ("", 0, []),
        ("use_liger_kernel: true", 0, ["liger-kernel"]),
        ("use_peft: true", 0, ["peft"]),
        ("use_peft: false", 0, []),
        ("use_peft: true\n  load_in_4bit: true", 0, ["peft", "bitsandbytes"]),
    ],
)
def test_what_the_arguments_need(tmp_path: Path, more: str, gpus: int, expected: list[str]) -> None:
    stage = from_text(tmp_path, TRL.format(data="some/set", more=more or "seed: 1"))
    assert lacking(planned(stage, gpus), *BACKENDS["trl"].NEEDS) == expected


def test_trl_with_deepspeed_needs_it_on_gpus_only() -> None:
    stage = staged(CONFIGS / "demo" / "sft.yaml", ["deepspeed=zero2"])
    assert lacking(planned(stage, 1), *BACKENDS["trl"].NEEDS) == ["deepspeed"]
    assert lacking(planned(stage, 0), *BACKENDS["trl"].NEEDS) == []


def test_the_cpu_needs_no_flash_attention() -> None:
    made = planned(staged(CONFIGS / "demo" / "sft_open_instruct.yaml"), 0)
    assert lacking(made, *BACKENDS["open_instruct"].NEEDS) == []


@pytest.mark.parametrize(
    ("asked", "present", "help"),
    [(0, 0, None), (2, 2, None), (2, 8, None), (2, 1, "--gpus 1"), (2, 0, "--gpus 0")],
)
def test_gpus(asked: int, present: int, help: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: present)
    found: list[Finding] = list(doctor.devices(planned(staged(TULU), asked)))
    assert [f.code for f in found] == (["too-few-gpus"] if help else [])
    if help:
        assert (found[0].help or "").startswith(help)
        assert f"{asked} GPU(s) asked for, {present} here" in found[0].message


def test_gpus_that_are_hidden_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: 1)
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_VISIBLE_DEVICES": "3"})
    (finding,) = doctor.devices(planned(staged(TULU), 2))
    assert finding.message == "2 GPU(s) asked for, 1 here (CUDA_VISIBLE_DEVICES=3)"


def test_missing_data_is_an_error_of_the_run(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    stage = from_text(tmp_path, SFT.format(more="").replace("[set,", f"[{data},"))
    (finding,) = doctor.local_files(planned(stage, 1))
    assert (finding.severity, finding.layer, finding.code) == ("error", "run", "missing-data")
    assert finding.line == 6
    data.write_text("{}\n")
    stage = from_text(tmp_path, SFT.format(more="").replace("[set,", f"[{data},"))
    assert not list(doctor.local_files(planned(stage, 1)))
