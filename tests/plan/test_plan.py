"""GPUs -> batch, accumulation, steps; what launch sets, and what it reports about that."""

from pathlib import Path

import pytest
from plans import CONFIGS, SFT, TRL, from_text, load_stage, make_plan

from launcher.errors import Finding, InvalidConfig
from launcher.plan.plan import Plan

BATCH = "batch: {global: 16, per_device: 2}"


def sft(
    folder: Path, more: str = "", gpus: int = 1, batch: str = BATCH, rows: str = '"64"'
) -> Plan:
    """The plan of open-instruct's SFT over so many rows, with these further arguments."""
    text = SFT.format(more=more).replace(BATCH, batch).replace('"64"', rows)
    return make_plan(from_text(folder, text), gpus)


def findings_with(plan: Plan, code: str) -> list[Finding]:
    return [finding for finding in plan.findings if finding.code == code]


def batch_of(plan: Plan) -> tuple[int, int, int]:
    return plan.per_device, plan.accumulation, plan.global_batch


@pytest.mark.parametrize(("gpus", "accumulation"), [(0, 8), (1, 8), (2, 4), (8, 1)])
def test_the_global_batch_is_kept(tmp_path: Path, gpus: int, accumulation: int) -> None:
    plan = sft(tmp_path, gpus=gpus)

    assert batch_of(plan) == (2, accumulation, 16)
    arguments = plan.arguments()
    assert arguments["per_device_train_batch_size"] == ["2"]
    assert arguments["gradient_accumulation_steps"] == [str(accumulation)]
    assert plan.derived["gradient_accumulation_steps"].why.startswith("batch of 16 over")


def test_several_nodes_share_the_batch(tmp_path: Path) -> None:
    plan = make_plan(from_text(tmp_path, SFT.format(more="")), gpus=4, nodes=2)
    assert plan.processes == 8
    assert batch_of(plan) == (2, 1, 16)
    (finding,) = findings_with(plan, "several-nodes")
    assert "NODE_RANK" in finding.message


def test_without_a_batch_the_arguments_stand(tmp_path: Path) -> None:
    more = "per_device_train_batch_size: 3\n  gradient_accumulation_steps: 5"
    plan = sft(tmp_path, more, gpus=2, batch="")
    assert batch_of(plan) == (3, 5, 30)
    assert set(plan.derived) == {"logging_steps", "output_dir", "do_not_randomize_output_dir"}


def test_rows_a_device_alone_leave_the_accumulation(tmp_path: Path) -> None:
    plan = sft(tmp_path, "gradient_accumulation_steps: 3", batch="batch: {per_device: 4}")
    assert batch_of(plan) == (4, 3, 12)
    assert "gradient_accumulation_steps" not in plan.derived


