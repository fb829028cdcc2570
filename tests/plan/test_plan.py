"""GPUs -> batch, accumulation, steps; what launch sets, and what it says about that."""

from pathlib import Path

import pytest
from plans import CONFIGS, SFT, TRL, from_text, planned, staged

from launcher.errors import Finding, InvalidConfig
from launcher.plan.plan import Plan


def sft(folder: Path, more: str = "", gpus: int = 1, **changes: str) -> Plan:
    text = SFT.format(more=more)
    for old, new in changes.items():
        text = text.replace(
            {"batch": "batch: {global: 16, per_device: 2}", "data": '"64"'}[old], new
        )
    return planned(from_text(folder, text), gpus)


def found(made: Plan, code: str) -> Finding:
    return next(finding for finding in made.findings if finding.code == code)


def test_the_global_batch_is_kept(tmp_path: Path) -> None:
    for gpus, accumulation in ((0, 8), (1, 8), (2, 4), (4, 2), (8, 1)):
        made = sft(tmp_path, gpus=gpus)
        assert (made.per_device, made.accumulation, made.global_batch) == (2, accumulation, 16)
        words = made.arguments()
        assert words["per_device_train_batch_size"] == ["2"]
        assert words["gradient_accumulation_steps"] == [str(accumulation)]
        assert made.derived["gradient_accumulation_steps"].why.startswith("batch of 16 over")
    # several nodes share the batch
    made = planned(from_text(tmp_path, SFT.format(more="")), gpus=4, nodes=2)
    assert (made.accumulation, made.processes, made.global_batch) == (1, 8, 16)
    assert "NODE_RANK" in found(made, "several-nodes").message
    # without a batch the arguments stand
    more = "per_device_train_batch_size: 3\n  gradient_accumulation_steps: 5"
    made = sft(tmp_path, more, gpus=2, batch="")
    assert (made.per_device, made.accumulation, made.global_batch) == (3, 5, 30)
    assert set(made.derived) == {"logging_steps", "output_dir", "do_not_randomize_output_dir"}
    # so does accumulation where the rows a device are said alone
    made = sft(tmp_path, "gradient_accumulation_steps: 3", batch="batch: {per_device: 4}")
    assert (made.per_device, made.accumulation, made.global_batch) == (4, 3, 12)
    assert "gradient_accumulation_steps" not in made.derived
    # a split that an override makes impossible
    for text in ("batch.per_device=3", "batch.global=15"):
        with pytest.raises(InvalidConfig) as caught:
            planned(from_text(tmp_path, SFT.format(more=""), text))
        assert caught.value.findings[0].override == text


