"""What comes after a run, without loading a model: which one is found, next commands, the card."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_runs
import pytest
import row_files
import saved
import yaml
from answers import Ask
from answers import ask as ask  # a fixture

from launcher.artifacts import model_files
from launcher.cli.commands.trained import find_model
from launcher.cli.main import main
from launcher.config import keys
from launcher.runs import rundir
from launcher.runs.record import Manifest
from launcher.runs.rundir import RunFolder
from launcher.trained import card, model, next_steps, prompts
from launcher.trained.model import TrainedModel
from launcher.trained.next_steps import NextSteps

Capture = pytest.CaptureFixture[str]

QWEN = "Qwen/Qwen2.5-7B"
NAME = "20260101T000000Z-sft-a"


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def arguments_of(**values: object) -> dict[str, dict[str, object]]:
    return {name: {"value": value, "origin": "my_sft.yaml:3"} for name, value in values.items()}


def make_run(output: Path, name: str = NAME, *, backend: str = "trl", **arguments: object) -> Path:
    """A run whose output folder this is."""
    values = {"model_name_or_path": QWEN, "dataset_name": "allenai/tulu-3", **arguments}
    data = {"role": "data", "name": "allenai/tulu-3", "digest": "abc" * 20}
    manifest = made_runs.manifest(
        name="a",
        stage="sft",
        backend=backend,
        output=str(output),
        cwd=str(Path.cwd()),
        args=arguments_of(**values),
        contents=[data],
    )
    return made_runs.write_run(rundir.find_runs_root() / name, record=manifest)


def cut_off(run: Path) -> None:
    """Have a run not have come to its final save."""
    (run / "exit.json").unlink()
    remove_lines(run / "console.log", "saved")
    remove_lines(run / "probe" / "rank-0.jsonl", '"end"')


def remove_lines(path: Path, word: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if word not in line))


def make_adapter(folder: Path, **changes: object) -> Path:
    """What peft leaves of a LoRA adapter."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 16, "base_model_name_or_path": QWEN, **changes}
    (folder / model_files.ADAPTER).write_text(json.dumps(config))
    saved.tensors(folder / "adapter_model.safetensors")
    return folder


def trained_model(folder: Path) -> TrainedModel:
    trained = model.find_in_folder(folder)
    assert trained is not None
    return trained


# Which model is found


def make_damaged_model(out: Path) -> None:
    saved.model(out)
    saved.cut(out / "model.safetensors")


def make_adapter_of_missing_base(out: Path) -> None:
    make_adapter(out, base_model_name_or_path="build/demo/model")


def make_merged_adapter(out: Path) -> None:
    make_adapter(out)
    out.with_name("out-merged").mkdir()


CHAT = ["chat", "out", "--prompt", "a"]


@pytest.mark.parametrize(
    ("make", "words", "exit_code", "code", "message"),
    [
        (saved.model, ["chat", "nothing", "--prompt", "a"], 2, "no-such-run", ""),
        # a wrong name is named before a missing prompt
        (saved.model, ["chat", "nothing", "--prompt", ""], 2, "no-such-run", ""),
        (saved.model, ["chat", "out", "--prompt", " "], 2, "no-prompt", ""),
        (saved.model, [*CHAT, "--prompt", ""], 2, "no-prompt", ""),
        (saved.model, [*CHAT, "--base"], 5, "no-base-model", ""),
        (make_damaged_model, CHAT, 5, "damaged-model", "model.safetensors is cut off"),
        (make_adapter_of_missing_base, CHAT, 5, "no-base-model", "build/demo/model is not here"),
        (saved.model, ["merge", "out"], 2, "not-an-adapter", ""),
        (make_merged_adapter, ["merge", "out"], 2, "output-exists", ""),
    ],
)
def test_a_command_that_cannot_be_done(
    make: Callable[[Path], None],
    words: list[str],
    exit_code: int,
    code: str,
    message: str,
    out: Path,
    ask: Ask,
) -> None:
    make(out)
    answer = ask(*words)
    assert answer.code == exit_code
    assert answer.refusal["code"] == code
    assert message in answer.refusal["message"]


