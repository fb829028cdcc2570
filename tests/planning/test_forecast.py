"""`launch plan`: batch, memory, time and money for several counts of GPUs, and what is missing to say it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Write
from made_runs import made, manifest
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
TULU = str(CONFIGS / "tulu" / "sft_qwen7b_25pct.yaml")
ROWS = ("--row-tokens", "302:1104")
CARD = ("--gpu", "H100", "--gpu-memory", "80", "--price", "2.5")
# of files that expect both to be on, where a test turns one of them off
LAX = ("expect.liger=any", "expect.packing=any")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No GPUs, no earlier runs, no hub."""
    monkeypatch.setenv("LAUNCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("LAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(*words: str) -> dict[str, Any]:
    told = CliRunner().invoke(app, ["plan", *words, "--format", "json"], catch_exceptions=False)
    answer = json.loads(told.stdout)
    assert (told.exit_code, answer["ok"]) == (0, True)
    data: dict[str, Any] = {**answer["data"], "codes": [f["code"] for f in answer["findings"]]}
    return data


def refused(*words: str) -> LaunchError:
    told = CliRunner().invoke(app, ["plan", *words])
    assert isinstance(told.exception, LaunchError), told.output
    return told.exception


def test_the_measured_point_of_two_cards() -> None:
    """Qwen2.5-7B, two H200, ZeRO-2 with fp32 communication: 85.2 GiB, whatever the batch."""
    (two,) = planned(TULU, "--gpus", "2", *ROWS, "--gpu-memory", "139", "--price", "2.5", "--gpu", "H200",
                     "--rows", "100000")["gpus"]  # fmt: skip
    assert two["memory_gib"]["peak"] == pytest.approx(85.2, rel=0.05)
    assert (two["per_device"], two["accumulation"], two["global"]) == (16, 4, 128)
    assert two["fits"] is True
    assert two["steps"] == 2 * -(-100_000 // 128)
    assert two["tokens_per_step"] == pytest.approx(128 * 302, rel=0.01)
    assert two["cost"] == pytest.approx(two["hours"] * 2 * 2.5, rel=0.01)
    kinds = {k: v for k, v in two["memory_gib"].items() if k not in {"peak", "moment"}}
    assert sum(kinds.values()) == pytest.approx(two["memory_gib"]["peak"], abs=0.1)


TRL_RUN = """
stage: {stage}
backend: trl
deepspeed: none
batch: {{global: {rows}, per_device: {each}}}
args:
  model_name_or_path: Qwen/Qwen2.5-0.5B
  dataset_name: data
  max_length: 2048
  max_steps: 6
  gradient_checkpointing: true
  {more}
"""
LORA = "use_peft: true\n  lora_target_modules: [q_proj, k_proj, v_proj, o_proj]"


@pytest.mark.parametrize(
    ("stage", "each", "more", "rows", "gib"),
    [
        ("sft", 16, "use_liger_kernel: true", "301:1103", 10.306),
        ("sft", 8, LORA, "301:1103", 2.884),
        ("dpo", 8, "use_liger_kernel: true", "272:1027", 12.016),
    ],
)
def test_the_measured_points_of_trl(
    write: Write, stage: str, each: int, more: str, rows: str, gib: float
) -> None:
    """TRL 1.16 on one H200, fp32 weights under bf16 autocast (docs/evidence/h200.md)."""
    text = TRL_RUN.format(stage=stage, each=each, rows=2 * each, more=more)
    (one,) = planned(
        str(write("stage.yaml", text)), "--gpus", "1", "--row-tokens", rows, "--gpu-memory", "139"
    )["gpus"]
    assert one["memory_gib"]["peak"] == pytest.approx(gib, rel=0.07 if "peft" in more else 0.03)


@pytest.mark.parametrize(("gpus", "gib"), [(2, 71.45), (4, 43.08)])
def test_the_measured_points_of_packs_under_zero3(gpus: int, gib: float) -> None:
    """16 packs of 2,048 tokens a card, Qwen2.5-7B: two H200 and four H100 (docs/benchmarks.md)."""
    recipe = str(CONFIGS / "bench" / "hand_recipe_trl.yaml")
    words = ("deepspeed=zero3", "packing=true", "expect.packing=isolated", "batch.per_device=16")
    (one,) = planned(
        recipe, *words, f"batch.global={64 * gpus}", "--gpus", str(gpus),
        "--row-tokens", "302:1114", "--rows", "4000", "--gpu-memory", "139",
    )["gpus"]  # fmt: skip
    assert one["memory_gib"]["peak"] == pytest.approx(gib, rel=0.01)


def test_rows_that_are_said_count_before_those_that_lie_here(write: Write) -> None:
    chat = (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    data = write("chats.jsonl", chat * 1_000)
    words = (TULU, f"dataset_mixer_list=[{data},1.0]", "--gpus", "2", *ROWS)
    for more, epochs_of_steps in (((), 8), (("--rows", "5000"), 40)):
        (one,) = planned(*words, *more)["gpus"]
        assert one["steps"] == 2 * epochs_of_steps
    (one,) = planned(*words, "max_train_steps=3", "--rows", "5000")["gpus"]
    assert one["steps"] == 3


def test_a_half_empty_card_is_a_finding() -> None:
    llama = str(CONFIGS / "llama" / "llama31_8b_sft_10pct.yaml")
    told = planned(llama, *LAX, "batch.per_device=1", "--gpus", "8", "--row-tokens", "264:2048",
                   "--gpu-memory", "80", "--fit")  # fmt: skip
    (eight,) = told["gpus"]
    assert eight["memory_gib"]["peak"] < 48
    assert "half-empty" in told["codes"]
    assert eight["fit"]["per_device"] > 1
    assert eight["fit"]["per_device"] * eight["fit"]["accumulation"] * 8 == eight["global"]
    assert eight["fit"]["peak_gib"] <= 80 * 0.92


def test_why_shows_every_part_with_its_formula() -> None:
    (one,) = planned(TULU, "--gpus", "2", *ROWS, "--why")["gpus"]
    fullest = one["why"][0]
    assert fullest["gib"] == pytest.approx(one["memory_gib"]["peak"], abs=0.01)
    assert all(part["formula"] for part in fullest["parts"])
    told = CliRunner().invoke(app, ["plan", TULU, "--gpus", "2", *ROWS, "--why"])
    assert "Adam's two states" in told.stdout
    assert "launcher/artifacts/shapes.json, Qwen/Qwen2.5-7B" in told.stdout


def test_trl_packs_rows_into_full_ones_before_it_counts_batches(write: Write) -> None:
    path = str(write(
        "t.yaml",
        "stage: sft\nbackend: trl\nbatch: {global: 8, per_device: 4}\nargs:\n"
        "  model_name_or_path: Qwen/Qwen2.5-0.5B\n  dataset_name: some/set\n  max_length: 1024\n"
        "  num_train_epochs: 1\n",
    ))  # fmt: skip
    words = ("--gpus", "1", "--row-tokens", "128:1024", "--rows", "8000")
    (plain,) = planned(path, *words)["gpus"]
    (packed,) = planned(path, "packing=true", *words)["gpus"]
    assert (plain["steps"], packed["steps"]) == (1000, 125)
    assert plain["tokens_per_step"] == 8 * 128
    assert (packed["tokens_per_step"], packed["padding_share"]) == (8 * 1024, 0)
    (padded,) = planned(path, *words[:2], "--row-tokens", "1024")["gpus"]
    assert packed["memory_gib"]["peak"] == pytest.approx(padded["memory_gib"]["peak"], rel=0.01)
    (fixed,) = planned(path, "packing=true", "max_steps=7", *words)["gpus"]
    assert fixed["steps"] == 7


TRL_ON_TWO = """
stage: {stage}
backend: trl
deepspeed: {deepspeed}
batch: {{global: 64, per_device: 8}}
args:
  model_name_or_path: {model}
  dataset_name: data
  {more}
"""


def trl_peak(write: Write, more: str = "max_length: 1024", **given: str) -> float:
    text = TRL_ON_TWO.format(
        **{"stage": "sft", "deepspeed": "none", "model": "Qwen/Qwen2.5-1.5B", **given}, more=more
    )
    (two,) = planned(str(write("stage.yaml", text)), "--gpus", "2", *ROWS)["gpus"]
    return float(two["memory_gib"]["peak"])


def test_deepspeed_casts_what_trl_has_loaded_in_32_bits(write: Write) -> None:
    """deepspeed/runtime/engine.py::DeepSpeedEngine.flops_profiler_enabled[self.autotuning_enabled]: the loaded type
    does not matter then.
    """
    for engine in ("zero2", "zero3"):
        wide = trl_peak(write, deepspeed=engine)
        assert wide == trl_peak(write, "dtype: bfloat16", deepspeed=engine)
    assert trl_peak(write, "dtype: bfloat16") < trl_peak(write)
    # what trl hands to the model counts
    whole = trl_peak(write)
    assert trl_peak(write, "model_init_kwargs: {num_hidden_layers: 4}") < whole
    half = trl_peak(write, "model_init_kwargs: {dtype: bfloat16}")
    assert half == trl_peak(write, "dtype: bfloat16")


def test_liger_loads_weights_in_the_type_that_the_config_says(place: Path) -> None:
    """Without DeepSpeed finetune.py keeps it, and names a type only where it does without Liger."""
    folder = place / "model"
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    }  # fmt: skip
    words = (TULU, *LAX, f"model_name_or_path={folder}", "deepspeed=none", "--gpus", "1", *ROWS)

    def peak(liger: str, **more: str) -> float:
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        (one,) = planned(*words, f"use_liger_kernel={liger}")["gpus"]
        return float(one["memory_gib"]["peak"])

    assert peak("true", torch_dtype="float32") > 1.6 * peak("true", torch_dtype="bfloat16")
    assert peak("false", torch_dtype="float32") == peak("false", dtype="bfloat16") == peak("false")
    (folder / "config.json").write_text(json.dumps(config))
    error = refused(*words, "use_liger_kernel=true")
    assert "has no `torch_dtype`" in error.findings[0].message


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("optim: adafactor", "`optim: adafactor`"),
        ("attn_implementation: eager", "eager attention"),
        ("use_peft: true\n  use_dora: true", "more than LoRA"),
        ("use_peft: true\n  lora_target_modules: [q_proj, c_attn]", "LoRA on `c_attn`"),
        ("use_peft: true\n  model_name_or_path: allenai/OLMo-2-0425-1B", "no `lora_target_modules`"),
        ("model_init_kwargs: {quantization_config: {load_in_4bit: true}}", "quantised"),
    ],
)  # fmt: skip
def test_what_is_not_described_of_trl_is_refused(write: Write, more: str, said: str) -> None:
    text = TRL_ON_TWO.format(stage="sft", deepspeed="none", model="Qwen/Qwen2.5-1.5B", more=more)
    if "model_name_or_path" in more:
        text = text.replace("  model_name_or_path: Qwen/Qwen2.5-1.5B\n", "")
    error = refused(str(write("stage.yaml", text)), "--gpus", "2", *ROWS)
    assert {f.code for f in error.findings} <= {"unknown-memory", "unknown-shape"}
    assert said in error.findings[0].message


