"""Rehearsals of small stages in the real scripts: refusals, rows, losses, stand-ins."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parsed_answers import parse_answer
from real_training import needs_open_instruct, needs_trl
from small_stages import (
    NO_SYSTEM_ROLE,
    chat,
    copy_model,
    mixed_args,
    turn,
    use_own_folders,
    write_rows,
    write_stage,
)
from small_stages import servers as servers  # a fixture

from launcher.cli.main import main
from launcher.errors import Exit, Finding
from launcher.planning.collect import judge_request
from launcher.planning.request import Request
from launcher.workflows.rehearse import ask, rehearsal
from launcher.workflows.rehearse.ask import Servers
from launcher.workflows.rehearse.inside.records import ServerRequest
from launcher.workflows.rehearse.result import Rehearsal

pytestmark = [pytest.mark.slow, needs_trl]
COSINE_TO_A_MINIMUM = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min_lr": 1e-6}}
IN_PARTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


@dataclass(frozen=True)
class Stages:
    """Writes stage files of the demo's model and data, and rehearses them."""

    folder: Path
    assets: Path
    servers: Servers

    def trl(self, stage: str = "sft", **args: Any) -> Path:
        usual = {
            "model_name_or_path": str(self.assets / "model"),
            "dataset_name": str(self.assets / "data" / stage),
            "max_length": 256,
        }
        return write_stage(self.folder / f"{stage}.yaml", stage, "trl", usual | args)

    def open_instruct(
        self, stage: str = "sft", data: Path | None = None, amount: str = "200", **args: Any
    ) -> Path:
        rows = data or self.assets / "data" / stage / "train.jsonl"
        usual = {
            "model_name_or_path": str(self.assets / "model"),
            "chat_template_name": "tulu",
            "max_seq_length": 256,
            **mixed_args(stage, rows, amount),
        }
        return write_stage(self.folder / f"{stage}.yaml", stage, "open_instruct", usual | args)

    def of_script(self, script: str, **args: Any) -> Path:
        """The stage of `trl sft`, `open_instruct dpo`, ..."""
        backend, stage = script.split()
        if backend == "trl":
            return self.trl(stage, **args)
        return self.open_instruct(stage, **args)

    def rehearse(self, path: Path, *, ignore_rules: bool = False) -> Rehearsal:
        """The rehearsal of a stage; what rules refuse is left out unless they are ignored."""
        judged, trainer = judge_request(Request(stage=None, config=path))
        if ignore_rules:
            judged = replace(judged, findings=())
        return rehearsal.rehearse(judged, trainer, self.servers)


