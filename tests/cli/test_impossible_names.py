"""Texts where the name of a file is expected that no file can have: each is an answer, never a crash."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Write

from launcher.cli.main import main
from launcher.errors import Exit

TEMPLATE = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
LONG = "x" * 300
IMPOSSIBLE = {
    "a long template": TEMPLATE * 20,
    "a long name": LONG,
    "a long part of a path": f"a/{LONG}/b",
    "a long path": "/".join(["y" * 200] * 30),
    "several lines": "a\nb/c\n" * 60,
}
ADVICE = "write it to x.jinja, then `chat_template_path: x.jinja`"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def stage_file(backend: str, *, stage: str = "sft", **args: Any) -> str:
    """A stage file with these arguments beside, or in place of, those that it needs."""
    if backend == "trl":
        needed: dict[str, Any] = {"dataset_name": "org/data"}
    else:
        services = {"push_to_hub": False, "try_launch_beaker_eval_jobs": False}
        needed = {"dataset_mixer_list": ["org/data", 1.0], "max_seq_length": 64, **services}
    needed |= {"model_name_or_path": "org/model", "output_dir": "out"}
    content = {"stage": stage, "backend": backend, "deepspeed": "none", "args": {**needed, **args}}
    return yaml.safe_dump(content, sort_keys=False)


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    capsys.readouterr()
    code = main([*words, "--format", "json"])
    findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return code, findings


@pytest.mark.parametrize("times", [1, 20], ids=["short", "long"])
@pytest.mark.parametrize(
    ("backend", "stage", "key", "advice"),
    [
        ("trl", "sft", "chat_template", ADVICE),
        ("trl", "sft", "chat_template_path", ADVICE),
        ("trl", "sft", "chat_template_name", ADVICE),
        ("trl", "sft", "custom_chat_template", ADVICE),
        ("trl", "dpo", "chat_template", "write it to chat_template.jinja in the model's folder"),
        (
            "open_instruct",
            "sft",
            "chat_template",
            "write it to chat_template.jinja in a folder with the tokenizer's",
        ),
        (
            "open_instruct",
            "sft",
            "chat_template_name",
            "write it to chat_template.jinja in a folder with",
        ),
    ],
)
def test_a_template_in_the_file(
    capsys: pytest.CaptureFixture[str],
    write: Write,
    backend: str,
    stage: str,
    key: str,
    advice: str,
    times: int,
) -> None:
    text = stage_file(backend, stage=stage, **{key: TEMPLATE * times})
    path = write("a.yaml", text)
    # what --fix cannot mend it leaves alone
    for words in (("validate-config",), ("validate-config", "--fix")):
        code, findings = answered(capsys, *words, str(path))
        (finding,) = [one for one in findings if one["severity"] == "error"]
        assert (code, finding["code"], finding["key"]) == (
            Exit.CONFIG,
            "inline-template",
            f"args.{key}",
        )
        assert advice in finding["help"]
        assert path.read_text() == text


def test_a_template_that_is_no_file_folder_or_hub_name(
    capsys: pytest.CaptureFixture[str], write: Write
) -> None:
    for name, code in (
        ("mine.jinja", "missing-template"), ("no/such/folder", "missing-template"), ("./here", "missing-template"),
        ("my template", "missing-template"), (LONG, "missing-template"), ("org/tokenizer", None), ("gpt2", None),
    ):  # fmt: skip
        path = write("a.yaml", stage_file("trl", chat_template_path=name))
        _, findings = answered(capsys, "validate-config", str(path))
        errors = [one["code"] for one in findings if one["severity"] == "error"]
        assert errors == ([] if code is None else [code]), name


@pytest.mark.parametrize("text", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
@pytest.mark.parametrize(
    ("backend", "key"),
    [
        ("trl", "model_name_or_path"),
        ("trl", "dataset_name"),
        ("trl", "output_dir"),
        ("trl", "chat_template_path"),
        ("trl", "resume_from_checkpoint"),
        ("trl", "fsdp_config"),
        ("open_instruct", "model_name_or_path"),
        ("open_instruct", "tokenizer_name_or_path"),
        ("open_instruct", "config_name"),
        ("open_instruct", "dataset_mixer_list"),
        ("open_instruct", "dataset_local_cache_dir"),
        ("open_instruct", "output_dir"),
    ],
)
def test_an_argument(
    capsys: pytest.CaptureFixture[str], write: Write, backend: str, key: str, text: str
) -> None:
    value = [text, 1.0] if key == "dataset_mixer_list" else text
    path = str(write("a.yaml", stage_file(backend, **{key: value})))
    unchecked = {"resume_from_checkpoint", "fsdp_config", "dataset_local_cache_dir"}
    for words in (
        ("validate-config", path),
        ("plan", path, "--gpus", "1", "--row-tokens", "10:20"),
        ("sft", path, "--gpus", "0", "--dry-run"),
    ):
        code, findings = answered(capsys, *words)
        assert code in {Exit.OK, Exit.CONFIG, Exit.NOT_READY}
        is_dir_with_lines = key == "output_dir" and text is IMPOSSIBLE["several lines"]
        if key not in unchecked and not is_dir_with_lines:
            assert f"args.{key}" in {one["key"] for one in findings if one["severity"] == "error"}


@pytest.mark.parametrize("text", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_word_of_the_command_line(
    capsys: pytest.CaptureFixture[str], write: Write, text: str
) -> None:
    path = str(write("a.yaml", stage_file("trl")))
    for words in (
        ("validate-config", text), ("check", text), ("report", text), ("pipeline", text),
        ("data", "convert", text, "-o", "x.jsonl"), ("init", "sft", "--model", "m", "--data", text, "-o", "n.yaml"),
        ("init", "sft", "--model", "m", "--data", "d", "-o", text), ("init", "--from", text),
        ("configs", "copy", "demo/sft", text), ("validate-config", path, "--python", text),
        ("validate-config", path, "--open-instruct", text), ("plan", path, "--shape", text),
        ("sft", path, f"output_dir={text}", "--gpus", "0", "--dry-run"),
    ):  # fmt: skip
        code = main([*words])
        out = capsys.readouterr()
        assert code != Exit.BUG, (words[:2], out.err)
        Path("n.yaml").unlink(missing_ok=True)
