"""What a trained model is good for: answers before and after, chat and merge."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, STAND_INS
from real_answers import Answer, launch, succeed
from real_training import CONFIGS, needs_training
from real_training import place as place  # a fixture
from recorded_events import read_lines

pytestmark = [pytest.mark.slow, *needs_training]

SFT = ("sft", str(CONFIGS / "sft.yaml"), "--gpus", "0", "expect.trend=any")
SHORT_ANSWER = ("--max-new-tokens", "8", "--temperature", "0")
QUESTION = "What is a list?"


@pytest.fixture(scope="module")
def whole(place: Path) -> Answer:
    """A run of the demo's SFT with samples and an evaluation."""
    data = place / "build" / "demo" / "data" / "sft"
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    (data / "test.jsonl").write_text("".join(lines[:4]))
    (data / "train.jsonl").write_text("".join(lines[4:100]))
    evaluation = ("eval_strategy=steps", "eval_steps=2")
    return succeed(
        place, *SFT, "max_steps=4", "samples=1", *evaluation, "output_dir=build/demo/whole"
    )


@pytest.fixture(scope="module")
def adapted(place: Path, whole: Answer) -> Answer:
    """A LoRA run on the result of that."""
    model = ("model_name_or_path=build/demo/whole", "output_dir=build/demo/lora")
    adapter = ("use_peft=true", "lora_r=8", "lora_target_modules=all-linear")
    return succeed(
        place, *SFT, "max_steps=6", *model, *adapter, "learning_rate=0.01", "warmup_steps=0"
    )


@pytest.fixture(scope="module")
def chat(place: Path, whole: Answer) -> Any:
    """Two prompts to the trained model, and to its base beside it."""
    prompts = ("--prompt", QUESTION, "--prompt", "Why?")
    return succeed(place, "chat", whole.run.name, "--base", *prompts, *SHORT_ANSWER).data


@pytest.fixture(scope="module")
def adapter_chat(place: Path, adapted: Answer) -> Any:
    words = ("chat", adapted.run.name, "--base", "--prompt", QUESTION)
    return succeed(place, *words, *SHORT_ANSWER).data


@pytest.fixture(scope="module")
def merged(place: Path, adapted: Answer) -> Iterator[Answer]:
    """The adapter merged after QLoRA, into a folder where a killed merge left its half."""
    half = place / "out" / ".merged.merging"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("half")
    record = adapted.run / "run.json"
    original = record.read_text()
    manifest = json.loads(original)
    manifest["args"]["load_in_4bit"] = {"value": True, "origin": "a.yaml:3"}
    record.write_text(json.dumps(manifest))
    yield succeed(place, "merge", adapted.run.name, "--output", "out/merged")
    record.write_text(original)


def copy_model(place: Path, name: str) -> Path:
    folder = place / "build" / "demo" / name
    shutil.copytree(place / "build" / "demo" / "whole", folder)
    return folder