@pytest.fixture
def stages(
    tmp_path: Path, demo_assets: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> Stages:
    use_own_folders(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return Stages(tmp_path, demo_assets, servers)


def errors_of(done: Rehearsal) -> list[Finding]:
    return [finding for finding in done.findings if finding.severity == "error"]


def codes_of(done: Rehearsal) -> set[str]:
    return {finding.code for finding in done.findings}


def first_line(done: Rehearsal) -> str:
    return next(iter(done.lines()))


def test_the_command_names_each_mistake_by_its_line_and_leaves_nothing(
    tmp_path: Path, demo_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = use_own_folders(tmp_path, monkeypatch)
    write_rows(tmp_path / "rows", [{"quest": "a", "ans": "b"}] * 20)
    args = {
        "model_name_or_path": str(demo_assets / "model"),
        "dataset_name": str(tmp_path / "rows"),
        "lr_scheduler_type": "cosin",
        "lora_target_modules": "q_prj",
        "use_peft": True,
    }
    path = write_stage(tmp_path / "wrong.yaml", "sft", "trl", args)
    lines = path.read_text().splitlines()

    command = [sys.executable, "-m", "launcher", "rehearse", str(path), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == Exit.CONFIG, done.stderr
    answer = parse_answer(done.stdout)
    errors = [finding for finding in answer.findings if finding.severity == "error"]
    wrong = {"args.dataset_name", "args.lr_scheduler_type", "args.lora_target_modules"}
    assert {finding.key for finding in errors} == wrong
    for finding in errors:
        key = finding.key.removeprefix("args.")
        assert lines[finding.line - 1].startswith(f"  {key}: ")
    # rows stood in for those that are refused
    assert answer.data.rows == SimpleNamespace()
    assert answer.data.losses == []
    assert not list(temporary.glob("launch-rehearsal*"))


# Of the arguments of each case the last is to blame.
REFUSED = {
    "trl sft": [
        {"seed": -1},
        {"optim": "nonsense"},
        {"max_length": 0},
        {"pad_token": "<nothing>"},
        {"chat_template_path": "/nowhere/x.jinja"},
        {"dataset_train_split": "nowhere"},
        {"use_peft": True, "lora_r": 0},
        {"neftune_noise_alpha": -1.0},
        {"weight_decay": float("nan")},
    ],
    "trl dpo": [{"loss_type": ["nonsense"]}, {"use_weighting": True, "loss_type": ["aot"]}],
    "open_instruct sft": [
        {"load_balancing_loss": True},
        {"weight_decay": float("nan")},
        {"use_lora": True, "lora_rank": 0},
        {"dataset_transform_fn": ["nothing", "x"]},
        {"dataset_mixer_list_splits": ["nowhere"]},
        {"max_seq_length": 0},
        {"tokenizer_name_or_path": "/nowhere"},
    ],
    "open_instruct dpo": [{"transform_fn": ["nothing"]}, {"lr_scheduler_type": "cosinus"}],
}


def refusals() -> Iterator[Any]:
    for script, cases in REFUSED.items():
        for args in cases:
            marks = needs_open_instruct if script.startswith("open") else ()
            cause = list(args)[-1]
            yield pytest.param(script, args, cause, id=f"{script} {cause}", marks=marks)


def blamed_arguments(done: Rehearsal) -> list[str]:
    names = []
    for finding in errors_of(done):
        assert finding.layer == "trainer"
        assert finding.code == "trainer-refuses"
        names.append(str(finding.key).removeprefix("args."))
    return names


@pytest.mark.parametrize(("script", "args", "cause"), list(refusals()))
def test_a_refusal_is_blamed_on_its_cause(
    script: str, args: Any, cause: str, stages: Stages
) -> None:
    done = stages.rehearse(stages.of_script(script, **args), ignore_rules=True)

    assert blamed_arguments(done) == [cause], errors_of(done)
    assert not done.failed


@needs_open_instruct
def test_two_mistakes_are_two_findings(stages: Stages) -> None:
    path = stages.open_instruct("dpo", loss_type="wpo", learning_rate=-1.0)

    done = stages.rehearse(path, ignore_rules=True)

    assert sorted(blamed_arguments(done)) == ["learning_rate", "loss_type"]


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ("No columns in the dataset", {"dataset_kwargs": {"skip_prepare_dataset": True}}),
        ("unexpected keyword argument 'foo'", {"model_init_kwargs": {"foo": 1}}),
        ("unexpected keyword argument 'min_lr'", COSINE_TO_A_MINIMUM),
        ("change no weight", {"learning_rate": 1e-30}),
        ("make weights", {"learning_rate": 1e30}),
    ],
)
def test_a_refusal_is_said_in_the_trainers_words(words: str, args: Any, stages: Stages) -> None:
    done = stages.rehearse(stages.trl(**args), ignore_rules=True)

    assert blamed_arguments(done) == list(args)[-1:]
    assert words in errors_of(done)[0].message


def test_a_sound_stage_shows_its_rows_and_is_remembered(stages: Stages) -> None:
    first = stages.rehearse(stages.trl(warmup_steps=2))
    again = stages.rehearse(stages.trl(warmup_steps=2))
    shorter = stages.rehearse(stages.trl(warmup_steps=2, max_length=60))

    assert not errors_of(first)
    assert not first.stand_ins
    assert not first.remembered
    assert first.rows is not None
    assert first.row_tokens is not None
    assert first.rows.rows == 64
    assert first.rows.read == 64
    assert first.rows.total == 1200
    assert first_line(first).startswith("64 of 1,200 rows: ")
    # random weights: the logarithm of the size of the vocabulary
    assert first.losses == pytest.approx((6.93, 6.93), abs=0.1)
    assert again.remembered
    assert again.rows == first.rows
    assert not shorter.remembered
    assert "cut-rows" in codes_of(shorter)


@pytest.mark.parametrize(
    ("script", "loss", "within"),
    [
        ("trl sft", 6.93, 0.1),
        ("trl dpo", 0.693, 0.001),
        pytest.param("open_instruct sft", 6.93, 0.1, marks=needs_open_instruct),
        pytest.param("open_instruct dpo", 0.693, 0.02, marks=needs_open_instruct),
    ],
)
def test_accumulated_losses_are_one_a_step(
    script: str, loss: float, within: float, stages: Stages
) -> None:
    done = stages.rehearse(stages.of_script(script, **IN_PARTS))

    assert not errors_of(done)
    assert done.losses == pytest.approx((loss, loss), abs=within)
    assert done.rows is not None
    assert done.rows.rows == 64
    assert not Path("output").exists()


def test_what_is_not_here_has_a_stand_in_and_what_a_cpu_lacks_is_said(stages: Stages) -> None:
    args = {
        "model_name_or_path": "Qwen/Qwen2.5-7B",
        "dataset_name": "org/pairs",
        "use_liger_kernel": True,
        "fsdp": "full_shardd",
        "attn_implementation": "flash_attention_2",
    }
    path = write_stage(stages.folder / "dpo.yaml", "dpo", "trl", args, deepspeed="zero2")

    done = stages.rehearse(path, ignore_rules=True)

    assert [finding.key for finding in errors_of(done)] == ["args.fsdp"]
    kernels = "the attention kernels of GPUs"
    assert set(done.left_out) == {"DeepSpeed", "FSDP", "Liger's kernels", kernels}
    assert len(done.stand_ins) == 3
    assert done.rows is None
    assert done.losses == ()
    assert done.row_tokens is None
    notes = [f for f in done.findings if f.code in ("not-rehearsed", "stand-in")]
    assert len(notes) == 7
    assert {note.severity for note in notes} == {"note"}


def test_a_stand_in_for_the_tokenizer_marks_the_answers(stages: Stages) -> None:
    path = stages.trl(model_name_or_path="org/model", assistant_only_loss=True)

    done = stages.rehearse(path, ignore_rules=True)

    assert not errors_of(done)
    assert done.rows is not None
    assert 0 < done.rows.trained < done.rows.tokens


def write_long_questions(folder: Path) -> Path:
    """30 chats; the question of each of the first five alone fills 128 tokens."""
    rows = []
    for number in range(30):
        question = "why " * 200 if number < 5 else "why?"
        rows.append({"messages": chat(question, "because it is so")})
    return write_rows(folder, rows)


def dropped_rows(done: Rehearsal) -> Finding:
    (finding,) = [finding for finding in done.findings if finding.code == "rows-dropped"]
    return finding


def test_rows_that_trl_drops_are_counted_with_the_reason(stages: Stages) -> None:
    write_long_questions(stages.folder / "rows")
    limited = {"dataset_name": "rows", "max_length": 128}

    done = stages.rehearse(stages.trl(assistant_only_loss=True, **limited))
    packed = stages.rehearse(stages.trl(packing=True, **limited))

    finding = dropped_rows(done)
    assert finding.severity == "warning"
    assert finding.key == "args.max_length"
    assert finding.message.startswith("5 of 30 rows are dropped: ")
    assert "within `max_length`" in finding.message
    assert first_line(done).startswith("30 rows, 25 once prepared: ")
    # packing makes fewer rows, and drops none
    assert "rows-dropped" not in codes_of(packed)


def test_a_plan_says_which_rows_a_rehearsal_saw_dropped(
    stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    write_long_questions(stages.folder / "rows")
    limited = {"dataset_name": "rows", "max_length": 128, "output_dir": "out"}
    path = stages.trl(assistant_only_loss=True, **limited)
    plan = ["plan", str(path), "--gpus", "0", "--row-tokens", "50:64", "--format", "json"]
    dropped = []
    for _ in range(2):
        main(plan)
        findings = parse_answer(capsys.readouterr().out).findings
        dropped += [finding for finding in findings if finding.code == "rows-dropped"]
        stages.rehearse(path)

    before, after = dropped
    assert before.severity == "note"
    assert "`max_length: 128`" in before.message
    assert after.severity == "warning"
    assert after.message.startswith("5 of 30 rows are dropped")


@needs_open_instruct
def test_rows_that_open_instruct_repeats_and_drops_are_counted(stages: Stages) -> None:
    data = write_long_questions(stages.folder / "rows")

    path = stages.open_instruct(data=data, amount="200", max_seq_length=128)
    message = dropped_rows(stages.rehearse(path)).message

    assert message.startswith("10 of the first 64 rows are dropped: ")
    assert "within `max_seq_length`" in message


USUAL = {"messages": [turn("user", "a question"), turn("assistant", "an answer")]}
WITH_SYSTEM = {"messages": [turn("system", "be kind"), *USUAL["messages"]]}
WITH_TOOL = {"messages": [turn("user", "a question"), turn("tool", "a result")]}


def test_a_kind_of_row_that_comes_late_is_rehearsed_too(stages: Stages) -> None:
    late = write_rows(stages.folder / "late", [USUAL] * 150 + [WITH_SYSTEM] * 3)
    model = copy_model(stages.assets, stages.folder / "strict", NO_SYSTEM_ROLE)
    data = str(late.parent)

    sound = stages.rehearse(stages.trl(dataset_name=data))
    strict = stages.trl(dataset_name=data, model_name_or_path=str(model))
    (fault,) = errors_of(stages.rehearse(strict, ignore_rules=True))

    assert not errors_of(sound)
    assert sound.rows is not None
    assert sound.rows.further == 1
    rows = "64 of 153 rows and 1 further row of another kind: "
    assert first_line(sound).startswith(rows)
    assert fault.code == "trainer-refuses"
    assert fault.key == "args.dataset_name"
    assert "no system role" in fault.message
    assert f"{late}:151" in str(fault.help)


def test_no_row_is_named_where_the_first_rows_are_refused_already(stages: Stages) -> None:
    early = write_rows(stages.folder / "early", [USUAL, WITH_SYSTEM] * 80 + [WITH_TOOL])
    model = copy_model(stages.assets, stages.folder / "strict", NO_SYSTEM_ROLE)
    path = stages.trl(dataset_name=str(early.parent), model_name_or_path=str(model))

    (fault,) = errors_of(stages.rehearse(path, ignore_rules=True))

    assert "no system role" in fault.message
    assert str(early) not in str(fault.help)


@needs_open_instruct
def test_open_instruct_meets_rows_of_late_kinds_too(stages: Stages) -> None:
    late = write_rows(stages.folder / "late", [USUAL] * 150 + [WITH_SYSTEM] * 3)
    model = copy_model(stages.assets, stages.folder / "strict", NO_SYSTEM_ROLE)
    args = {"model_name_or_path": str(model), "chat_template_name": None}

    path = stages.open_instruct(data=late, amount="1.0", **args)
    (fault,) = errors_of(stages.rehearse(path, ignore_rules=True))

    assert "no system role" in fault.message
    assert fault.key == "args.dataset_mixer_list"


@needs_open_instruct
@pytest.mark.parametrize(
    ("pad_token", "length"),
    [
        pytest.param("<|endoftext|>", None, id="no length"),
        pytest.param(None, 256, id="no pad token"),
        pytest.param("<|im_end|>", 256, id="pad token ends answers"),
    ],
)
def test_what_open_instruct_trains_is_not_refused(
    pad_token: str | None, length: int | None, stages: Stages
) -> None:
    model = copy_model(stages.assets, stages.folder / "model")
    config = model / "tokenizer_config.json"
    tokenizer = json.loads(config.read_text())
    tokenizer["pad_token"] = pad_token
    if pad_token is None:
        del tokenizer["pad_token"]
    config.write_text(json.dumps(tokenizer))
    args = {"model_name_or_path": str(model), "max_seq_length": length}

    done = stages.rehearse(stages.open_instruct(**args))

    assert not errors_of(done)
    assert not done.failed
    assert len(done.losses) == 2


def test_several_files_are_judged_deeply_in_turn(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ask, "Servers", lambda: contextlib.nullcontext(stages.servers))
    sound = stages.trl()
    refused = sound.with_name("refused.yaml")
    refused.write_text(f"{sound.read_text()}  dataset_kwargs: {{skip_prepare_dataset: true}}\n")

    main(["validate-config", "--deep", str(sound), str(refused), "--format", "json"])

    answer = parse_answer(capsys.readouterr().out)
    assert [file.valid for file in answer.data.files] == [True, False]
    errors = [finding.code for finding in answer.findings if finding.severity == "error"]
    assert errors == ["trainer-refuses"]


FAMILIES = (
    "llama mistral smollm3 granite qwen2 qwen3 olmo olmo2 olmo3 phi3 gemma gemma2 gemma3_text "
    "mixtral qwen2_moe qwen3_moe olmoe gpt_oss qwen3_next falcon_h1 deepseek_v3 glm4 glm4_moe "
    "gpt2 opt bloom gpt_neox phi cohere2 stablelm starcoder2 mamba2 bamba jamba ernie4_5 "
    "seed_oss exaone4 falcon granitemoe lfm2"
)


def test_most_families_of_transformers_shrink(stages: Stages) -> None:
    judged, trainer = judge_request(Request(stage=None, config=stages.trl()))
    assert judged.upstream is not None
    server = stages.servers.of(trainer, "trl", "sft", judged.upstream.root)
    requests = []
    for family in FAMILIES.split():
        shape = {"model_type": family}
        out = str(stages.folder / family)
        requests.append(ServerRequest(kind="shrink", model="org/absent", out=out, shape=shape))

    responses = server.ask(*requests)

    failed = []
    for family, response in zip(FAMILIES.split(), responses, strict=True):
        if not response.is_fine:
            failed.append(family)
    assert failed == ["falcon_h1"]