@pytest.mark.parametrize(
    ("every", "interval", "lost_gpu_hours"),
    [("367", 367, 0.72), ("epoch", 1835, 3.62), ("null", None, 7.24)],
)
def test_what_an_interruption_costs(
    every: str, interval: int | None, lost_gpu_hours: float
) -> None:
    """The run of the next test: 3,670 steps in 0.91 h on 8 GPUs, in two epochs."""
    words = (TULU, *CARD, "--row-tokens", "290:1100", "--gpus", "8", f"checkpointing_steps={every}")
    (one,) = planned(*words)["gpus"]
    risk = one["interruption"]
    assert (risk["interval"], risk["lost_gpu_hours"]) == (
        interval,
        pytest.approx(lost_gpu_hours, abs=0.05),
    )


def test_a_long_run_without_checkpoints_is_warned_of() -> None:
    trl = str(CONFIGS / "bench" / "hand_recipe_trl.yaml")
    for speed, warned in (("100", True), ("100000", False)):
        words = (trl, *LAX, "--gpus", "8", "--row-tokens", "264:2048", "--rows", "10000")
        told = planned(*words, "--tokens-per-second", speed)
        assert ("no-checkpoints" in told["codes"]) == warned


def test_steps_hours_and_cost_of_a_known_hub_set() -> None:
    """A quarter of allenai/tulu-3-sft-mixture, 939,343 rows on its card, 128 a step, twice."""
    words = (*CARD, "--row-tokens", "290:1100", "--gpus", "8")
    (one,) = planned(TULU, *words)["gpus"]
    assert (one["steps"], one["hours"], one["cost"]) == (3670, 0.91, 18.11)
    other = planned(TULU, "dataset_mixer_list_splits=[validation]", *words)
    assert other["gpus"][0]["steps"] is None
    # a price without a time is said
    told = planned(TULU, "--gpus", "2", *ROWS, "--price", "2")
    assert (told["gpus"][0]["cost"], told["codes"]) == (None, ["unknown-cost"])