def test_a_run_without_a_final_model_names_its_checkpoints(out: Path, ask: Ask) -> None:
    for step in (4, 8):
        saved.trl(out, step)
    cut_off(make_run(out))
    answer = ask("chat", "last", "--prompt", "a")
    assert answer.code == 5
    assert answer.refusal["code"] == "no-final-model"
    assert "checkpoint-4, checkpoint-8" in answer.refusal["help"]
    assert "launch chat out/checkpoint-8" in answer.refusal["help"]


def test_checkpoints_that_hold_no_model_are_not_offered(out: Path, ask: Ask) -> None:
    saved.pinned(out, "step_4")
    cut_off(make_run(out, backend="open_instruct"))
    help = ask("chat", "last", "--prompt", "a").refusal["help"]
    assert "training states, no model: step_4" in help
    assert "launch chat" not in help


def test_the_model_of_an_earlier_run_is_not_that_of_an_unfinished_one(out: Path, ask: Ask) -> None:
    saved.model(out)
    cut_off(make_run(out))
    assert ask("chat", "last", "--prompt", "a").refusal["code"] == "no-final-model"


def test_a_bench_has_no_model(ask: Ask) -> None:
    folder = rundir.find_runs_root() / "20260101T000000Z-bench-a"
    folder.mkdir(parents=True)
    (folder / rundir.BENCH_RECORD).write_text("{}")
    finding = ask("chat", folder.name, "--prompt", "a").refusal
    assert finding["code"] == "no-final-model"
    assert "leave no model" in finding["message"]


def test_a_pipeline_stands_for_its_last_run(tmp_path: Path) -> None:
    saved.model(tmp_path / "dpo")
    stages = []
    for number, stage in enumerate(("sft", "dpo"), 1):
        run = make_run(tmp_path / stage, f"2026010{number}T000000Z-{stage}-a")
        stages.append({"run": str(run)})
    folder = rundir.find_runs_root() / "20260103T000000Z-pipeline-a"
    folder.mkdir()
    (folder / rundir.PIPELINE_RECORD).write_text(json.dumps({"stages": stages}))
    assert find_model(folder.name).path == tmp_path / "dpo"


# Base models


def test_the_base_of_an_adapter_is_that_of_the_record(tmp_path: Path, out: Path) -> None:
    saved.model(tmp_path / "base")
    make_adapter(out, base_model_name_or_path="moved/elsewhere")
    make_run(out, model_name_or_path="base", load_in_4bit=True)
    trained = trained_model(out)
    assert trained.base is not None
    assert trained.base.name == str(tmp_path / "base")
    assert trained.quantised


def test_the_base_of_an_adapter_without_a_run_is_that_of_its_config(out: Path) -> None:
    trained = trained_model(make_adapter(out))
    assert trained.base == model.Base(name=QWEN)
    assert trained.run is None


# Next steps


def steps_of(folder: Path) -> NextSteps:
    return next_steps.describe_model(trained_model(folder))


def test_the_next_steps_of_a_whole_model(out: Path) -> None:
    output = out / "my model"
    saved.model(output)
    saved.trl(output, 8)
    make_run(output)
    upload = "hf upload YOU/my-model 'out/my model' . --exclude 'checkpoint-*'"
    assert steps_of(output) == NextSteps(
        model="out/my model",
        chat=f"launch chat {NAME}",
        serve="vllm serve 'out/my model'",
        push=f"launch card {NAME} && {upload}",
    )


MERGE_FIRST = "launch merge out && vllm serve out-merged"


def serve_with_rank(rank: int) -> str:
    words = f"vllm serve {QWEN} --enable-lora --max-lora-rank {rank}"
    return f"{words} --lora-modules out=out"


