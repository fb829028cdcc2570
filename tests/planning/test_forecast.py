"""`launch plan`: batch, memory, time and money on several counts of GPUs, and what they lack."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Write
from made_runs import manifest, write_run
from typer.testing import CliRunner

from launcher import files
from launcher.artifacts.lengths import parse
from launcher.cli.commands import app
from launcher.cli.main import main
from launcher.errors import InvalidConfig, LaunchError, UsageError
from launcher.lifecycle import conclude
from launcher.machine import codec
from launcher.machine.codec import Omission
from launcher.machine.devices import Devices, Slot
from launcher.machine.python import Gpu
from launcher.planning import forecast, prepare
from launcher.planning.collect import Scope
from launcher.planning.prepare import Prepared
from launcher.planning.request import Request
from launcher.report import series
from launcher.runs.record import PlanRecord
from launcher.runs.rundir import RunFolder

CONFIGS = REPOSITORY / "configs"
TULU_FILE = CONFIGS / "tulu" / "sft_qwen7b_25pct.yaml"


def quote(path: Path) -> str:
    """A path as a part of a command line."""
    return shlex.quote(str(path))


TULU = quote(TULU_FILE)
TULU_DPO = quote(CONFIGS / "tulu" / "dpo_qwen7b.yaml")
LLAMA = quote(CONFIGS / "llama" / "llama31_8b_sft_10pct.yaml")
TRL_RECIPE = quote(CONFIGS / "bench" / "hand_recipe_trl.yaml")
ROWS = "--row-tokens 302:1104"
GIB_80 = "--gpu-memory 80"
GIB_139 = "--gpu-memory 139"
# of files that expect both to be on, where a test turns one of them off
LAX = "expect.liger=any expect.packing=any"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No GPUs, no earlier runs, no hub."""
    monkeypatch.setenv("LAUNCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("LAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Answer:
    """What `launch plan --format json` answers: a row for each count of GPUs, and findings."""

    rows: list[Any]
    findings: list[Any]

    @property
    def codes(self) -> list[str]:
        return [finding["code"] for finding in self.findings]

    def findings_of(self, code: str) -> list[Any]:
        return [finding for finding in self.findings if finding["code"] == code]


def command_line(*parts: str) -> list[str]:
    """The words of `launch plan`, from parts of a command line."""
    return ["plan", *shlex.split(" ".join(parts))]


def plan(*parts: str) -> Answer:
    """The answer of a plan, whether it has errors or not."""
    words = command_line(*parts, "--format json")
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    answer = json.loads(result.stdout)
    return Answer(answer["data"]["gpus"], answer["findings"])


def plan_row(*parts: str) -> Any:
    """The row of a plan for one count of GPUs, which has no errors."""
    answer = plan(*parts)
    assert "error" not in [finding["severity"] for finding in answer.findings]
    (row,) = answer.rows
    return row


def plan_peak(*parts: str) -> float:
    peak: float = plan_row(*parts)["memory_gib"]["peak"]
    return peak


def show(*parts: str) -> str:
    """The plan as text."""
    return CliRunner().invoke(app, command_line(*parts)).stdout


def refuse(*parts: str) -> LaunchError:
    """The error of a plan that is refused."""
    result = CliRunner().invoke(app, command_line(*parts))
    assert isinstance(result.exception, LaunchError), result.output
    return result.exception


QWEN = "Qwen/Qwen2.5-1.5B"
TRL = """
stage: {stage}
backend: trl
deepspeed: {deepspeed}
batch: {{global: {total}, per_device: {each}}}
args:
  model_name_or_path: {model}
  dataset_name: data
  {more}
"""


def write_trl(
    write: Write,
    more: str = "max_length: 1024",
    *,
    stage: str = "sft",
    model: str = QWEN,
    deepspeed: str = "none",
    total: int = 64,
    each: int = 8,
) -> str:
    """A stage file for TRL with further lines below `args:`; its path."""
    text = TRL.format(
        stage=stage, model=model, deepspeed=deepspeed, total=total, each=each, more=more
    )
    return str(write("stage.yaml", text))


SHAPE = "max_length: 2048\n  max_steps: 6\n  gradient_checkpointing: true\n  "
LORA = "use_peft: true\n  lora_target_modules: [q_proj, k_proj, v_proj, o_proj]"


@pytest.mark.parametrize(
    "stage, each, more, rows, gib, tolerance",
    [
        ("sft", 16, "use_liger_kernel: true", "301:1103", 10.306, 0.03),
        ("sft", 8, LORA, "301:1103", 2.884, 0.07),
        ("dpo", 8, "use_liger_kernel: true", "272:1027", 12.016, 0.03),
    ],
    ids=["sft", "lora", "dpo"],
)
def test_the_measured_points_of_trl(
    write: Write, stage: str, each: int, more: str, rows: str, gib: float, tolerance: float
) -> None:
    """TRL 1.16 on one H200, fp32 weights under bf16 autocast (docs/evidence/h200.md)."""
    model = "Qwen/Qwen2.5-0.5B"
    path = write_trl(write, SHAPE + more, stage=stage, model=model, total=2 * each, each=each)
    peak = plan_peak(path, "--gpus 1 --row-tokens", rows, GIB_139)
    assert peak == pytest.approx(gib, rel=tolerance)


PACKED_TRL = f"{TRL_RECIPE} packing=true expect.packing=isolated"
SMALL_MODEL = "model_name_or_path=Qwen/Qwen2.5-0.5B"
LORA_SFT = quote(CONFIGS / "lora" / "sft_qwen7b.yaml")
LORA_DPO = quote(CONFIGS / "lora" / "dpo_qwen7b.yaml")
CHATS = "--row-tokens 303:1114 --rows 12000"
PAIRS = "--row-tokens 309:1109 --rows 1000"


@pytest.mark.parametrize(
    ("words", "gib", "seconds"),
    [
        # the cards have enough to do
        (
            f"{PACKED_TRL} deepspeed=zero3 batch.per_device=20 batch.global=160 --gpus 2",
            74.48,
            15.34,
        ),
        (
            f"{PACKED_TRL} deepspeed=zero2 batch.per_device=32 batch.global=256 --gpus 4",
            67.10,
            11.99,
        ),
        (
            f"{PACKED_TRL} deepspeed=zero2 gradient_checkpointing=false "
            "batch.per_device=3 batch.global=96 --gpus 4",
            69.21,
            4.47,
        ),
        # they wait for the host
        (f"{LORA_SFT} --gpus 1", 30.07, 2.53),
        (f"{LORA_SFT} load_in_4bit=true --gpus 1", 20.67, 2.88),
        (f"{LORA_DPO} model_name_or_path=Qwen/Qwen2.5-7B --gpus 1", None, 3.76),
        (f"{TULU} {SMALL_MODEL} deepspeed=none --gpus 1", None, 2.34),
        (f"{TULU} {SMALL_MODEL} --gpus 1", 10.20, 3.26),
        (f"{TULU} {SMALL_MODEL} --gpus 2", 5.61, 1.86),
        (f"{TULU_DPO} {SMALL_MODEL} --gpus 2", None, 12.1),
    ],
)
def test_what_was_measured_on_h200(words: str, gib: float | None, seconds: float) -> None:
    """docs/evidence/h200x4.md. Without `gib`: so few micro-batches did not have the longest row."""
    rows = PAIRS if "dpo" in words else CHATS
    row = plan_row(words, rows, "--gpu H200 --gpu-memory 140")
    if gib is not None:
        assert row["memory_gib"]["peak"] == pytest.approx(gib, rel=0.025)
    planned_s = row["tokens_per_step"] / row["tokens_per_second"]
    assert planned_s == pytest.approx(seconds, rel=0.2)


def test_a_given_number_of_rows_counts_before_those_of_the_file(write: Write) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    line = json.dumps({"messages": chat})
    data = write("chats.jsonl", f"{line}\n" * 1_000)
    words = f"{TULU} dataset_mixer_list=[{data},1.0] --gpus 2 {ROWS}"
    assert plan_row(words)["steps"] == 2 * 8
    assert plan_row(words, "--rows 5000")["steps"] == 2 * 40
    assert plan_row(words, "max_train_steps=3 --rows 5000")["steps"] == 3


def test_a_half_empty_card_is_a_finding() -> None:
    words = "batch.per_device=1 --gpus 8 --row-tokens 264:2048 --fit"
    answer = plan(LLAMA, LAX, GIB_80, words)
    (row,) = answer.rows
    assert row["memory_gib"]["peak"] < 48
    assert "half-empty" in answer.codes
    fit = row["fit"]
    assert fit["per_device"] > 1
    assert fit["per_device"] * fit["accumulation"] * 8 == row["global"]


def test_why_shows_every_part_with_its_formula() -> None:
    words = f"{TULU} --gpus 2 {ROWS} --why"
    row = plan_row(words)
    fullest = row["why"][0]
    assert fullest["gib"] == pytest.approx(row["memory_gib"]["peak"], abs=0.01)
    assert all(part["formula"] for part in fullest["parts"])
    text = show(words)
    assert "Adam's two states" in text
    assert "launcher/artifacts/shapes.json, Qwen/Qwen2.5-7B" in text


def test_trl_packs_rows_into_full_ones_before_it_counts_batches(write: Write) -> None:
    more = "max_length: 1024\n  num_train_epochs: 1"
    path = write_trl(write, more, model="Qwen/Qwen2.5-0.5B", total=8, each=4)
    words = "--gpus 1 --row-tokens 128:1024 --rows 8000"
    plain = plan_row(path, words)
    assert plain["steps"] == 1000
    assert plain["tokens_per_step"] == 8 * 128
    packed = plan_row(path, "packing=true", words)
    assert packed["steps"] == 125
    assert packed["tokens_per_step"] == 8 * 1024
    assert packed["padding_share"] == 0
    padded_peak = plan_peak(path, "--gpus 1 --row-tokens 1024")
    assert packed["memory_gib"]["peak"] == pytest.approx(padded_peak, rel=0.01)
    assert plan_row(path, "packing=true max_steps=7", words)["steps"] == 7


def test_deepspeed_casts_what_trl_has_loaded_in_32_bits(write: Write) -> None:
    """deepspeed/runtime/engine.py::DeepSpeedEngine.flops_profiler_enabled[self.autotuning_enabled]:
    the loaded type does not matter then.
    """

    def peak(more: str = "max_length: 1024", deepspeed: str = "none") -> float:
        return plan_peak(write_trl(write, more, deepspeed=deepspeed), "--gpus 2", ROWS)

    half = "dtype: bfloat16"
    for engine in ("zero2", "zero3"):
        assert peak(deepspeed=engine) == peak(half, engine)
    whole_peak = peak()
    half_peak = peak(half)
    assert half_peak < whole_peak
    # what trl hands to the model counts
    assert peak("model_init_kwargs: {num_hidden_layers: 4}") < whole_peak
    assert peak("model_init_kwargs: {dtype: bfloat16}") == half_peak


def test_liger_loads_weights_in_the_type_that_the_config_says(write: Write) -> None:
    """Without DeepSpeed finetune.py keeps it, and names a type only where it does without Liger."""
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
    folder = write("model/config.json", json.dumps(config)).parent
    words = f"{TULU} {LAX} model_name_or_path={folder} deepspeed=none --gpus 1 {ROWS}"
    with_liger = f"{words} use_liger_kernel=true"
    without_liger = f"{words} use_liger_kernel=false"
    plain_peak = plan_peak(without_liger)
    assert "has no `torch_dtype`" in refuse(with_liger).findings[0].message

    write("model/config.json", json.dumps({**config, "torch_dtype": "float32"}))
    wide_peak = plan_peak(with_liger)
    assert plan_peak(without_liger) == plain_peak
    write("model/config.json", json.dumps({**config, "dtype": "bfloat16"}))
    assert wide_peak > 1.6 * plan_peak(with_liger)
    assert plan_peak(without_liger) == plain_peak


OLMO_1B = "allenai/OLMo-2-0425-1B"


@pytest.mark.parametrize(
    "more, model, words",
    [
        ("optim: adafactor", QWEN, "`optim: adafactor`"),
        ("attn_implementation: eager", QWEN, "eager attention"),
        ("use_peft: true\n  use_dora: true", QWEN, "more than LoRA"),
        ("use_peft: true\n  lora_target_modules: [q_proj, c_attn]", QWEN, "LoRA on `c_attn`"),
        ("use_peft: true", OLMO_1B, "no `lora_target_modules`"),
        ("model_init_kwargs: {quantization_config: {load_in_4bit: true}}", QWEN, "quantised"),
    ],
)
def test_a_trl_stage_of_unknown_memory_is_refused(
    write: Write, more: str, model: str, words: str
) -> None:
    error = refuse(write_trl(write, more, model=model), "--gpus 2", ROWS)
    assert {finding.code for finding in error.findings} <= {"unknown-memory", "unknown-shape"}
    assert words in error.findings[0].message


H100 = "--gpus 8 --gpu H100 --gpu-memory 80 --price 2.5 --row-tokens 290:1100"


@pytest.mark.parametrize(
    "every, interval, lost_gpu_hours",
    [("367", 367, 0.72), ("epoch", 1835, 3.62), ("null", None, 7.24)],
)
def test_what_an_interruption_costs(
    every: str, interval: int | None, lost_gpu_hours: float
) -> None:
    """The run of the next test: 3,670 steps in 0.91 h on 8 GPUs, in two epochs."""
    risk = plan_row(TULU, H100, f"checkpointing_steps={every}")["interruption"]
    assert risk["interval"] == interval
    assert risk["lost_gpu_hours"] == pytest.approx(lost_gpu_hours, abs=0.05)


def test_steps_hours_and_cost_of_a_known_hub_set() -> None:
    """A quarter of allenai/tulu-3-sft-mixture, 939,343 rows on its card, 128 a step, twice."""
    row = plan_row(TULU, H100)
    assert (row["steps"], row["hours"], row["cost"]) == (3670, 0.91, 18.11)
    assert plan_row(TULU, "dataset_mixer_list_splits=[validation]", H100)["steps"] is None


def test_a_price_without_a_time_is_a_finding() -> None:
    answer = plan(TULU, "--gpus 2", ROWS, "--price 2")
    assert answer.rows[0]["cost"] is None
    assert answer.codes == ["unknown-cost"]


@pytest.mark.parametrize("speed, is_warned", [("100", True), ("100000", False)])
def test_a_long_run_without_checkpoints_is_warned_of(speed: str, is_warned: bool) -> None:
    rows = "--row-tokens 264:2048 --rows 10000"
    answer = plan(TRL_RECIPE, LAX, "--gpus 8", rows, "--tokens-per-second", speed)
    assert ("no-checkpoints" in answer.codes) is is_warned


def test_the_reference_takes_time_in_every_step_or_beforehand(write: Write) -> None:
    more = "num_train_epochs: 3\n  use_peft: true"
    path = write_trl(write, more, stage="dpo", model="Qwen/Qwen2.5-7B", total=8, each=2)

    def hours(*overrides: str) -> float:
        row = plan_row(path, *overrides, "--gpus 1", ROWS, "--gpu H100 --rows 80000")
        return float(row["hours"])

    before = "precompute_ref_log_probs=true"
    # three epochs with a third more each, against three and a third
    assert hours() / hours(before) == pytest.approx(4 / (3 + 1 / 3), rel=0.01)
    assert hours(before, "max_steps=10") > 100 * hours("max_steps=10")


@pytest.mark.parametrize(
    "more, deepspeed, checkpoint, kept",
    [
        # the adapter with two moments
        ("use_peft: true\n  lora_r: 1024", "none", 3, 2),
        ("use_peft: true\n  lora_r: 1024\n  save_only_model: true", "none", 1, 2),
        # one is left when the model is saved, which is smaller than the one that has gone
        ("dtype: bfloat16\n  save_total_limit: 1", "zero2", 8, 1.875),
    ],
    ids=["adapter", "only model", "limit"],
)
def test_the_disk_that_trl_fills(
    write: Write, more: str, deepspeed: str, checkpoint: float, kept: float
) -> None:
    more = f"max_steps: 100\n  save_steps: 50\n  {more}"
    path = write_trl(write, more, deepspeed=deepspeed)
    disk = plan_row(path, "--gpus 2 --rows 6400", ROWS)["disk_gib"]
    assert disk["checkpoint"] == pytest.approx(checkpoint * disk["model"], rel=0.1)
    assert disk["most"] == pytest.approx(kept * disk["checkpoint"] + disk["model"], rel=0.01)


def write_measured_run(folder: Path, tokens_per_second: int) -> None:
    """A run of the recipe on four H200 that was measured."""
    values = {
        "model_name_or_path": "Qwen/Qwen2.5-7B",
        "packing": True,
        "use_liger_kernel": True,
        "use_lora": False,
    }
    args = {name: {"value": value, "origin": "x"} for name, value in values.items()}
    record = manifest(
        stage="sft",
        backend="open_instruct",
        args=args,
        machine={"gpus": ["NVIDIA H200, 143771 MiB"]},
        plan={"gpus": 4, "nodes": 1, "steps": 9},
    )
    write_run(folder, record=record)
    metrics = {"tokens_per_second": tokens_per_second}
    files.write_json(folder / "verdict.json", {"metrics": metrics})


def test_an_earlier_run_on_such_cards_gives_the_speed(place: Path) -> None:
    write_measured_run(place / "runs" / "20260101T000000Z-sft-a", 40_000)
    words = f"{TULU} --gpus 2 {ROWS} --gpu H200 --rows 1000"
    row = plan_row(words)
    assert row["tokens_per_second"] == 20_000
    assert "20260101T000000Z" in row["speed_source"]
    other = plan_row(words, LAX, "use_liger_kernel=false")
    assert other["speed_source"].startswith("estimated: ")
    assert plan_row(words, "--tokens-per-second 123")["tokens_per_second"] == 123


WITHOUT_ROWS = "--gpus 2"
TWO = f"{WITHOUT_ROWS} {ROWS}"


@pytest.mark.parametrize(
    "code, kind, words",
    [
        ("unknown-lengths", InvalidConfig, f"{WITHOUT_ROWS} {GIB_80} --fit"),
        ("unknown-shape", InvalidConfig, f"model_name_or_path=no/such {TWO}"),
        ("impossible-batch", InvalidConfig, f"--gpus 3 {ROWS}"),
        ("caches-only", InvalidConfig, f"cache_dataset_only=true {TWO}"),
        ("price-without-gpus", UsageError, f"--gpus 0 --price 2 {ROWS}"),
        ("bad-gpus", UsageError, f"--gpus two {ROWS}"),
        ("row-tokens", UsageError, f"{WITHOUT_ROWS} --row-tokens 9:3"),
        ("bad-attention", UsageError, f"{TWO} --attention magic"),
        ("unknown-device", InvalidConfig, f"{TWO} --gpu 'Voodoo 2'"),
        ("bad-price", UsageError, f"{TWO} --price 0"),
        ("fit-without-memory", UsageError, f"{TWO} --fit"),
        ("speed-of-several", UsageError, f"--gpus 1,8 {ROWS} --tokens-per-second 9"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(
    code: str, kind: type[LaunchError], words: str
) -> None:
    error = refuse(TULU, words)
    assert isinstance(error, kind)
    assert code in [finding.code for finding in error.findings]


def test_without_row_lengths_batch_and_static_memory_are_planned() -> None:
    one, eight = plan(TULU, "--gpus 1,8", GIB_80).rows
    known = plan_row(TULU, "--gpus 8", GIB_80, ROWS)
    for name in ("per_device", "accumulation", "global", "steps", "disk_gib"):
        assert eight[name] == known[name]
    assert eight["memory_gib"]["weights"] == known["memory_gib"]["weights"]
    assert eight["memory_gib"]["activations"] is None
    assert eight["tokens_per_step"] is None
    assert eight["hours"] is None
    # too much is known without activations, enough is not
    assert one["fits"] is False
    assert eight["fits"] is None


def test_an_impossible_count_leaves_the_others_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = command_line(TULU, "--gpus 2,3,4", ROWS)
    assert main(words) == 3
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["GPUs", "2", "4"]
    assert "error[impossible-batch]" in err
    assert "on 3 device(s)" in err

    assert main([*words, "--format", "json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert len(answer["data"]["gpus"]) == 2
    errors = [f["code"] for f in answer["findings"] if f["severity"] == "error"]
    assert errors == ["impossible-batch"]


OLMO = """
stage: dpo
script: dpo_olmo_core
batch: {global: 128, per_device: 4}
args:
  model_name_or_path: allenai/OLMo-2-1124-7B
  config_name: olmo2_7B
  chat_template_name: tulu
  add_bos: true
  mixer_list: [allenai/olmo-2-1124-7b-preference-mix, 1.0]
  max_seq_length: 4096
  output_dir: output
  checkpointing_steps: 1000
  with_tracking: false
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
"""
PAIRS = "--row-tokens 900:4096"
PACKED = "packing=true batch.per_device=1 max_seq_length=16384"


@pytest.fixture
def olmo(write: Write) -> str:
    """A stage file for dpo.py."""
    return str(write("base.yaml", OLMO))


def test_a_finding_about_the_split_is_given_once_for_all_counts_that_agree(olmo: str) -> None:
    (finding,) = plan(olmo, PACKED, "--gpus 8", PAIRS).findings_of("accumulation-packed")
    assert finding["severity"] == "warning"
    assert finding["message"].startswith("with `packing`")
    both = plan(olmo, PACKED, "--gpus 1,8", PAIRS).findings_of("accumulation-packed")
    counts = [finding["message"].partition(" with")[0] for finding in both]
    assert counts == ["1 GPU(s):", "8 GPU(s):"]
    # what is set for any number of GPUs is no news here
    assert plan(olmo, "--gpus 1,8", PAIRS).codes == ["rows-dropped"]


def test_too_few_packed_rows_for_a_step_are_a_finding(olmo: str) -> None:
    answer = plan(olmo, PAIRS, "packing=true --gpus 8 --rows 20")
    assert answer.rows[0]["steps"] == 0
    assert "no-steps" in answer.codes


@pytest.mark.parametrize("script", ["sft", "dpo", "dpo_olmo_core"])
def test_a_limit_of_no_steps_trains_none(olmo: str, script: str) -> None:
    stages = {
        "sft": f"{TULU} {ROWS}",
        "dpo": f"{TULU_DPO} --shape Qwen/Qwen2.5-7B {ROWS}",
        "dpo_olmo_core": f"{olmo} {PAIRS}",
    }
    words = f"{stages[script]} --gpus 8 --gpu H100 --rows 100000"
    answer = plan(words, "max_train_steps=0")
    (row,) = answer.rows
    assert row["steps"] == 0
    assert answer.codes.count("no-steps") == 1
    assert row["hours"] < plan_row(words)["hours"] / 3

    disk = row["disk_gib"]
    least = disk["model"]
    if script == "dpo_olmo_core":
        # dpo.py writes a checkpoint before the first step
        least += disk["checkpoint"]
    assert disk["most"] == pytest.approx(least, abs=0.1)


def advise(*parts: str) -> str:
    """The help of the one finding that memory does not suffice."""
    (finding,) = plan(*parts).findings_of("out-of-memory")
    return str(finding["help"])


def test_where_no_setting_fits_a_smaller_model_is_advised() -> None:
    help = advise(TULU, "--gpus 1", ROWS, "--gpu-memory 2")
    assert help.startswith("no setting that launch could change makes it fit: ")
    assert help.endswith("a smaller model")


def test_zero3_is_not_advised_to_lora_with_reentrant_checkpointing() -> None:
    """finetune.py fails in its first backward pass."""
    lora = f"{LAX} model_name_or_path=Qwen/Qwen2.5-32B use_lora=true deepspeed=none"
    words = f"{TULU} {lora} --gpus 4 --row-tokens 2000 --gpu-memory 70"
    assert "zero3" not in advise(words, "gradient_checkpointing=true")
    help = advise(words, "gradient_checkpointing=false")
    assert "`deepspeed: zero3" in help
    assert "checkpointing" not in help


def test_where_a_single_row_fits_packing_goes() -> None:
    words = f"{LLAMA} --gpus 2 --row-tokens 9000:16384 max_seq_length=16384 {GIB_80}"
    unpacked = "`packing: false` and `expect: {packing: off}`"
    help = advise(words)
    assert help.startswith(f"this fits: `per_device: 1` with {unpacked} (")
    unexpected = advise(words, "expect.packing=any")
    assert "`per_device: 1` with `packing: false` (" in unexpected
    assert f"--fit: per device 1, accumulation 64 with {unpacked}: " in show(words, "--fit")
    # and so it does
    row = plan_row(words, "batch.per_device=1 packing=false expect.packing=off")
    assert row["fits"] is True
    assert f"({row['memory_gib']['peak']:.1f} GiB)" in help


@pytest.mark.parametrize(
    "words, start",
    [
        (f"{PACKED} --gpus 8", "`activation_memory_budget: 0.1`"),
        (f"{PACKED} --gpus 1", "`activation_memory_budget: 0.1` with `--gpus 4` ("),
        ("--gpus 8", "`per_device: 1` ("),
    ],
    ids=["packed", "on one GPU", "padded"],
)
def test_packed_rows_of_dpo_py_are_mended_by_what_shortens_them(
    olmo: str, words: str, start: str
) -> None:
    help = advise(olmo, words, PAIRS, GIB_80)
    assert help.startswith(f"this fits: {start}")
    assert ("per_device" in help) is ("per_device" in start)


@pytest.mark.parametrize("option", ["", "--why", "--fit"])
def test_a_row_of_a_plan_is_read_by_the_type_that_writes_it(option: str) -> None:
    row = plan_row(TULU, H100, option, LAX)
    left_out: list[Omission] = []
    again = codec.read_record(PlanRecord, row, left_out).as_json()
    # the moment of the peak is a text among numbers
    assert {fault.where for fault in left_out} <= {"memory_gib.moment"}
    row["memory_gib"].pop("moment", None)
    assert json.loads(json.dumps(again)) == row
    assert list(again) == list(row)


def test_of_the_cpu_batch_steps_and_disk_are_planned() -> None:
    plain = f"{TULU} use_liger_kernel=false expect.liger=off {ROWS}"
    answer = plan(plain, "--gpus 0,8 --rows 1000", GIB_80, "--why")
    cpu, eight = answer.rows
    batch = (cpu["gpus"], cpu["per_device"], cpu["accumulation"], cpu["steps"])
    assert batch == (0, 16, 8, 16)
    assert cpu["disk_gib"]["most"] > 0
    for unknown in ("memory_gib", "fits", "hours"):
        assert cpu[unknown] is None
    assert eight["fits"] is True
    assert {"unknown-memory", "deepspeed-left-out"} <= set(answer.codes)
    first = show(plain, "--gpus 0").splitlines()[1]
    assert first.split()[:-1] == ["CPU", "16", "8", "128", "3,670", "38,656"]


OOM = (
    "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "finetune.py", line 900, in main\n'
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. "
    "GPU 1 has a total capacity of 79.00 GiB of which 2.00 GiB is free.\n"
)


def card(index: int) -> Slot:
    """A card of 80 GB that nobody uses."""
    gpu = Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA H100 80GB HBM3",
        memory_mib=81559,
        used_mib=0,
        driver="580",
    )
    return Slot(str(index), gpu)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepared]:
    """A start on two cards of 80 GB, with rows of a known length; nothing is started."""
    lengths = replace(parse("302:1104"), rows=235_000)
    monkeypatch.setattr(forecast, "find_row_lengths", lambda *_: lengths)
    request = Request(stage="sft", config=TULU_FILE, gpus=2)
    prepared = prepare.prepare_start(request, Scope.PLAN)
    devices = Devices(slots=(card(0), card(1)))
    yield replace(prepared, start=replace(prepared.start, devices=devices))


def test_a_start_that_does_not_fit_is_warned_of_once(prepared: Prepared) -> None:
    forecasted = forecast.add_forecast(prepared)
    row = forecasted.forecast
    assert row is not None
    assert row.memory_gib is not None
    assert row.memory_gib["peak"] == pytest.approx(85.2, rel=0.05)
    assert row.fits is False
    assert "out-of-memory" in [finding.code for finding in forecasted.warnings]
    assert forecast.add_forecast(forecasted).warnings == forecasted.warnings


def test_the_plan_stands_beside_what_was_measured(prepared: Prepared, tmp_path: Path) -> None:
    record = forecast.add_forecast(prepared).for_record()
    assert record["plan"]["per_device"] == prepared.plan.per_device
    files.write_json(tmp_path / "run.json", {"stage": "sft", **record})
    figures = series.list_planned_figures(series.load_run(tmp_path))
    assert figures["peak_gib"] == pytest.approx(85.2, rel=0.05)
    assert figures["tokens_per_step"] == pytest.approx(128 * 302, rel=0.02)
    assert figures["hours"] is not None
    assert figures["steps"] == 2 * 1835


def test_out_of_memory_is_explained_by_the_plan(prepared: Prepared, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "20260101T000000Z-sft-x")
    folder.path.mkdir(parents=True)
    record = forecast.add_forecast(prepared).for_record()
    files.write_json(folder.manifest, {"stage": "sft", "backend": "open_instruct", **record})
    folder.console(1).write_text(OOM)
    point = conclude.finish(folder).point("memory")
    assert point.state == "oom"
    reason = str(point.detail["reason"])
    assert reason.startswith("planned: 85")
    assert "optimizer" in reason
    assert point.detail["help"]