@pytest.mark.parametrize(
    ("batch", "gpus", "help"),
    [
        ("{global: 16, per_device: 3}", 1, "batch.global=15 or 18 with per_device 3; "
         "batch.per_device=2 or 4 with global 16"),
        ("{global: 16, per_device: 2}", 3, "batch.global=12 or 18 with per_device 2"),
        ("{global: 128, per_device: 16}", 16, "batch.global=256 with per_device 16; "
         "batch.per_device=4 or 8 with global 128"),
    ],
)  # fmt: skip
def test_an_impossible_split_names_the_nearest(
    tmp_path: Path, batch: str, gpus: int, help: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        sft(tmp_path, gpus=gpus, batch=f"batch: {batch}")
    (finding,) = caught.value.findings
    assert finding.code == "impossible-batch"
    assert finding.help == f"nearest possible: {help}"
    assert finding.line == 3


def test_a_batch_said_twice_or_none_is_refused(tmp_path: Path) -> None:
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        with pytest.raises(InvalidConfig) as caught:
            sft(tmp_path, f"{name}: 2")
        assert [(one.code, one.line) for one in caught.value.findings] == [("batch-twice", 9)]
    more = "per_device_train_batch_size: 0\n  gradient_accumulation_steps: 0"
    with pytest.raises(InvalidConfig) as caught:
        sft(tmp_path, more, batch="")
    assert [one.code for one in caught.value.findings] == ["impossible-batch"] * 2


def test_steps_follow_from_counts(tmp_path: Path) -> None:
    for amount, epochs, gpus, steps in (('"64"', 1, 1, 4), ('"65"', 3, 2, 15), ('"1"', 2, 1, 2)):
        made = sft(tmp_path, f"num_train_epochs: {epochs}", gpus, data=amount)
        assert made.steps == steps
    # Upstream asks whether it is None: at 0 and -1 no epoch is begun
    # (finetune.py::main[args.num_train_epochs = math.ceil]).
    for limit, steps in ((7, 7), (0, 0), (-1, 0)):
        assert sft(tmp_path, f"max_train_steps: {limit}").steps == steps
    assert trl_rows(tmp_path, "max_steps: -1").steps == 39
    made = sft(tmp_path, "cache_dataset_only: true")
    assert (made.rows, made.steps) == (64, 0)
    # what is not here is not
    made = sft(tmp_path, data='"0.5"')
    assert (made.rows, made.steps) == (None, None)
    # rows of local files are counted
    data = tmp_path / "some rows.jsonl"
    row = '{"messages": [{"role": "assistant", "content": "a"}]}'
    data.write_text("\n".join([row] * 3))
    text = SFT.format(more="").replace('[set, "64"]', f'["{data}", "0.5", other, "10"]')
    assert planned(from_text(tmp_path, text), 1).rows == 11
    # logging steps is set and said
    made = sft(tmp_path)
    assert made.arguments()["logging_steps"] == ["1"]
    note = found(made, "derived")
    assert (note.severity, note.key) == ("note", "args.logging_steps")
    assert made.values["logging_steps"] == 1
    assert sft(tmp_path, "logging_steps: 5").arguments()["logging_steps"] == ["5"]
    assert sft(tmp_path, "logging_steps: null").arguments()["logging_steps"] == ["1"]


def test_a_trend_of_too_few_steps(tmp_path: Path) -> None:
    """64 rows are 4 steps of 16, or 64 of one."""
    for rows, messages in ((16, 1), (1, 0)):
        asked = f"batch: {{global: {rows}, per_device: 1}}\nexpect: {{trend: falling}}"
        made = sft(tmp_path, "num_train_epochs: 1", 1, batch=asked)
        found = [one for one in made.findings if one.code == "impossible-expectation"]
        assert [(one.key, bool(one.line)) for one in found] == [("expect.trend", True)] * messages
        assert all(f"a run of {64 // rows} steps" in one.message for one in found)


def trl_rows(folder: Path, more: str) -> Plan:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    (data / "train.jsonl").write_text('{"text": "a"}\n' * 100)
    (data / "test.jsonl").write_text('{"text": "a"}\n' * 7)
    more += "\n  per_device_train_batch_size: 8"
    return planned(from_text(folder, TRL.format(data=data, more=more)), 0)


@pytest.mark.parametrize(
    ("more", "rows", "steps"),
    [
        ("num_train_epochs: 2", 100, 26),
        ("num_train_epochs: 0.5", 100, 7),
        ("max_steps: 4", 100, 4),
        ("dataset_train_split: test", 7, 3),
        ("packing: true", 100, None),
    ],
)
def test_steps_of_trl(tmp_path: Path, more: str, rows: int | None, steps: int | None) -> None:
    made = trl_rows(tmp_path, more)
    assert (made.rows, made.steps) == (rows, steps)


def test_a_folder_whose_names_say_nothing_is_for_training(tmp_path: Path) -> None:
    trl_rows(tmp_path, "")
    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.jsonl").unlink()
    (tmp_path / "data" / "chats.jsonl").write_text('{"text": "a"}\n' * 32)
    stage = from_text(
        tmp_path, TRL.format(data=tmp_path / "data", more="per_device_train_batch_size: 8")
    )
    assert planned(stage, 0).rows == 32


def test_a_place_of_ones_own(tmp_path: Path) -> None:
    words = sft(tmp_path, "output_dir: somewhere").arguments()
    assert words["output_dir"] == ["somewhere"]
    assert "do_not_randomize_output_dir" not in words


def test_deepspeed_on_the_cpu_is_left_out_and_said() -> None:
    stage = staged(CONFIGS / "tulu" / "sft_qwen7b.yaml")
    note = found(planned(stage, 0), "deepspeed-left-out")
    assert (note.severity, note.layer, note.file) == ("note", "launch", str(stage.config.path))
    assert "zero2_fp32_comm" in note.message
    assert "deepspeed-left-out" not in {one.code for one in planned(stage, 8).findings}


@pytest.mark.parametrize(
    ("deepspeed", "gpus", "nodes", "refused"),
    [
        ("none", 1, 1, True), ("none", 0, 1, False), ("none", 2, 1, False), ("none", 1, 2, False),
        ("zero2", 1, 1, False),
    ],
)  # fmt: skip
def test_dpo_alone_on_a_gpu_needs_deepspeed(
    deepspeed: str, gpus: int, nodes: int, refused: bool
) -> None:
    stage = staged(CONFIGS / "tulu" / "dpo_qwen7b.yaml", [f"deepspeed={deepspeed}"])
    findings = [
        one for one in planned(stage, gpus, nodes).findings if one.code == "no-process-group"
    ]
    assert [(one.severity, one.layer) for one in findings] == [("error", "run")] * refused
    assert all("deepspeed" in (one.help or "") for one in findings)


def warmups(plan: Plan) -> list[str]:
    return [finding.message for finding in plan.findings if finding.code == "endless-warmup"]


LONG_WARMUPS = [
    ("warmup_steps: 1e6", "the warm-up takes 1,000,000 steps, and 24 are planned"),
    ("warmup_steps: 24", "the learning rate gets to 9.58e-05, 96 % of 0.0001"),
    (
        "warmup_steps: 100, lr_scheduler_type: cosine",
        "the learning rate gets to 2.3e-05, 23 % of 0.0001",
    ),
]
SHORT_WARMUPS = [
    *("warmup_steps: 23", "warmup_steps: 0", "warmup_steps: 0.99", "seed: 1"),
    "warmup_steps: 1e6, lr_scheduler_type: constant",
]


def with_warmup(tmp_path: Path, more: str) -> Plan:
    """TRL on 64 rows: 8 steps an epoch, three epochs."""
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n' * 64)
    lines = "\n  ".join(
        [*more.split(", "), "learning_rate: 1e-4", "per_device_train_batch_size: 8"]
    )
    return planned(from_text(tmp_path, TRL.format(data=tmp_path, more=lines)))


@pytest.mark.parametrize(("more", "said"), LONG_WARMUPS)
def test_a_warmup_as_long_as_training_is_said(tmp_path: Path, more: str, said: str) -> None:
    plan = with_warmup(tmp_path, more)
    assert plan.steps == 24
    (message,) = warmups(plan)
    assert said in message


@pytest.mark.parametrize("more", SHORT_WARMUPS)
def test_a_shorter_warmup_is_not(tmp_path: Path, more: str) -> None:
    assert warmups(with_warmup(tmp_path, more)) == []


@pytest.mark.parametrize(
    ("more", "count"),
    [("warmup_ratio: 1", 1), ("warmup_ratio: 0.9", 0), ("lr_scheduler_type: constant", 0)],
)
def test_a_warmup_of_open_instruct_is_a_share_of_all_steps(
    tmp_path: Path, more: str, count: int
) -> None:
    assert len(warmups(planned(from_text(tmp_path, SFT.format(more=more)), gpus=1))) == count


def test_a_long_warmup_is_said_once(tmp_path: Path) -> None:
    plan = with_warmup(tmp_path, "warmup_steps: 50, max_steps: 10")
    assert warmups(plan) == []
    keys = [finding.key for finding in plan.stage.findings if finding.code == "out-of-range"]
    assert keys == ["args.warmup_steps"]