def test_the_reference_takes_time_in_every_step_or_beforehand(write: Write) -> None:
    path = str(write(
        "t.yaml",
        "stage: dpo\nbackend: trl\nbatch: {global: 8, per_device: 2}\nargs:\n"
        "  model_name_or_path: Qwen/Qwen2.5-7B\n  dataset_name: some/set\n  num_train_epochs: 3\n"
        "  use_peft: true\n",
    ))  # fmt: skip
    words = ("--gpus", "1", *ROWS, "--gpu", "H100", "--rows", "80000")
    (beside,) = planned(path, *words)["gpus"]
    (before,) = planned(path, "precompute_ref_log_probs=true", *words)["gpus"]
    # three epochs with a third more each, against three and a third
    assert beside["hours"] / before["hours"] == pytest.approx(4 / (3 + 1 / 3), rel=0.01)
    (few,) = planned(path, "max_steps=10", *words)["gpus"]
    (many,) = planned(path, "max_steps=10", "precompute_ref_log_probs=true", *words)["gpus"]
    assert many["hours"] > 100 * few["hours"]


@pytest.mark.parametrize(
    ("more", "deepspeed", "checkpoint", "kept"),
    [
        # the adapter with two moments
        ("use_peft: true\n  lora_r: 1024", "none", 3, 2),
        ("use_peft: true\n  lora_r: 1024\n  save_only_model: true", "none", 1, 2),
        # one is left when the model is saved, which is smaller than the one that has gone
        ("dtype: bfloat16\n  save_total_limit: 1", "zero2", 8, 1.875),
    ],
)
def test_what_trl_saves(
    write: Write, more: str, deepspeed: str, checkpoint: float, kept: float
) -> None:
    text = TRL_ON_TWO.format(
        stage="sft", deepspeed=deepspeed, model="Qwen/Qwen2.5-1.5B",
        more=f"max_steps: 100\n  save_steps: 50\n  {more}",
    )  # fmt: skip
    path = str(write("stage.yaml", text))
    disk = planned(path, "--gpus", "2", "--rows", "6400", *ROWS)["gpus"][0]["disk_gib"]
    assert disk["checkpoint"] == pytest.approx(checkpoint * disk["model"], rel=0.1)
    assert disk["most"] == pytest.approx(kept * disk["checkpoint"] + disk["model"], rel=0.01)


