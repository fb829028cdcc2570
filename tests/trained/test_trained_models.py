"""What comes after a run, without loading a model: which one is found, its next commands, its card."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import made_runs
import pytest
import saved
import yaml

from launcher.artifacts import model_files
from launcher.cli.main import main
from launcher.config import keys
from launcher.runs import rundir
from launcher.runs.record import Manifest
from launcher.runs.rundir import RunFolder
from launcher.trained import card, model, next_steps, prompts

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def argument(value: object) -> dict[str, object]:
    return {"value": value, "origin": "my_sft.yaml:3"}


def run_into(
    output: Path, name: str = "20260101T000000Z-sft-a", *, ended: bool = True, **arguments: object
) -> Path:
    """A run whose output folder this is."""
    given = {"model_name_or_path": "Qwen/Qwen2.5-7B", "dataset_name": "allenai/tulu-3", **arguments}
    manifest = made_runs.manifest(
        name="a", stage="sft", output=str(output), cwd=str(Path.cwd()), config="my_sft.yaml",
        args={key: argument(value) for key, value in given.items()},
        contents=[{"role": "data", "name": "allenai/tulu-3", "digest": "abc" * 20}],
    )  # fmt: skip
    if ended:
        return made_runs.made(rundir.runs_root() / name, told=manifest)
    path = made_runs.made(rundir.runs_root() / name, told=manifest, steps=8, ended=False)
    # it has not come to its final save
    log = path / "console.log"
    log.write_text(
        "".join(line for line in log.read_text().splitlines(True) if "saved" not in line)
    )
    events = path / "probe" / "rank-0.jsonl"
    events.write_text(
        "".join(line for line in events.read_text().splitlines(True) if '"end"' not in line)
    )
    return path


def adapter(folder: Path, **changes: Any) -> Path:
    """What peft leaves of a LoRA adapter."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 16, "base_model_name_or_path": "Qwen/Qwen2.5-7B", **changes}
    (folder / model_files.ADAPTER).write_text(json.dumps(config))
    saved.tensors(folder / "adapter_model.safetensors")
    return folder


