"""After real trainings on the CPU: answers before and after, chat, merge. Tiny models, few tokens."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, STAND_INS
from real_training import CONFIGS, launch, needs_open_instruct, needs_training, place

__all__ = ["place"]  # a fixture

pytestmark = [pytest.mark.slow, *needs_training]

FEW = ("--max-new-tokens", "8", "--temperature", "0")


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, Any]:
    """A run of the demo's SFT with samples and an evaluation: what the command answered."""
    data = place / "build" / "demo" / "data" / "sft"
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    (data / "test.jsonl").write_text("".join(lines[:4]))
    (data / "train.jsonl").write_text("".join(lines[4:100]))
    code, told = launch(
        place, "sft", str(CONFIGS / "sft.yaml"), "--gpus", "0", "max_steps=4", "samples=2", "expect.trend=any",
        "eval_strategy=steps", "eval_steps=2", "output_dir=build/demo/whole",
    )  # fmt: skip
    assert code == 0, told
    return told


@pytest.fixture(scope="module")
def adapted(place: Path, whole: dict[str, Any]) -> dict[str, Any]:
    """A LoRA run on the result of that."""
    code, told = launch(
        place, "sft", str(CONFIGS / "sft.yaml"), "--gpus", "0", "max_steps=6", "expect.trend=any",
        "model_name_or_path=build/demo/whole", "output_dir=build/demo/lora", "use_peft=true", "lora_r=8",
        "lora_target_modules=all-linear", "learning_rate=0.01", "warmup_steps=0",
    )  # fmt: skip
    assert code == 0, told
    return told


def run_of(told: dict[str, Any]) -> Path:
    return Path(told["data"]["run"])


def environment(place: Path) -> dict[str, str]:
    return {
        **os.environ, "LAUNCH_RUNS": str(place / "runs"), "XDG_STATE_HOME": str(place / "state"),
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": STAND_INS, "HOME": str(place / "home"),
    }  # fmt: skip


def typed(
    place: Path, *words: str, text: str = "", path: str = STAND_INS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *words], cwd=place, env={**environment(place), "PYTHONPATH": path},
        input=text, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


def test_samples_hold_answers_before_and_after(whole: dict[str, Any]) -> None:
    record = json.loads((run_of(whole) / "samples.json").read_text())
    assert record["failed"] is None
    assert record["from"] == "the split test, which was not trained on"
    assert len(record["prompts"]) == 2
    for prompt in record["prompts"]:
        assert prompt["before"]["tokens"] and prompt["after"]["tokens"] and prompt["expected"]
    assert "Before and after" in (run_of(whole) / "report.html").read_text()


