"""What upstream asks for, against what an environment holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Write

from launcher import requirements
from launcher.machine import Trainer
from launcher.requirements import Wanted

LINUX = {"platform_system": "Linux", "platform_machine": "x86_64", "python_version": "3.12"}


def trainer(*path: Path, **packages: str) -> Trainer:
    return Trainer(
        python=Path("/env/bin/python"), source="a test", version=(3, 12, 1), path=path,
        packages={name.replace("_", "-"): version for name, version in packages.items()},
        markers=LINUX,
    )  # fmt: skip


def project(write: Write, text: str, tmp_path: Path, python: Trainer) -> list[str]:
    write("pyproject.toml", text)
    told = requirements.of_checkout(tmp_path, python)
    assert told is not None
    return [one.text for one in told]


def test_conditions_hold_for_the_trainers_python(write: Write, tmp_path: Path) -> None:
    text = """
[project]
dependencies = [
    "Ray[default]>=2.49.2", "vllm>=0.19; platform_system != 'Darwin'",
    "winreg; platform_system == 'Windows'", "old<2; python_version < '3.9'",
    "fa3 @ https://example.org/fa3.whl ; platform_machine == 'x86_64'",
    "extra-only; extra == 'code'", "no valid requirement at all ><", 7,
]
"""
    assert project(write, text, tmp_path, trainer()) == ["ray>=2.49.2", "vllm>=0.19", "fa3"]


@pytest.mark.parametrize("text", ["[project", "[tool]\nx = 1", "project = 3"])
def test_a_project_file_that_says_nothing(write: Write, tmp_path: Path, text: str) -> None:
    assert requirements.of_checkout(tmp_path, trainer()) is None
    write("pyproject.toml", text)
    assert requirements.of_checkout(tmp_path, trainer()) is None


@pytest.mark.parametrize(
    ("version", "specifier", "fits"),
    [
        ("2.13.0+cpu", "==2.13.0", True), ("1.0", ">=2", False), ("3.0.0rc1", ">=2.5", True),
        ("built by hand", ">=2", True),
    ],
)  # fmt: skip
def test_versions(version: str, specifier: str, fits: bool) -> None:
    wanted = [Wanted(name="a-b", specifier=specifier, by="a test")]
    found = requirements.deviations(wanted, trainer(a_b=version))
    assert [one.found for one in found] == ([] if fits else [version])
    (missing,) = requirements.deviations(wanted, trainer())
    assert missing.text == f"a-b is missing ({specifier})"


def installed(folder: Path, name: str, version: str, *needs: str, source: object = None) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    rows = [f"Requires-Dist: {one}" for one in needs]
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *rows, ""])
    )
    if source is not None:
        (info / "direct_url.json").write_text(json.dumps(source))


def test_packages_are_asked_in_turn(tmp_path: Path) -> None:
    installed(tmp_path, "trl", "1.16.0", "transformers>=4.56", 'vllm>=1; extra == "vllm"')
    installed(tmp_path, "transformers", "5.17.0", "tokenizers<0.24,>=0.23", "trl")
    installed(tmp_path, "tokenizers", "0.22.0", "gone>=1")
    python = trainer(tmp_path, trl="1.16.0", transformers="5.17.0", tokenizers="0.22.0")
    found = requirements.deviations(requirements.of_packages(["trl"], python), python)
    assert [(one.text, one.by) for one in found] == [
        ("tokenizers 0.22.0 (<0.24,>=0.23)", "transformers 5.17.0"),
        ("gone is missing (>=1)", "tokenizers 0.22.0"),
    ]
    assert requirements.of_packages(["torch"], python) == ()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, "ai2-olmo-core 2.6.0 (git commit 002958a8f15a)"),
        ({"vcs_info": {"commit_id": "ffff58a8f15aaaaa"}}, "ai2-olmo-core 2.6.0 (git commit 002958a8f15a)"),
        ({"vcs_info": {"commit_id": "002958a8f15abcde"}}, None),
        ({"dir_info": {"editable": True}}, None),
    ],
)  # fmt: skip
def test_a_package_that_is_to_come_from_a_commit(
    write: Write, tmp_path: Path, source: object, text: str | None
) -> None:
    site = tmp_path / "site"
    installed(site, "ai2-olmo-core", "2.6.0", source=source)
    write(
        "pyproject.toml",
        '[project]\ndependencies = ["ai2-olmo-core"]\n[tool.uv.sources]\n'
        'ai2-olmo-core = { git = "https://example.org", rev = "002958a8f15a" }\n'
        'torch = [{ index = "a" }]\n',
    )
    python = trainer(site, ai2_olmo_core="2.6.0")
    told = requirements.of_checkout(tmp_path, python)
    assert told is not None
    found = requirements.deviations(told, python)
    assert [one.text for one in found] == ([] if text is None else [text])


def test_what_the_pin_asks_for(checkout: Path) -> None:
    python = trainer(torch="2.9.0", transformers="5.17.0", wandb="0.23.1", ray="2.60.0")
    told = requirements.of_checkout(checkout, python)
    assert told is not None and told[0].specifier == "==3.12.*"
    found = {one.name: one.text for one in requirements.deviations(told, python)}
    assert found["torch"] == "torch 2.9.0 (>=2.10.0)"
    assert not {"Python", "transformers", "wandb", "ray"} & found.keys()