def test_an_earlier_run_on_such_cards_gives_the_speed(place: Path) -> None:
    args = {
        name: {"value": value, "origin": "x"}
        for name, value in {
            "model_name_or_path": "Qwen/Qwen2.5-7B", "packing": True, "use_liger_kernel": True,
            "use_lora": False,
        }.items()
    }  # fmt: skip
    told = manifest(
        stage="sft", backend="open_instruct", args=args, machine={"gpus": ["NVIDIA H200, 143771 MiB"]},
        plan={"gpus": 4, "nodes": 1, "steps": 9},
    )  # fmt: skip
    run = made(place / "runs" / "20260101T000000Z-sft-a", told=told)
    files.write_json(run / "verdict.json", {"metrics": {"tokens_per_second": 40_000}})
    words = (TULU, "--gpus", "2", *ROWS, "--gpu", "H200", "--rows", "1000")
    (two,) = planned(*words)["gpus"]
    assert (two["tokens_per_second"], "20260101T000000Z" in two["speed_source"]) == (20_000, True)
    (two,) = planned(TULU, *LAX, "use_liger_kernel=false", *words[1:])["gpus"]
    assert two["speed_source"].startswith("estimated: ")
    (two,) = planned(*words, "--tokens-per-second", "123")["gpus"]
    assert two["tokens_per_second"] == 123


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (("--gpus", "2", "--gpu-memory", "80", "--fit"), InvalidConfig, "unknown-lengths"),
        (("model_name_or_path=no/such", "--gpus", "2", *ROWS), InvalidConfig, "unknown-shape"),
        (("--gpus", "3", *ROWS), InvalidConfig, "impossible-batch"),
        (("cache_dataset_only=true", "--gpus", "2", *ROWS), InvalidConfig, "caches-only"),
        (("--gpus", "0", "--price", "2", *ROWS), UsageError, "price-without-gpus"),
        (("--gpus", "two", *ROWS), UsageError, "bad-gpus"),
        (("--gpus", "2", "--row-tokens", "9:3"), UsageError, "row-tokens"),
        (("--gpus", "2", *ROWS, "--attention", "magic"), UsageError, "bad-attention"),
        (("--gpus", "2", *ROWS, "--gpu", "Voodoo 2"), InvalidConfig, "unknown-device"),
        (("--gpus", "2", *ROWS, "--price", "0"), UsageError, "bad-price"),
        (("--gpus", "2", *ROWS, "--fit"), UsageError, "fit-without-memory"),
        (("--gpus", "1,8", *ROWS, "--tokens-per-second", "9"), UsageError, "speed-of-several"),
    ],
)
def test_what_is_missing_is_said(words: tuple[str, ...], kind: type, code: str) -> None:
    error = refused(TULU, *words)
    assert isinstance(error, kind)
    assert code in [finding.code for finding in error.findings]