@pytest.mark.parametrize(
    ("config", "serve"),
    [
        ({"r": 16}, serve_with_rank(16)),
        ({"r": 24}, serve_with_rank(32)),
        ({"r": 4}, serve_with_rank(8)),
        # what vLLM does not serve as an adapter
        ({"use_dora": True}, MERGE_FIRST),
        ({"modules_to_save": ["lm_head"]}, MERGE_FIRST),
        ({"r": 2048}, MERGE_FIRST),
    ],
)
def test_how_an_adapter_is_served(config: dict[str, object], serve: str, out: Path) -> None:
    steps = steps_of(make_adapter(out, **config))
    assert steps.serve == serve
    assert steps.merge == "launch merge out"


def test_the_end_of_a_run_names_its_model(out: Path, capsys: Capture) -> None:
    saved.model(out)
    make_run(out)
    main(["attach", NAME])
    assert f"model: out\n  chat   launch chat {NAME}\n" in capsys.readouterr().out
    main(["attach", NAME, "--format", "json"])
    assert json.loads(capsys.readouterr().out)["data"]["next"]["model"] == "out"


def test_a_run_without_a_model_has_no_next_steps(out: Path) -> None:
    assert next_steps.describe_finished(RunFolder(make_run(out))) is None


# The card


def front_matter(text: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return content


def test_a_card_says_what_the_record_holds(tmp_path: Path, out: Path, capsys: Capture) -> None:
    make_adapter(out)
    make_run(out, learning_rate=1e-5, chat_template_path="/home/somebody/x.jinja")
    assert main(["card", "last", "--output", "-"]) == 0
    text = capsys.readouterr().out
    assert front_matter(text) == {
        "base_model": QWEN,
        "base_model_relation": "adapter",
        "datasets": ["allenai/tulu-3"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["sft", "trl", "lora", "launch"],
    }
    for part in (
        "| `learning_rate` | `1e-05` |",
        "| step | loss |",
        "| 40 | ",
        "| trl | trl 1.16.0 |",
        "| launch | c0ffee |",
        "## Verdict: ",
    ):
        assert part in text
    # a card is for everybody: it names no place on this machine
    for place in ("somebody", "node7", str(tmp_path)):
        assert place not in text
    assert not (out / "README.md").exists()


def test_a_card_has_the_licence_and_the_lineage_of_its_base(tmp_path: Path) -> None:
    hub = tmp_path / "hf" / "hub" / "models--Qwen--Qwen2.5-7B"
    readme = hub / "snapshots" / "c0ffee" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text("---\nlicense: apache-2.0\n---\n# Qwen\n")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("c0ffee")
    saved.model(tmp_path / "sft")
    saved.model(tmp_path / "dpo")
    make_run(tmp_path / "sft", "20260101T000000Z-sft-a")
    make_run(tmp_path / "dpo", "20260102T000000Z-dpo-a", model_name_or_path=str(tmp_path / "sft"))

    text = card.render(trained_model(tmp_path / "dpo"))

    head = front_matter(text)
    assert head["base_model"] == QWEN
    assert head["license"] == "apache-2.0"
    assert f"`sft` itself was trained from [{QWEN}]" in text
    assert "licence of the base model is not known" not in text


def test_a_card_of_somebody_else_is_never_written_over(
    out: Path, ask: Ask, capsys: Capture
) -> None:
    saved.model(out)
    make_run(out)
    readme = out / "README.md"
    readme.write_text("This model was trained with [TRL].\n")
    answer = ask("card", "last")
    assert answer.code == 5
    assert answer.refusal["code"] == "card-exists"
    assert "written by TRL" in answer.refusal["message"]
    push = steps_of(out).push
    assert "--replace" in push
    assert "--exclude README.before.md" in push

    assert main(["card", "last", "--replace"]) == 0
    assert "the one before: " in capsys.readouterr().out
    assert (out / "README.before.md").read_text() == "This model was trained with [TRL].\n"


def test_an_own_card_is_written_anew_until_somebody_edits_it(out: Path, ask: Ask) -> None:
    saved.model(out)
    make_run(out)
    for _ in range(2):
        assert main(["card", "last"]) == 0
    with (out / "README.md").open("a") as readme:
        readme.write("\nMy words.\n")
    assert "edited" in ask("card", "last").refusal["message"]
    assert "My words." in (out / "README.md").read_text()


def test_the_empty_form_of_peft_is_replaced_and_named(out: Path, capsys: Capture) -> None:
    make_adapter(out)
    make_run(out)
    form = "# Model Card for Model ID\n" + "[More Information Needed]\n" * 30
    (out / "README.md").write_text(form)
    assert main(["card", "last"]) == 0
    assert capsys.readouterr().out.startswith("replaced the empty form that peft wrote\n")
    assert "[More Information Needed]" not in (out / "README.md").read_text()


# Prompts of data sets


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "s"}
QUESTION = [user("a")]
ANSWER = [assistant("b")]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [*QUESTION, *ANSWER, user("c"), assistant("d")]}, QUESTION),
        ({"messages": [SYSTEM, *QUESTION, *ANSWER]}, [SYSTEM, *QUESTION]),
        ({"conversations": SHAREGPT}, QUESTION),
        ({"prompt": "a", "completion": "b"}, QUESTION),
        ({"prompt": QUESTION, "completion": ANSWER}, QUESTION),
        ({"chosen": [*QUESTION, *ANSWER], "rejected": [*QUESTION, assistant("c")]}, QUESTION),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, QUESTION),
        ({"prompt": QUESTION, "chosen": ANSWER}, QUESTION),
    ],
)
def test_the_prompt_of_a_row(row: dict[str, object], messages: list[dict[str, str]]) -> None:
    assert prompts.read_prompt(row) == prompts.Prompt(messages=messages, expected="b")


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"text": "a"},
        {"messages": []},
        {"messages": [{**SYSTEM, "content": [{"type": "image"}]}]},
    ],
)
def test_a_row_without_a_prompt(row: dict[str, object]) -> None:
    assert prompts.read_prompt(row) is None