@pytest.mark.parametrize("override", ["batch.per_device=3", "batch.global=15"])
def test_a_split_that_an_override_makes_impossible_names_it(tmp_path: Path, override: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        make_plan(from_text(tmp_path, SFT.format(more=""), override))
    assert caught.value.findings[0].override == override


@pytest.mark.parametrize(
    ("batch", "gpus", "help"),
    [
        (
            "{global: 16, per_device: 3}",
            1,
            "batch.global=15 or 18 with per_device 3; batch.per_device=2 or 4 with global 16",
        ),
        ("{global: 16, per_device: 2}", 3, "batch.global=12 or 18 with per_device 2"),
        (
            "{global: 128, per_device: 16}",
            16,
            "batch.global=256 with per_device 16; batch.per_device=4 or 8 with global 128",
        ),
    ],
)
def test_an_impossible_split_names_the_nearest(
    tmp_path: Path, batch: str, gpus: int, help: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        sft(tmp_path, gpus=gpus, batch=f"batch: {batch}")
    (finding,) = caught.value.findings
    assert finding.code == "impossible-batch"
    assert finding.help == f"nearest possible: {help}"
    assert finding.line == 3


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_a_batch_that_is_set_twice_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        sft(tmp_path, f"{name}: 2")
    (finding,) = caught.value.findings
    assert (finding.code, finding.line) == ("batch-twice", 9)


def test_a_batch_of_0_is_refused(tmp_path: Path) -> None:
    more = "per_device_train_batch_size: 0\n  gradient_accumulation_steps: 0"
    with pytest.raises(InvalidConfig) as caught:
        sft(tmp_path, more, batch="")
    codes = [finding.code for finding in caught.value.findings]
    assert codes == ["impossible-batch", "impossible-batch"]


@pytest.mark.parametrize(
    ("rows", "epochs", "gpus", "steps"), [('"64"', 1, 1, 4), ('"65"', 3, 2, 15), ('"1"', 2, 1, 2)]
)
def test_steps_follow_from_rows(
    tmp_path: Path, rows: str, epochs: int, gpus: int, steps: int
) -> None:
    assert sft(tmp_path, f"num_train_epochs: {epochs}", gpus, rows=rows).steps == steps


@pytest.mark.parametrize(("limit", "steps"), [(7, 7), (0, 0), (-1, 0)])
def test_steps_are_limited(tmp_path: Path, limit: int, steps: int) -> None:
    """Upstream asks whether the limit is None: at 0 and -1 no epoch is begun
    (finetune.py::main[args.num_train_epochs = math.ceil]).
    """
    assert sft(tmp_path, f"max_train_steps: {limit}").steps == steps


def test_tokenising_alone_makes_no_step(tmp_path: Path) -> None:
    plan = sft(tmp_path, "cache_dataset_only: true")
    assert (plan.rows, plan.steps) == (64, 0)


def test_of_data_that_are_not_here_nothing_is_counted(tmp_path: Path) -> None:
    plan = sft(tmp_path, rows='"0.5"')
    assert (plan.rows, plan.steps) == (None, None)


def test_rows_of_local_files_are_counted(tmp_path: Path) -> None:
    data = tmp_path / "some rows.jsonl"
    data.write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n' * 3)
    mixer = f'["{data}", "0.5", other, "10"]'
    text = SFT.format(more="").replace('[set, "64"]', mixer)
    assert make_plan(from_text(tmp_path, text), 1).rows == 11


def test_logging_steps_are_set_to_1_and_reported(tmp_path: Path) -> None:
    plan = sft(tmp_path)
    assert plan.values["logging_steps"] == 1
    assert plan.arguments()["logging_steps"] == ["1"]
    note = findings_with(plan, "derived")[0]
    assert (note.severity, note.key) == ("note", "args.logging_steps")


@pytest.mark.parametrize(("value", "argument"), [("5", "5"), ("null", "1")])
def test_logging_steps_of_the_file_stand(tmp_path: Path, value: str, argument: str) -> None:
    plan = sft(tmp_path, f"logging_steps: {value}")
    assert plan.arguments()["logging_steps"] == [argument]


def test_a_trend_of_too_few_steps_is_refused(tmp_path: Path) -> None:
    """64 rows are 4 steps of 16, or 64 of one."""
    batch = "batch: {global: 16, per_device: 1}\nexpect: {trend: falling}"
    plan = sft(tmp_path, "num_train_epochs: 1", batch=batch)
    (finding,) = findings_with(plan, "impossible-expectation")
    assert finding.key == "expect.trend" and finding.line
    assert "a run of 4 steps" in finding.message

    plan = sft(tmp_path, "num_train_epochs: 1", batch=batch.replace("16", "1"))
    assert findings_with(plan, "impossible-expectation") == []


def trl_plan(folder: Path, more: str) -> Plan:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    (data / "train.jsonl").write_text('{"text": "a"}\n' * 100)
    (data / "test.jsonl").write_text('{"text": "a"}\n' * 7)
    more += "\n  per_device_train_batch_size: 8"
    return make_plan(from_text(folder, TRL.format(data=data, more=more)), 0)


@pytest.mark.parametrize(
    ("more", "rows", "steps"),
    [
        ("num_train_epochs: 2", 100, 26),
        ("num_train_epochs: 0.5", 100, 7),
        ("max_steps: 4", 100, 4),
        ("max_steps: -1", 100, 39),
        ("dataset_train_split: test", 7, 3),
        ("packing: true", 100, None),
    ],
)
def test_steps_of_trl(tmp_path: Path, more: str, rows: int | None, steps: int | None) -> None:
    plan = trl_plan(tmp_path, more)
    assert (plan.rows, plan.steps) == (rows, steps)


def test_a_folder_whose_names_say_nothing_is_for_training(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chats.jsonl").write_text('{"text": "a"}\n' * 32)
    text = TRL.format(data=tmp_path / "data", more="per_device_train_batch_size: 8")
    assert make_plan(from_text(tmp_path, text)).rows == 32


def test_an_output_folder_of_the_file_is_exact(tmp_path: Path) -> None:
    arguments = sft(tmp_path, "output_dir: somewhere").arguments()
    assert arguments["output_dir"] == ["somewhere"]
    assert "do_not_randomize_output_dir" not in arguments


def test_deepspeed_is_left_out_on_the_cpu_with_a_note() -> None:
    stage = load_stage(CONFIGS / "tulu" / "sft_qwen7b.yaml")
    (note,) = findings_with(make_plan(stage, 0), "deepspeed-left-out")
    assert (note.severity, note.layer, note.file) == ("note", "launch", str(stage.config.path))
    assert "zero2_fp32_comm" in note.message
    assert findings_with(make_plan(stage, 8), "deepspeed-left-out") == []


def dpo_without_a_group(deepspeed: str, gpus: int, nodes: int) -> list[Finding]:
    stage = load_stage(CONFIGS / "tulu" / "dpo_qwen7b.yaml", [f"deepspeed={deepspeed}"])
    return findings_with(make_plan(stage, gpus, nodes), "no-process-group")


def test_dpo_alone_on_a_gpu_needs_deepspeed() -> None:
    (finding,) = dpo_without_a_group("none", gpus=1, nodes=1)
    assert (finding.severity, finding.layer) == ("error", "run")
    assert "deepspeed" in (finding.help or "")


@pytest.mark.parametrize(
    ("deepspeed", "gpus", "nodes"),
    [("none", 0, 1), ("none", 2, 1), ("none", 1, 2), ("zero2", 1, 1)],
)
def test_dpo_with_a_process_group_is_planned(deepspeed: str, gpus: int, nodes: int) -> None:
    assert dpo_without_a_group(deepspeed, gpus, nodes) == []


def warmups(plan: Plan) -> list[str]:
    return [finding.message for finding in findings_with(plan, "endless-warmup")]


def with_warmup(tmp_path: Path, more: str) -> Plan:
    """TRL on 64 rows: 8 steps an epoch, three epochs."""
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n' * 64)
    settings = [*more.split(", "), "learning_rate: 1e-4", "per_device_train_batch_size: 8"]
    text = TRL.format(data=tmp_path, more="\n  ".join(settings))
    return make_plan(from_text(tmp_path, text))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("warmup_steps: 1e6", "the warm-up takes 1,000,000 steps, and 24 are planned"),
        ("warmup_steps: 24", "the learning rate gets to 9.58e-05, 96 % of 0.0001"),
        (
            "warmup_steps: 100, lr_scheduler_type: cosine",
            "the learning rate gets to 2.3e-05, 23 % of 0.0001",
        ),
    ],
)
def test_a_warmup_as_long_as_training_is_reported(tmp_path: Path, more: str, words: str) -> None:
    plan = with_warmup(tmp_path, more)
    assert plan.steps == 24
    (message,) = warmups(plan)
    assert words in message


@pytest.mark.parametrize(
    "more",
    [
        "warmup_steps: 23",
        "warmup_steps: 0",
        "warmup_steps: 0.99",
        "warmup_steps: 1e6, lr_scheduler_type: constant",
    ],
)
def test_a_shorter_warmup_is_not_reported(tmp_path: Path, more: str) -> None:
    assert warmups(with_warmup(tmp_path, more)) == []


@pytest.mark.parametrize(
    ("more", "count"),
    [("warmup_ratio: 1", 1), ("warmup_ratio: 0.9", 0), ("lr_scheduler_type: constant", 0)],
)
def test_a_warmup_of_open_instruct_is_a_share_of_all_steps(
    tmp_path: Path, more: str, count: int
) -> None:
    assert len(warmups(sft(tmp_path, more))) == count


def test_a_long_warmup_is_reported_once(tmp_path: Path) -> None:
    plan = with_warmup(tmp_path, "warmup_steps: 50, max_steps: 10")
    assert warmups(plan) == []
    keys = [finding.key for finding in plan.stage.findings if finding.code == "out-of-range"]
    assert keys == ["args.warmup_steps"]
