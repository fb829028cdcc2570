"""Texts that no file can have as its name, where one is expected: an answer, never a crash."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from answers import Ask
from answers import ask as ask  # a fixture
from conftest import Write

from launcher.cli.main import main
from launcher.errors import Exit

TEMPLATE = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
LONG = "x" * 300
LINES = "a\nb/c\n" * 60
IMPOSSIBLE = [
    pytest.param(LONG, id="a long name"),
    pytest.param("/".join(["y" * 200] * 30), id="a long path"),
    pytest.param(LINES, id="several lines"),
]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def stage_text(backend: str, *, stage: str = "sft", **args: object) -> str:
    """A stage file with these arguments beside, or in place of, those that it needs."""
    needed: dict[str, object] = {"model_name_or_path": "org/model", "output_dir": "out"}
    if backend == "trl":
        needed["dataset_name"] = "org/data"
    else:
        needed["dataset_mixer_list"] = ["org/data", 1.0]
        needed["max_seq_length"] = 64
        needed["push_to_hub"] = False
        needed["try_launch_beaker_eval_jobs"] = False
    options = {"stage": stage, "backend": backend, "deepspeed": "none"}
    return yaml.safe_dump({**options, "args": {**needed, **args}}, sort_keys=False)


TO_PATH = "write it to x.jinja, then `chat_template_path: x.jinja`"
TO_MODEL = "write it to chat_template.jinja in the model's folder"
TO_TOKENIZER = "write it to chat_template.jinja in a folder with the tokenizer's"


@pytest.mark.parametrize("fix", [[], ["--fix"]], ids=["judged", "fixed"])
@pytest.mark.parametrize("times", [1, 20], ids=["short", "long"])
@pytest.mark.parametrize(
    ("backend", "stage", "key", "help"),
    [
        ("trl", "sft", "chat_template", TO_PATH),
        ("trl", "sft", "chat_template_path", TO_PATH),
        ("trl", "sft", "chat_template_name", TO_PATH),
        ("trl", "sft", "custom_chat_template", TO_PATH),
        ("trl", "dpo", "chat_template", TO_MODEL),
        ("open_instruct", "sft", "chat_template", TO_TOKENIZER),
        ("open_instruct", "sft", "chat_template_name", TO_TOKENIZER),
    ],
)
def test_a_template_in_the_stage_file_belongs_into_a_file(
    ask: Ask,
    write: Write,
    backend: str,
    stage: str,
    key: str,
    help: str,
    times: int,
    fix: list[str],
) -> None:
    text = stage_text(backend, stage=stage, **{key: TEMPLATE * times})
    path = write("a.yaml", text)
    answer = ask("validate-config", *fix, str(path))
    assert answer.code == Exit.CONFIG
    assert answer.errors == [("inline-template", f"args.{key}")]
    (finding,) = answer.with_code("inline-template")
    assert help in finding["help"]
    # what --fix cannot mend it leaves alone
    assert path.read_text() == text


@pytest.mark.parametrize(
    "name", ["mine.jinja", "no/such/folder", "./here", "my template", pytest.param(LONG, id="long")]
)
def test_a_template_that_is_no_file_folder_or_hub_name(ask: Ask, write: Write, name: str) -> None:
    path = write("a.yaml", stage_text("trl", chat_template_path=name))
    errors = ask("validate-config", str(path)).errors
    assert errors == [("missing-template", "args.chat_template_path")]


@pytest.mark.parametrize("name", ["org/tokenizer", "gpt2"])
def test_a_template_may_be_a_tokenizer_of_the_hub(ask: Ask, write: Write, name: str) -> None:
    path = write("a.yaml", stage_text("trl", chat_template_path=name))
    assert ask("validate-config", str(path)).errors == []


CHECKED = [
    ("trl", "model_name_or_path"),
    ("trl", "dataset_name"),
    ("trl", "output_dir"),
    ("trl", "chat_template_path"),
    ("open_instruct", "model_name_or_path"),
    ("open_instruct", "tokenizer_name_or_path"),
    ("open_instruct", "config_name"),
    ("open_instruct", "dataset_mixer_list"),
    ("open_instruct", "output_dir"),
]
UNCHECKED = [
    ("trl", "resume_from_checkpoint"),
    ("trl", "fsdp_config"),
    ("open_instruct", "dataset_local_cache_dir"),
]


@pytest.mark.parametrize(
    "command",
    [
        ["validate-config", "a.yaml"],
        ["plan", "a.yaml", "--gpus", "1", "--row-tokens", "10:20"],
        ["sft", "a.yaml", "--gpus", "0", "--dry-run"],
    ],
    ids=["validate-config", "plan", "sft"],
)
@pytest.mark.parametrize("text", IMPOSSIBLE)
@pytest.mark.parametrize(("backend", "key"), [*CHECKED, *UNCHECKED])
def test_an_argument_is_refused(
    ask: Ask, write: Write, backend: str, key: str, text: str, command: list[str]
) -> None:
    value: Any = [text, 1.0] if key == "dataset_mixer_list" else text
    write("a.yaml", stage_text(backend, **{key: value}))
    answer = ask(*command)
    assert answer.code in {Exit.OK, Exit.CONFIG, Exit.NOT_READY}
    # a new folder may be called so
    is_possible = key == "output_dir" and text == LINES
    if (backend, key) in CHECKED and not is_possible:
        assert f"args.{key}" in {error_key for _, error_key in answer.errors}


COMMANDS = """
validate-config TEXT
check TEXT
report TEXT
pipeline TEXT
data convert TEXT -o x.jsonl
init sft --model m --data TEXT -o n.yaml
init sft --model m --data d -o TEXT
init --from TEXT
configs copy demo/sft TEXT
validate-config a.yaml --python TEXT
validate-config a.yaml --open-instruct TEXT
plan a.yaml --shape TEXT
sft a.yaml output_dir=TEXT --gpus 0 --dry-run
"""


@pytest.mark.parametrize("command", COMMANDS.strip().splitlines())
@pytest.mark.parametrize("text", IMPOSSIBLE)
def test_a_word_of_the_command_line_is_refused(write: Write, text: str, command: str) -> None:
    write("a.yaml", stage_text("trl"))
    words = [word.replace("TEXT", text) for word in command.split()]
    assert main(words) != Exit.BUG