def write_rows(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"messages": [user(text), *ANSWER]} for text in texts]
    path.write_bytes(row_files.lines(rows))


def choose(count: int, **arguments: object) -> prompts.Prompts:
    return prompts.choose(Manifest(args=arguments_of(**arguments)), count)


def texts_of(chosen: prompts.Prompts) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in chosen.chosen]


def test_prompts_that_were_not_trained_on_come_first(tmp_path: Path) -> None:
    write_rows(tmp_path / "data" / "train.jsonl", "a", "b")
    write_rows(tmp_path / "data" / "test.jsonl", "c", "d", "e", "f")
    chosen = choose(2, dataset_name="data", dataset_test_split="test")
    assert texts_of(chosen) == ["c", "e"]
    assert chosen.origin == "the split test, which was not trained on"

    # the named split is the one that it trains on
    chosen = choose(2, dataset_name="data", dataset_train_split="test", dataset_test_split="test")
    assert texts_of(chosen)[0] == "c"
    assert chosen.origin == "rows that were trained on"


def test_rows_that_were_trained_on_are_named_so(tmp_path: Path) -> None:
    write_rows(tmp_path / "data" / "train.jsonl", "a", "b")
    write_rows(tmp_path / "mine.jsonl", "g")
    for chosen, texts in (
        (choose(5, dataset_name="data"), ["a", "b"]),
        (choose(1, dataset_mixer_list=["mine.jsonl", "1.0"]), ["g"]),
    ):
        assert texts_of(chosen) == texts
        assert chosen.origin == "rows that were trained on"


def test_why_there_are_no_prompts(tmp_path: Path) -> None:
    assert choose(1, dataset_name="some/thing").missing is not None
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text('{"text": "a"}\n')
    assert "no prompt" in str(choose(1, dataset_name="texts").missing)


@pytest.mark.parametrize(
    ("value", "expected", "is_refused"),
    [
        (0, 0, False),
        (3, 3, False),
        ("4", 4, False),
        (None, None, False),
        (-1, None, True),
        ("x", None, True),
    ],
)
def test_the_key_samples(value: object, expected: int | None, is_refused: bool) -> None:
    number, faults = keys.KEYS["samples"].read(value)
    assert number == expected
    assert bool(faults) == is_refused