def refused(capsys: Capture, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a command and its first finding."""
    code = main([*words, "--format", "json"])
    answer = json.loads(capsys.readouterr().out)
    assert not answer["ok"]
    return code, answer["findings"][0]


def test_a_name_that_is_neither_run_nor_folder(capsys: Capture) -> None:
    code, finding = refused(capsys, "chat", "nothing", "--prompt", "a")
    assert (code, finding["code"]) == (2, "no-such-run")


def test_a_name_that_is_wrong_is_named_before_a_prompt_that_lacks(capsys: Capture) -> None:
    code, finding = refused(capsys, "chat", "nothing", "--prompt", "")
    assert (code, finding["code"]) == (2, "no-such-run")


def test_a_run_without_a_final_model_names_its_checkpoints_and_what_to_type(
    tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out" / "a"
    for step in (4, 8):
        saved.trl(output, step)
    run_into(output, ended=False)
    code, finding = refused(capsys, "chat", "last", "--prompt", "a")
    assert (code, finding["code"]) == (5, "no-final-model")
    assert "checkpoint-4, checkpoint-8" in finding["help"]
    assert "launch chat out/a/checkpoint-8" in finding["help"]


def test_checkpoints_that_hold_no_model_are_not_offered(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    saved.pinned(output, "step_4")
    path = run_into(output, ended=False)
    manifest = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**manifest, "backend": "open_instruct"}))
    _, finding = refused(capsys, "chat", "last", "--prompt", "a")
    assert "training states, no model: step_4" in finding["help"]
    assert "launch chat" not in finding["help"]


def test_a_model_of_an_earlier_run_is_not_taken_for_that_of_a_run_that_has_not_ended(
    tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out"
    saved.model(output)
    run_into(output, ended=False)
    _, finding = refused(capsys, "chat", "last", "--prompt", "a")
    assert finding["code"] == "no-final-model"


def test_a_model_that_is_cut_off_says_so(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    saved.model(output)
    saved.cut(output / "model.safetensors")
    code, finding = refused(capsys, "chat", str(output), "--prompt", "a")
    assert (code, finding["code"]) == (5, "damaged-model")
    assert "model.safetensors is cut off" in finding["message"]


def test_a_bench_has_no_model(tmp_path: Path, capsys: Capture) -> None:
    folder = rundir.runs_root() / "20260101T000000Z-bench-a"
    folder.mkdir(parents=True)
    (folder / rundir.BENCH_RECORD).write_text("{}")
    code, finding = refused(capsys, "chat", folder.name, "--prompt", "a")
    assert (code, finding["code"]) == (5, "no-final-model")
    assert "leave no model" in finding["message"]


def test_a_pipeline_stands_for_its_last_run(tmp_path: Path) -> None:
    from launcher.cli.commands.trained import found_model

    saved.model(tmp_path / "dpo")
    runs = [
        run_into(tmp_path / "sft", "20260101T000000Z-sft-a"),
        run_into(tmp_path / "dpo", "20260102T000000Z-dpo-a"),
    ]
    folder = rundir.runs_root() / "20260103T000000Z-pipeline-a"
    folder.mkdir()
    record = {"stages": [{"run": str(run)} for run in runs]}
    (folder / rundir.PIPELINE_RECORD).write_text(json.dumps(record))
    assert found_model(folder.name).path == tmp_path / "dpo"


@pytest.mark.parametrize("words", [("--prompt", " "), ("--prompt", "a", "--prompt", "")])
def test_an_empty_prompt_is_refused(
    words: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    saved.model(tmp_path / "out")
    code, finding = refused(capsys, "chat", str(tmp_path / "out"), *words)
    assert (code, finding["code"]) == (2, "no-prompt")


def test_a_base_that_nobody_knows_cannot_answer(tmp_path: Path, capsys: Capture) -> None:
    saved.model(tmp_path / "out")
    code, finding = refused(capsys, "chat", str(tmp_path / "out"), "--base", "--prompt", "a")
    assert (code, finding["code"]) == (5, "no-base-model")


def test_the_base_of_an_adapter_is_that_of_the_record(tmp_path: Path) -> None:
    base = tmp_path / "base"
    saved.model(base)
    output = adapter(tmp_path / "out", base_model_name_or_path="moved/elsewhere")
    run_into(output, model_name_or_path="base", load_in_4bit=True)
    trained = model.of_folder(output)
    assert trained is not None and trained.base is not None
    assert (trained.base.name, trained.quantised) == (str(base), True)


def test_the_base_of_an_adapter_without_a_run_is_that_of_its_config(tmp_path: Path) -> None:
    trained = model.of_folder(adapter(tmp_path / "out"))
    assert trained is not None
    assert (trained.base, trained.run) == (model.Base(name="Qwen/Qwen2.5-7B"), None)


def test_a_base_that_is_not_here_is_named(tmp_path: Path, capsys: Capture) -> None:
    adapter(tmp_path / "out", base_model_name_or_path="build/demo/model")
    code, finding = refused(capsys, "chat", "out", "--prompt", "a")
    assert (code, finding["code"]) == (5, "no-base-model")
    assert "build/demo/model is not here" in finding["message"]


def test_merge_takes_adapters_and_writes_over_nothing(tmp_path: Path, capsys: Capture) -> None:
    saved.model(tmp_path / "whole")
    code, finding = refused(capsys, "merge", str(tmp_path / "whole"))
    assert (code, finding["code"]) == (2, "not-an-adapter")
    adapter(tmp_path / "out")
    (tmp_path / "out-merged").mkdir()
    code, finding = refused(capsys, "merge", str(tmp_path / "out"))
    assert (code, finding["code"]) == (2, "output-exists")
    assert list((tmp_path / "out-merged").iterdir()) == []


def steps_of(folder: Path) -> next_steps.NextSteps:
    trained = model.of_folder(folder)
    assert trained is not None
    return next_steps.of_model(trained)


def test_the_next_steps_of_a_whole_model(tmp_path: Path) -> None:
    output = tmp_path / "out" / "my model"
    saved.model(output)
    saved.trl(output, 8)
    run_into(output)
    assert steps_of(output) == next_steps.NextSteps(
        model="out/my model",
        chat="launch chat 20260101T000000Z-sft-a",
        serve="vllm serve 'out/my model'",
        push="launch card 20260101T000000Z-sft-a && hf upload YOU/my-model 'out/my model' . --exclude 'checkpoint-*'",
    )


SERVE = "vllm serve Qwen/Qwen2.5-7B --enable-lora --max-lora-rank {} --lora-modules out=out"
MERGE_FIRST = "launch merge out && vllm serve out-merged"


@pytest.mark.parametrize(
    ("config", "serve"),
    [
        ({"r": 16}, SERVE.format(16)),
        ({"r": 24}, SERVE.format(32)),
        ({"r": 4}, SERVE.format(8)),
        # what vLLM does not serve as an adapter
        ({"r": 16, "use_dora": True}, MERGE_FIRST),
        ({"r": 16, "modules_to_save": ["lm_head"]}, MERGE_FIRST),
        ({"r": 2048}, MERGE_FIRST),
    ],
)
def test_how_an_adapter_is_served(config: Mapping[str, Any], serve: str, tmp_path: Path) -> None:
    steps = steps_of(adapter(tmp_path / "out", **config))
    assert (steps.serve, steps.merge) == (serve, "launch merge out")


def test_the_end_of_a_run_names_its_model(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    saved.model(output)
    path = run_into(output)
    main(["attach", path.name])
    out = capsys.readouterr().out
    assert f"model: out\n  chat   launch chat {path.name}\n" in out
    main(["attach", path.name, "--format", "json"])
    assert json.loads(capsys.readouterr().out)["data"]["next"]["model"] == "out"


def test_a_run_without_a_model_has_no_next_steps(tmp_path: Path) -> None:
    assert next_steps.of_finished(RunFolder(run_into(tmp_path / "out"))) is None


def front_matter(text: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return content


def test_a_card_says_what_the_record_holds(tmp_path: Path, capsys: Capture) -> None:
    output = adapter(tmp_path / "out")
    run_into(
        output,
        learning_rate=1e-5,
        output_dir="/home/somebody/out",
        chat_template_path="/home/somebody/x.jinja",
    )
    assert main(["card", "last", "--output", "-"]) == 0
    text = capsys.readouterr().out
    assert front_matter(text) == {
        "base_model": "Qwen/Qwen2.5-7B", "base_model_relation": "adapter", "datasets": ["allenai/tulu-3"],
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["sft", "trl", "lora", "launch"],
    }  # fmt: skip
    assert "| `learning_rate` | `1e-05` |" in text
    assert "| step | loss |" in text and "| 40 | " in text
    assert "| trl | trl 1.16.0 |" in text and "| launch | c0ffee |" in text
    assert "## Verdict: " in text
    # a card is for everybody: places on this machine are nobody's business
    assert "somebody" not in text and "node7" not in text and str(tmp_path) not in text
    assert not (output / "README.md").exists()


def test_a_card_has_the_licence_and_the_lineage_of_its_base(tmp_path: Path) -> None:
    first, second = tmp_path / "sft", tmp_path / "dpo"
    saved.model(first)
    saved.model(second)
    snapshot = tmp_path / "hf" / "hub" / "models--Qwen--Qwen2.5-7B"
    (snapshot / "refs").mkdir(parents=True)
    (snapshot / "refs" / "main").write_text("c0ffee")
    (snapshot / "snapshots" / "c0ffee").mkdir(parents=True)
    (snapshot / "snapshots" / "c0ffee" / "README.md").write_text(
        "---\nlicense: apache-2.0\n---\n# Qwen\n"
    )
    run_into(first, "20260101T000000Z-sft-a")
    run_into(second, "20260102T000000Z-dpo-a", model_name_or_path=str(first))
    trained = model.of_folder(second)
    assert trained is not None
    text = card.made_of(trained)
    head = front_matter(text)
    assert (head["base_model"], head["license"]) == ("Qwen/Qwen2.5-7B", "apache-2.0")
    assert "`sft` itself was trained from [Qwen/Qwen2.5-7B]" in text
    assert "licence of the base model is not known" not in text


FORM = "# Model Card for Model ID\n" + "[More Information Needed]\n" * 30


def test_a_card_of_somebody_else_is_never_written_over(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    saved.model(output)
    run_into(output)
    readme = output / "README.md"
    readme.write_text("This model was trained with [TRL].\n")
    code, finding = refused(capsys, "card", "last")
    assert (code, finding["code"]) == (5, "card-exists")
    assert "written by TRL" in finding["message"]
    assert (
        "--replace" in steps_of(output).push
        and "--exclude README.before.md" in steps_of(output).push
    )
    assert main(["card", "last", "--replace"]) == 0
    assert "the one before: " in capsys.readouterr().out
    assert (output / "README.before.md").read_text() == "This model was trained with [TRL].\n"
    # its own is written anew, until somebody edits it
    assert main(["card", "last"]) == 0
    capsys.readouterr()
    readme.write_text(readme.read_text() + "\nMy words.\n")
    code, finding = refused(capsys, "card", "last")
    assert "edited" in finding["message"] and "My words." in readme.read_text()


def test_the_empty_form_of_peft_is_replaced_and_named(tmp_path: Path, capsys: Capture) -> None:
    output = adapter(tmp_path / "out")
    run_into(output)
    (output / "README.md").write_text(FORM)
    assert main(["card", "last"]) == 0
    assert capsys.readouterr().out.startswith("replaced the empty form that peft wrote\n")
    assert "[More Information Needed]" not in (output / "README.md").read_text()


def chat(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]


@pytest.mark.parametrize(
    ("row", "asked", "expected"),
    [
        ({"messages": chat("a", "b", "c", "d")}, chat("a"), "b"),
        ({"messages": [{"role": "system", "content": "s"}, *chat("a", "b")]}, None, "b"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            chat("a"),
            "b",
        ),
        ({"prompt": "a", "completion": "b"}, chat("a"), "b"),
        (
            {"prompt": chat("a"), "completion": [{"role": "assistant", "content": "b"}]},
            chat("a"),
            "b",
        ),
        ({"chosen": chat("a", "b"), "rejected": chat("a", "c")}, chat("a"), "b"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, chat("a"), "b"),
        ({"prompt": chat("a"), "chosen": [{"role": "assistant", "content": "b"}]}, chat("a"), "b"),
    ],
)
def test_the_prompt_of_a_row(
    row: Mapping[str, Any], asked: list[dict[str, str]] | None, expected: str
) -> None:
    prompt = prompts.of_row(row)
    assert prompt is not None and prompt.expected == expected
    if asked is not None:
        assert prompt.messages == asked


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a"},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {},
    ],
)
def test_rows_without_a_prompt(row: Mapping[str, Any]) -> None:
    assert prompts.of_row(row) is None


def rows(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps({"messages": chat(text, "answer")}) + "\n" for text in texts)
    )


def chosen(count: int, **arguments: object) -> prompts.Prompts:
    manifest = Manifest(args={name: argument(value) for name, value in arguments.items()})
    return prompts.choose(manifest, count)


def texts_of(some: prompts.Prompts) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in some.chosen]


def test_prompts_that_were_not_trained_on_come_first(tmp_path: Path) -> None:
    rows(tmp_path / "data" / "train.jsonl", "a", "b")
    rows(tmp_path / "data" / "test.jsonl", "c", "d", "e", "f")
    some = chosen(2, dataset_name="data", dataset_train_split="train", dataset_test_split="test")
    assert (texts_of(some), some.origin) == (["c", "e"], "the split test, which was not trained on")
    # the split that it names is one that it trains on
    some = chosen(2, dataset_name="data", dataset_train_split="test", dataset_test_split="test")
    assert "trained on" in some.origin and texts_of(some)[0] == "c"


def test_without_another_split_the_rows_of_the_training_are_named_so(tmp_path: Path) -> None:
    rows(tmp_path / "data" / "train.jsonl", "a", "b")
    some = chosen(5, dataset_name="data", dataset_train_split="train", dataset_test_split="test")
    assert (texts_of(some), some.origin) == (["a", "b"], "rows that were trained on")
    rows(tmp_path / "mine.jsonl", "g")
    some = chosen(1, dataset_mixer_list=["mine.jsonl", "1.0"])
    assert (texts_of(some), some.origin) == (["g"], "rows that were trained on")


def test_why_there_are_no_prompts(tmp_path: Path) -> None:
    assert chosen(1, dataset_name="some/thing").missing is not None
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text('{"text": "a"}\n')
    assert "no prompt" in str(chosen(1, dataset_name="texts", dataset_train_split="train").missing)


@pytest.mark.parametrize(
    ("value", "read"), [(0, 0), (3, 3), ("4", 4), (None, None), (-1, None), ("x", None)]
)
def test_the_key_samples(value: object, read: int | None) -> None:
    found, faults = keys.KEYS["samples"].read(value)
    assert found == read and bool(faults) is (value in (-1, "x"))