def test_without_row_lengths_batch_and_static_memory_are_planned() -> None:
    (one, eight) = planned(TULU, "--gpus", "1,8", "--gpu-memory", "80")["gpus"]
    (known,) = planned(TULU, "--gpus", "8", "--gpu-memory", "80", *ROWS)["gpus"]
    for name in ("per_device", "accumulation", "global", "steps", "disk_gib"):
        assert eight[name] == known[name]
    assert eight["memory_gib"]["weights"] == known["memory_gib"]["weights"]
    assert eight["memory_gib"]["activations"] is None
    # too much is known without activations, enough is not
    assert (one["fits"], eight["fits"], eight["tokens_per_step"], eight["hours"]) == (
        False, None, None, None,
    )  # fmt: skip


def test_a_count_that_cannot_be_costs_the_others_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", str(TULU), "--gpus", "2,3,4", *ROWS]) == 3
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["GPUs", "2", "4"]
    assert "error[impossible-batch]" in err and "on 3 device(s)" in err
    assert main(["plan", str(TULU), "--gpus", "2,3,4", *ROWS, "--format", "json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], len(told["data"]["gpus"])) == (False, 2)
    assert [one["code"] for one in told["findings"] if one["severity"] == "error"] == [
        "impossible-batch"
    ]


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
PAIRS = ("--row-tokens", "900:4096")
PACKED = ("packing=true", "batch.per_device=1", "max_seq_length=16384")


def answered(*words: str) -> dict[str, Any]:
    told = CliRunner().invoke(app, ["plan", *words, "--format", "json"], catch_exceptions=False)
    answer: dict[str, Any] = json.loads(told.stdout)
    return answer


def found(answer: dict[str, Any], code: str) -> list[dict[str, Any]]:
    return [one for one in answer["findings"] if one["code"] == code]


def test_what_the_split_says_is_said_once_for_all_counts_that_agree(write: Write) -> None:
    path = str(write("base.yaml", OLMO))
    (one,) = found(answered(path, *PACKED, "--gpus", "8", *PAIRS), "accumulation-packed")
    assert (one["severity"], one["message"][:14]) == ("warning", "with `packing`")
    told = found(answered(path, *PACKED, "--gpus", "1,8", *PAIRS), "accumulation-packed")
    assert [one["message"].partition(" with")[0] for one in told] == ["1 GPU(s):", "8 GPU(s):"]
    # what is set for any number of GPUs is no news here
    assert planned(path, "--gpus", "1,8", *PAIRS)["codes"] == ["rows-dropped"]


def test_a_limit_of_no_steps_trains_none(write: Write) -> None:
    card = ("--gpus", "8", "--gpu", "H100", "--rows", "100000")
    dpo = (str(CONFIGS / "tulu" / "dpo_qwen7b.yaml"), "--shape", "Qwen/Qwen2.5-7B", *ROWS)
    olmo = (str(write("base.yaml", OLMO)), *PAIRS)
    # how many packed rows fill a step their lengths decide
    told = planned(*olmo, "packing=true", "--gpus", "8", "--rows", "20")
    assert (told["gpus"][0]["steps"], "no-steps" in told["codes"]) == (0, True)
    for words in ((TULU, *ROWS), dpo, olmo):
        told = planned(*words, "max_train_steps=0", *card)
        (eight,), codes = told["gpus"], told["codes"]
        assert (eight["steps"], codes.count("no-steps")) == (0, 1)
        # the model is saved, and dpo.py writes a checkpoint before the first step
        first = eight["disk_gib"]["checkpoint"] if words is olmo else 0
        assert eight["disk_gib"]["most"] == pytest.approx(
            eight["disk_gib"]["model"] + first, abs=0.1
        )
        assert eight["hours"] < planned(*words, *card)["gpus"][0]["hours"] / 3


def mended(*words: str) -> str:
    (one,) = found(answered(*words), "out-of-memory")
    return str(one["help"])


def test_where_nothing_fits_that_is_said() -> None:
    help = mended(TULU, "--gpus", "1", *ROWS, "--gpu-memory", "2")
    assert help.startswith("no setting that launch could change makes it fit: ") and help.endswith(
        "a smaller model"
    )
    # what would fit is tried before it is named
    alone = mended(TULU, "deepspeed=zero2", "--gpus", "1", *ROWS, "--gpu-memory", "80")
    assert alone.startswith("this fits: `deepspeed: zero3_offload` (")
    assert "`--gpus 4`" in alone
    assert "`deepspeed: zero3`" not in alone and "per_device" not in alone
    (four,) = planned(TULU, "deepspeed=zero2", "--gpus", "4", *ROWS, "--gpu-memory", "80")["gpus"]
    assert four["fits"] is True and f"({four['memory_gib']['peak']:.1f} GiB)" in alone
    # LoRA under ZeRO-3 without reentrant checkpointing: finetune.py fails in its first backward pass.
    large = (TULU, *LAX, "model_name_or_path=Qwen/Qwen2.5-32B", "use_lora=true", "deepspeed=none")
    words = ("--gpus", "4", "--row-tokens", "2000", "--gpu-memory", "70")
    assert "zero3" not in mended(*large, "gradient_checkpointing=true", *words)
    plain = mended(*large, "gradient_checkpointing=false", *words)
    assert "`deepspeed: zero3" in plain and "checkpointing" not in plain
    # where a single row fits packing goes
    llama = str(CONFIGS / "llama" / "llama31_8b_sft_10pct.yaml")
    words = ("--gpus", "2", "--row-tokens", "9000:16384", "max_seq_length=16384")
    help = mended(llama, *words, "--gpu-memory", "80")
    gone = "`packing: false` and `expect: {packing: off}`"
    assert help.startswith(f"this fits: `per_device: 1` with {gone} (")
    assert "`per_device: 1` with `packing: false` (" in mended(
        llama, "expect.packing=any", *words, "--gpu-memory", "80"
    )
    args = ["plan", llama, *words, "--gpu-memory", "80", "--fit"]
    fit = CliRunner().invoke(app, args).stdout
    assert f"--fit: per device 1, accumulation 64 with {gone}: " in fit
    # and so it does
    (one,) = planned(llama, *words, "--gpu-memory", "80", "batch.per_device=1", "packing=false",
                     "expect.packing=off")["gpus"]  # fmt: skip
    assert one["fits"] is True and f"({one['memory_gib']['peak']:.1f} GiB)" in help


def test_packed_rows_of_dpo_py_are_mended_by_what_shortens_them(write: Write) -> None:
    path = str(write("base.yaml", OLMO))
    help = mended(path, *PACKED, "--gpus", "8", *PAIRS, "--gpu-memory", "80")
    assert help.startswith("this fits: `activation_memory_budget: 0.1`")
    assert "per_device" not in help
    one = mended(path, *PACKED, "--gpus", "1", *PAIRS, "--gpu-memory", "80")
    assert one.startswith("this fits: `activation_memory_budget: 0.1` with `--gpus 4` (")
    padded = mended(path, "--gpus", "8", *PAIRS, "--gpu-memory", "80")
    assert padded.startswith("this fits: `per_device: 1` (")


def test_fit_says_so_where_nothing_fits_and_where_nothing_is_larger() -> None:
    small = (TULU, "--gpus", "1", *ROWS, "--gpu-memory", "24")
    for more, codes in ((("--fit",), ["nothing-fits"]), ((), [])):
        told = answered(*small, *more)
        assert told["data"]["gpus"][0]["fit"] is None
        assert [one["code"] for one in told["findings"] if one["severity"] == "note"] == codes
    (note,) = found(answered(*small, "--fit"), "nothing-fits")
    assert note["message"].startswith("1 GPU(s): --fit: no split of the batch fits; 156.1 GiB")
    largest = CliRunner().invoke(
        app, ["plan", TULU, "--gpus", "8", *ROWS, "--gpu-memory", "80", "--fit"]
    )
    assert "\n  --fit: per device 16, accumulation 1: " in largest.stdout


@pytest.mark.parametrize("words", [(), ("--why",), ("--fit",)], ids=" ".join)
def test_a_row_of_a_plan_is_read_by_the_type_that_writes_it(words: tuple[str, ...]) -> None:
    (row,) = planned(TULU, "--gpus", "8", *ROWS, *CARD, *words, *LAX)["gpus"]
    left_out: list[Omission] = []
    again = codec.read_record(PlanRecord, row, left_out).as_json()
    # the moment of the peak is a text among numbers
    assert {fault.where for fault in left_out} <= {"memory_gib.moment"}
    for memory in (row["memory_gib"], again["memory_gib"]):
        (memory or {}).pop("moment", None)
    assert json.loads(json.dumps(again)) == row
    assert list(again) == list(row)


def test_of_the_cpu_batch_steps_and_disk_are_planned() -> None:
    plain = ("use_liger_kernel=false", "expect.liger=off")
    told = planned(
        TULU, *plain, "--gpus", "0,8", *ROWS, "--rows", "1000", "--gpu-memory", "80", "--why"
    )
    cpu, eight = told["gpus"]
    assert (cpu["gpus"], cpu["per_device"], cpu["accumulation"], cpu["steps"]) == (0, 16, 8, 16)
    assert (cpu["memory_gib"], cpu["fits"], cpu["hours"]) == (None, None, None)
    assert cpu["disk_gib"]["most"] > 0 and eight["fits"] is True
    assert {"unknown-memory", "deepspeed-left-out"} <= set(told["codes"])
    shown = CliRunner().invoke(app, ["plan", TULU, *plain, "--gpus", "0", *ROWS]).stdout
    row = next(line.split() for line in shown.splitlines() if "CPU" in line)
    assert row == ["CPU", "16", "8", "128", "3,670", "38,656", row[-1]]


OOM = (
    "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "finetune.py", line 900, in main\n'
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 1 has a total "
    "capacity of 79.00 GiB of which 2.00 GiB is free.\n"
)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Two cards of 80 GB, rows of a known length, nothing started."""
    known = replace(parse("302:1104"), rows=235_000)
    monkeypatch.setattr(forecast, "row_lengths", lambda *_: known)
    cards = [
        Gpu(index=n, uuid=f"GPU-{n}", name="NVIDIA H100 80GB HBM3", memory_mib=81559, used_mib=0,
            driver="580")
        for n in range(2)
    ]  # fmt: skip
    told = prepare.prepare(Request(stage="sft", config=Path(TULU), gpus=2), Scope.PLAN)
    devices = Devices(slots=tuple(Slot(str(g.index), g) for g in cards))
    return replace(told, start=replace(told.start, devices=devices))


def test_what_does_not_fit_is_said_before_a_gpu_works(prepared: Prepared) -> None:
    told = forecast.with_forecast(prepared)
    assert told.forecast is not None
    assert (told.forecast.memory_gib or {})["peak"] == pytest.approx(85.2, rel=0.05)
    assert told.forecast.fits is False
    assert "out-of-memory" in {one.code for one in told.warnings}
    # said once
    assert len(forecast.with_forecast(told).warnings) == len(told.warnings)


def test_the_plan_stands_beside_what_was_measured(prepared: Prepared, tmp_path: Path) -> None:
    record = forecast.with_forecast(prepared).for_record()
    assert record["plan"]["per_device"] == prepared.plan.per_device
    (tmp_path / "run.json").write_text(json.dumps({"stage": "sft", **record}))
    planned = series.planned_figures(series.load_run(tmp_path))
    assert planned["peak_gib"] == pytest.approx(85.2, rel=0.05)
    assert planned["tokens_per_step"] == pytest.approx(128 * 302, rel=0.02)
    assert planned["hours"] is not None and planned["steps"] == 2 * -(-939_343 // 4 // 128)


def test_out_of_memory_is_explained_by_the_plan(prepared: Prepared, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "20260101T000000Z-sft-x")
    folder.path.mkdir(parents=True)
    planned = forecast.with_forecast(prepared).for_record()
    record = {"stage": "sft", "backend": "open_instruct", **planned}
    folder.manifest.write_text(json.dumps(record))
    folder.console(1).write_text(OOM)
    point = conclude.finish(folder).point("memory")
    assert point.state == "oom"
    assert str(point.detail["reason"]).startswith("planned: 85")
    assert "optimizer" in str(point.detail["reason"]) and point.detail["help"]
