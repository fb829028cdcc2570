"""Stage files, rows and servers with which `rehearse` and `preview` are tested."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import find_checkout

from launcher.workflows.rehearse import ask
from launcher.workflows.rehearse.ask import Servers

MIXERS = {"sft": "dataset_mixer_list", "dpo": "mixer_list"}
"""How open-instruct's scripts call the list of their data sets."""
NO_SYSTEM_ROLE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
)
"""A chat template that refuses the system role, as many do."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One server a script for all tests of a file: importing a trainer takes the most time."""
    folder = tmp_path_factory.mktemp("servers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.setattr(tempfile, "tempdir", str(folder))
        with Servers() as opened:
            yield opened
    assert list(folder.iterdir()) == []


def use_own_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep a test out of the real home; returns the folder for temporary files."""
    checkout = find_checkout()
    if checkout is not None:
        monkeypatch.setenv("LAUNCH_OPEN_INSTRUCT", str(checkout))
    monkeypatch.setenv("HOME", str(folder / "home"))
    temporary = folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    return temporary


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [turn("user", question), turn("assistant", answer)]


def write_rows(folder: Path, rows: Iterable[Any]) -> Path:
    """Write a data set; returns its only file."""
    folder.mkdir(exist_ok=True)
    path = folder / "train.jsonl"
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_stage(path: Path, stage: str, backend: str, args: dict[str, Any], **options: Any) -> Path:
    """Write a stage file; a value None leaves an argument or an option out."""
    options = {"stage": stage, "backend": backend, "deepspeed": "none", **options}
    content = {**without_none(options), "args": without_none(args)}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def mixed_args(stage: str, data: Path | str, amount: str) -> dict[str, Any]:
    """What a stage of open-instruct always needs, with an amount of one data set."""
    return {
        MIXERS[stage]: [str(data), amount],
        "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
    }


def copy_model(assets: Path, folder: Path, template: str | None = None) -> Path:
    """A copy of the demo's model, with another chat template if there is one."""
    shutil.copytree(assets / "model", folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def copy_server(folder: Path) -> None:
    """Copy the rehearsal's server without the code of any stage."""
    (folder / "inside").mkdir(parents=True)
    for name in ("server.py", "inside/__init__.py", "inside/calls.py", "inside/records.py"):
        shutil.copy(ask.SERVER.parent / name, folder / name)