def test_the_validation_loss_stands_in_the_metrics(whole: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in (run_of(whole) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4]
    assert not any(name.endswith(("_runtime", "_per_second")) for row in rows for name in row)


def test_the_end_names_model_chat_server_and_hub(
    whole: dict[str, Any], adapted: dict[str, Any]
) -> None:
    assert whole["data"]["next"]["model"] == "build/demo/whole"
    assert whole["data"]["next"]["merge"] is None
    steps = adapted["data"]["next"]
    assert steps["chat"] == f"launch chat {run_of(adapted).name}"
    assert steps["serve"].startswith("vllm serve build/demo/whole --enable-lora --max-lora-rank 8")


def test_failing_samples_change_no_verdict(place: Path) -> None:
    # rows without a prompt: nothing can be asked
    texts = place / "texts"
    texts.mkdir()
    (texts / "train.jsonl").write_text('{"text": "A line of text to learn."}\n' * 32)
    code, told = launch(
        place, "sft", str(CONFIGS / "sft.yaml"), "--gpus", "0", "max_steps=2", "samples=2", "expect.trend=any",
        "dataset_name=texts", "output_dir=build/demo/texts",
    )  # fmt: skip
    assert (code, told["data"]["status"]) == (0, "pass")
    record = json.loads((run_of(told) / "samples.json").read_text())
    assert "no prompt" in record["failed"]


def test_a_run_answers_a_prompt_and_its_base_beside_it(place: Path, whole: dict[str, Any]) -> None:
    name = run_of(whole).name
    code, told = launch(
        place, "chat", name, "--base", "--prompt", "What is a list?", "--prompt", "Why?", *FEW
    )
    assert code == 0, told
    data = told["data"]
    assert (data["model"], data["adapter"]) == (str(place / "build/demo/whole"), False)
    assert data["base"]["name"] == str(place / "build/demo/model")
    assert [turn["prompt"] for turn in data["turns"]] == ["What is a list?", "Why?"]
    for turn in data["turns"]:
        assert 0 < turn["model"]["tokens"] <= 8 and 0 < turn["base"]["tokens"] <= 8
    # the second turn holds the first one, in the chat template
    assert data["chat_template"]
    assert data["turns"][1]["model"]["prompt_tokens"] > data["turns"][0]["model"]["prompt_tokens"]


def test_a_prompt_from_stdin(place: Path, whole: dict[str, Any]) -> None:
    done = typed(place, "chat", "build/demo/whole", *FEW, text="What is a list?\n")
    assert done.returncode == 0, done.stderr
    assert "loading" in done.stderr and "loading" not in done.stdout


def test_the_same_seed_draws_the_same_answer(place: Path, whole: dict[str, Any]) -> None:
    def draw(seed: str) -> str:
        words = (
            "--prompt",
            "What is a list?",
            "--temperature",
            "1.5",
            "--seed",
            seed,
            "--max-new-tokens",
            "12",
        )
        _, told = launch(place, "chat", "build/demo/whole", *words)
        return str(told["data"]["turns"][0]["model"]["text"])

    first = draw("1")
    assert draw("1") == first != draw("2")


def test_a_system_message_that_the_template_refuses(place: Path, whole: dict[str, Any]) -> None:
    strict = place / "build" / "demo" / "strict"
    shutil.copytree(place / "build" / "demo" / "whole", strict)
    template = (strict / "chat_template.jinja").read_text()
    refuse = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    (strict / "chat_template.jinja").write_text(refuse + template)
    code, told = launch(place, "chat", str(strict), "--system", "Be brief.", "--prompt", "a", *FEW)
    assert (code, told["findings"][0]["code"]) == (5, "template-refuses")
    assert "no system role" in told["findings"][0]["message"]


def test_a_model_without_a_template_continues_text(place: Path, whole: dict[str, Any]) -> None:
    plain = place / "build" / "demo" / "plain"
    shutil.copytree(place / "build" / "demo" / "whole", plain)
    (plain / "chat_template.jinja").unlink()
    done = typed(place, "chat", str(plain), "--prompt", "def mean(", *FEW)
    assert done.returncode == 0, done.stderr
    assert "no chat template" in done.stderr


def test_what_cannot_be_loaded_ends_in_a_finding(place: Path, whole: dict[str, Any]) -> None:
    broken = place / "build" / "demo" / "broken-chat"
    shutil.copytree(place / "build" / "demo" / "whole", broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "nothing"}))
    code, told = launch(place, "chat", str(broken), "--prompt", "a", *FEW)
    assert (code, told["findings"][0]["code"]) == (5, "model-fails")
    assert "nothing" in told["findings"][0]["message"]


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, place: Path, *words: str) -> None:
        self.main, side = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words], cwd=place, env=environment(place), stdin=side, stdout=side,
            stderr=side, start_new_session=True,
        )  # fmt: skip
        os.close(side)
        self.shown = ""

    def wait_for(self, text: str, times: int = 1) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.shown.count(text) < times:
            assert time.monotonic() < until, self.shown
            self.shown += os.read(self.main, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())


def test_a_chat_at_a_terminal(place: Path) -> None:
    """A prompt, Ctrl-C within its answer, a new conversation, Ctrl-D."""
    # a model that knows nothing yet comes to no end by itself
    terminal = Terminal(
        place, "chat", "build/demo/model", "--max-new-tokens", "900", "--temperature", "0"
    )
    terminal.wait_for("> ")
    terminal.type("What is a list?\n")
    terminal.wait_for("list?\r\n")
    # within the seconds that so many tokens take
    time.sleep(1)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("(interrupted)")
    terminal.wait_for("> ", 2)
    terminal.type("/new\n")
    terminal.wait_for("a new conversation", 2)
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_an_adapter_talks_and_so_does_its_base(place: Path, adapted: dict[str, Any]) -> None:
    code, told = launch(
        place, "chat", run_of(adapted).name, "--base", "--prompt", "What is a list?", *FEW
    )
    assert code == 0, told
    turn = told["data"]["turns"][0]
    assert told["data"]["adapter"] and told["data"]["base"]["name"] == str(
        place / "build/demo/whole"
    )
    _, alone = launch(place, "chat", "build/demo/whole", "--prompt", "What is a list?", *FEW)
    assert turn["base"]["text"] == alone["data"]["turns"][0]["model"]["text"]