def environment(place: Path, path: str = STAND_INS) -> dict[str, str]:
    return {
        **os.environ,
        "LAUNCH_RUNS": str(place / "runs"),
        "XDG_STATE_HOME": str(place / "state"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "HOME": str(place / "home"),
    }


def read_text_answer(
    place: Path, *words: str, text: str = "", path: str = STAND_INS
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does, without `--format json`."""
    return subprocess.run(
        [sys.executable, "-m", "launcher", *words], cwd=place, env=environment(place, path),
        input=text, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


def test_samples_hold_answers_before_and_after(whole: Answer) -> None:
    record = json.loads((whole.run / "samples.json").read_text())
    assert record["failed"] is None
    assert record["from"] == "the split test, which was not trained on"
    (prompt,) = record["prompts"]
    assert prompt["before"]["tokens"]
    assert prompt["after"]["tokens"]
    assert prompt["expected"]
    assert "Before and after" in (whole.run / "report.html").read_text()


def test_the_validation_loss_stands_in_the_metrics(whole: Answer) -> None:
    rows = read_lines(whole.run / "metrics.jsonl")
    evaluated = [row["step"] for row in rows if "eval_loss" in row]
    assert evaluated == [2, 4]
    for name in set().union(*rows):
        assert not name.endswith(("_runtime", "_per_second"))


def test_the_end_names_model_chat_server_and_hub(whole: Answer, adapted: Answer) -> None:
    assert whole.data["next"]["model"] == "build/demo/whole"
    assert whole.data["next"]["merge"] is None

    steps = adapted.data["next"]
    assert steps["chat"] == f"launch chat {adapted.run.name}"
    assert steps["serve"].startswith("vllm serve build/demo/whole --enable-lora --max-lora-rank 8")


def first_answer(chat: Any, who: str = "model") -> str:
    answer: str = chat["turns"][0][who]["text"]
    return answer


def test_a_run_answers_and_its_base_beside_it(place: Path, chat: Any) -> None:
    assert chat["model"] == str(place / "build/demo/whole")
    assert chat["adapter"] is False
    assert chat["base"]["name"] == str(place / "build/demo/model")
    assert chat["chat_template"]
    first, second = chat["turns"]
    assert [first["prompt"], second["prompt"]] == [QUESTION, "Why?"]
    for turn in (first, second):
        assert 0 < turn["model"]["tokens"] <= 8
        assert 0 < turn["base"]["tokens"] <= 8
    # the second turn contains the first
    assert second["model"]["prompt_tokens"] > first["model"]["prompt_tokens"]


def test_the_same_seed_draws_the_same_answer(place: Path, chat: Any) -> None:
    # the untrained model does not end an answer by itself
    words = ("chat", "build/demo/model", "--prompt", QUESTION, "--max-new-tokens", "8")
    drawn = []
    for _ in range(2):
        answer = succeed(place, *words, "--temperature", "1.5", "--seed", "1")
        drawn.append(first_answer(answer.data))
    most_likely = first_answer(chat, "base")
    assert drawn[0] == drawn[1]
    assert drawn[0] != most_likely


def test_a_model_without_a_template_continues_the_text_from_stdin(
    place: Path, whole: Answer
) -> None:
    plain = copy_model(place, "plain")
    (plain / "chat_template.jinja").unlink()
    done = read_text_answer(place, "chat", str(plain), *SHORT_ANSWER, text="def mean(\n")
    assert done.returncode == 0, done.stderr
    assert "no chat template" in done.stderr
    assert "loading" in done.stderr
    assert "loading" not in done.stdout


def test_a_system_message_that_the_template_refuses(place: Path, whole: Answer) -> None:
    template = copy_model(place, "strict") / "chat_template.jinja"
    refusal = "{{ raise_exception('no system role') }}"
    condition = "{% if messages[0]['role'] == 'system' %}" + refusal + "{% endif %}"
    template.write_text(condition + template.read_text())
    words = ("chat", str(template.parent), "--system", "Be brief.", "--prompt", "a")
    answer = launch(place, *words, *SHORT_ANSWER)
    assert answer.code == 5
    assert "no system role" in answer.finding("template-refuses")["message"]


def test_a_model_that_cannot_be_loaded_is_a_finding(place: Path, whole: Answer) -> None:
    config = copy_model(place, "broken-chat") / "config.json"
    settings = json.loads(config.read_text())
    settings["model_type"] = "nothing"
    config.write_text(json.dumps(settings))
    answer = launch(place, "chat", str(config.parent), "--prompt", "a", *SHORT_ANSWER)
    assert answer.code == 5
    assert "nothing" in answer.finding("model-fails")["message"]


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, place: Path, *words: str) -> None:
        self.main, side = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words], cwd=place, env=environment(place),
            stdin=side, stdout=side, stderr=side, start_new_session=True,
        )  # fmt: skip
        os.close(side)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Wait until the text is shown, after the one that was waited for before."""
        until = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < until, self.shown
            self.shown += os.read(self.main, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(place: Path) -> None:
    words = ("chat", "build/demo/model", "--max-new-tokens", "900", "--temperature", "0")
    terminal = Terminal(place, *words)
    terminal.wait_for("> ")
    terminal.type(f"{QUESTION}\n")
    terminal.wait_for("list?\r\n")
    # shorter than the answer takes
    time.sleep(1)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("(interrupted)")
    terminal.wait_for("> ")
    terminal.type("/new\n")
    terminal.wait_for("a new conversation")
    # before its prompt is shown, readline loses the character
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_an_adapter_answers_and_its_base_does(place: Path, chat: Any, adapter_chat: Any) -> None:
    assert adapter_chat["adapter"]
    assert adapter_chat["base"]["name"] == str(place / "build/demo/whole")
    assert first_answer(adapter_chat, "base") == first_answer(chat)


def test_a_merged_adapter_answers_as_before(place: Path, merged: Answer, adapter_chat: Any) -> None:
    check = merged.data
    assert check["error"] <= check["tolerance"] < check["effect"]
    assert check["kept"] == pytest.approx(1, abs=0.01)

    chat = succeed(place, "chat", "out/merged", "--prompt", QUESTION, *SHORT_ANSWER).data
    assert first_answer(chat) == first_answer(adapter_chat)


def test_a_merge_writes_a_whole_model_and_removes_what_a_killed_one_left(
    place: Path, merged: Answer
) -> None:
    model = "config.json generation_config.json model.safetensors"
    tokenizer = "tokenizer.json chat_template.jinja"
    names = {path.name for path in (place / "out" / "merged").iterdir()}
    assert names.issuperset(f"{model} {tokenizer}".split())
    assert "adapter_config.json" not in names
    assert [path.name for path in (place / "out").iterdir()] == ["merged"]


def test_a_merge_after_qlora_names_the_model_that_was_merged_into(
    place: Path, merged: Answer
) -> None:
    message = merged.finding("merged-unquantised")["message"]
    assert str(place / "build/demo/whole") in message


LOSES_THE_ADAPTER = """
import sys
if sys.orig_argv[-1] == "merge" and sys.orig_argv[-2].endswith("run.py"):
    from peft.tuners.lora import LoraModel
    LoraModel.merge_and_unload = lambda model, *_, **__: model.unload()
"""


def test_a_merge_that_loses_the_adapter_leaves_nothing(place: Path, adapted: Answer) -> None:
    broken = place / "broken-peft"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(LOSES_THE_ADAPTER)
    path = f"{broken}{os.pathsep}{STAND_INS}"
    done = read_text_answer(place, "merge", adapted.run.name, "-o", "differs/x", path=path)
    assert done.returncode == 5
    assert "error[merge-differs]" in done.stderr
    assert "0.0% of what the adapter changes is kept" in done.stderr
    assert list((place / "differs").iterdir()) == []