def test_a_merged_adapter_says_the_same(place: Path, adapted: dict[str, Any]) -> None:
    name = run_of(adapted).name
    code, told = launch(place, "merge", name, "--output", "out/merged")
    assert code == 0, told
    data = told["data"]
    assert data["error"] <= data["tolerance"] < data["effect"]
    assert data["kept"] == pytest.approx(1, abs=0.01)
    merged = place / "out" / "merged"
    names = {path.name for path in merged.iterdir()}
    wanted = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert wanted <= names and "adapter_config.json" not in names
    assert [path.name for path in (place / "out").iterdir()] == ["merged"]
    words = ("--prompt", "What is a list?", *FEW)
    answers = [
        launch(place, "chat", target, *words)[1]["data"]["turns"][0]["model"]["text"]
        for target in (name, str(merged))
    ]
    assert answers[0] == answers[1]
    code, told = launch(place, "merge", name, "--output", "out/merged")
    assert (code, told["findings"][0]["code"]) == (2, "output-exists")


LOSES_THE_ADAPTER = """
import sys
if sys.orig_argv[-1] == "merge" and sys.orig_argv[-2].endswith("run.py"):
    from peft.tuners.lora import LoraModel
    LoraModel.merge_and_unload = lambda model, *_, **__: model.unload()
"""


def test_a_merge_that_differs_leaves_nothing(place: Path, adapted: dict[str, Any]) -> None:
    """As with a peft that leaves the adapter out."""
    broken = place / "broken-peft"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(LOSES_THE_ADAPTER)
    done = typed(
        place,
        "merge",
        run_of(adapted).name,
        "-o",
        "differs/x",
        path=f"{broken}{os.pathsep}{STAND_INS}",
    )
    assert done.returncode == 5
    assert (
        "error[merge-differs]" in done.stderr
        and "0.0% of what the adapter changes is kept" in done.stderr
    )
    assert list((place / "differs").iterdir()) == []


def test_a_killed_merge_leaves_nothing_in_the_way(place: Path, adapted: dict[str, Any]) -> None:
    left = place / "killed" / ".merged.merging"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    code, told = launch(place, "merge", run_of(adapted).name, "--output", "killed/merged")
    assert code == 0, told
    assert [path.name for path in (place / "killed").iterdir()] == ["merged"]


def test_a_merge_after_qlora_says_into_what(place: Path, adapted: dict[str, Any]) -> None:
    path = run_of(adapted) / "run.json"
    manifest = json.loads(path.read_text())
    manifest["args"]["load_in_4bit"] = {"value": True, "origin": "a.yaml:3"}
    path.write_text(json.dumps(manifest))
    code, told = launch(place, "merge", run_of(adapted).name, "--output", "qlora/merged")
    assert code == 0
    (finding,) = [one for one in told["findings"] if one["code"] == "merged-unquantised"]
    assert str(place / "build/demo/whole") in finding["message"]


@needs_open_instruct
def test_the_model_of_open_instruct_talks(place: Path) -> None:
    code, told = launch(
        place, "sft", str(CONFIGS / "sft_open_instruct.yaml"), "--gpus", "0", "max_train_steps=2", "samples=1",
        "expect.trend=any",
    )  # fmt: skip
    assert code == 0, told
    record = json.loads((run_of(told) / "samples.json").read_text())
    assert record["failed"] is None and record["from"] == "rows that were trained on"
    code, told = launch(place, "chat", run_of(told).name, "--prompt", "What is a list?", *FEW)
    assert (code, told["data"]["chat_template"]) == (0, True)
