"""launch's own keys of a stage file -> `Options`, and everything wrong with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Write

from launcher.config import keys
from launcher.config.load import Config, load
from launcher.errors import Finding
from launcher.stage import options, stage
from launcher.stage.options import Batch, Options, Watch

LONG = "x" * 5000


def config_of(text: str, shape: Any = "stage") -> Config:
    """A stage file of that shape, `text` without its arguments."""
    content = yaml.safe_load(text) or {}
    return Config(path=Path("a.yaml"), shape=shape, options=content, args={})


def read(text: str, shape: str = "stage") -> Options:
    read_options, findings = options.read_stage_options(config_of(text, shape), "sft")
    assert findings == []
    return read_options


def refuse(text: str, shape: str = "stage") -> Finding:
    """The one error about the options of a file."""
    _, findings = options.read_stage_options(config_of(text, shape), "sft", None, {"learning_rate"})
    (finding,) = findings
    assert (finding.severity, finding.layer) == ("error", "launch")
    assert len(finding.message) < 200
    return finding


@pytest.mark.parametrize(
    "text, name, value",
    [
        ("deepspeed: false", "deepspeed", None),
        ("deepspeed: none", "deepspeed_name", "none"),
        ("mixed_precision: bf16", "mixed_precision", "bf16"),
        ("mixed_precision: no", "mixed_precision", "no"),
        ("batch: {global: '128', per_device: 16}", "batch", Batch(total=128, per_device=16)),
        ("batch: {per_device: 4, global: null}", "batch", Batch(per_device=4)),
        ("expect: {packing: false}", "expect", {"packing": "off"}),
        ("expect: {packing: true}", "expect", {"packing": "on"}),
        ("expect: {packing: null}", "expect", {"packing": "any"}),
        ("probe: {}", "probe", Watch()),
        ("probe: {within: '5', isolation: off}", "probe", Watch(within=5, isolation=False)),
        ("probe: false", "probe", None),
        ("probe: 'No'", "probe", None),
        ("on_violation: warn", "on_violation", "warn"),
        ("slurm: {partition: h100}", "slurm", {"partition": "h100"}),
    ],
)
def test_what_a_key_takes(text: str, name: str, value: object) -> None:
    assert getattr(read(text), name) == value


@pytest.mark.parametrize(
    "text, key, help",
    [
        ("deepspeed: zero2_fp32", "deepspeed", "did you mean `zero2_fp32_comm`?"),
        ("deepspeed: no/such.json", "deepspeed", "a path"),
        (f"deepspeed: {LONG}", "deepspeed", "a path"),
        ("mixed_precision: true", "mixed_precision", "one of no"),
        ("batch: 5", "batch", ""),
        ("batch: {global: 0}", "batch.global", ""),
        ("batch: {global: 1.5}", "batch.global", ""),
        (f"batch: {{global: '{'9' * 5000}'}}", "batch.global", ""),
        ("batch: {total: 8}", "batch.total", "global, per_device"),
        ("expect: {liger: engagd}", "expect.liger", "engaged, off, any"),
        ("expect: {liger: {a: 1}}", "expect.liger", "engaged, off, any"),
        ("expect: {ligr: off}", "expect.ligr", "did you mean `liger`?"),
        ("expect: liger", "expect", ""),
        ("backend: TRL", "backend", "did you mean `trl`?"),
        ("backend: []", "backend", "open_instruct, trl"),
        ("name: [x]", "name", ""),
        ("on_hang: true", "on_hang", "one of report, stop"),
        ("probe: light", "probe", ""),
        ("probe: {isolatoin: off}", "probe.isolatoin", "did you mean `isolation`?"),
        ("probe: {within: 0}", "probe.within", ""),
        ("probe: {isolation: perhaps}", "probe.isolation", ""),
    ],
    ids=lambda text: text[:40],
)
def test_a_value_that_a_key_does_not_take(text: str, key: str, help: str) -> None:
    finding = refuse(text)
    name = text.partition(":")[0]
    assert finding.code == f"bad-{name.replace('_', '-')}"
    assert finding.key == key
    assert help in str(finding.help)


@pytest.mark.parametrize(
    "name, help",
    [
        ("deepsped", "did you mean `deepspeed`?"),
        ("learning_rate", "write it under `args:`"),
        ("num_gpus", "--gpus"),
        ("open_instruct", "either `stage:` and `args:`"),
        ("something", "ours are stage, backend"),
    ],
)
def test_an_unknown_key(name: str, help: str) -> None:
    finding = refuse(f"{name}: 1")
    assert finding.code == "unknown-option"
    assert finding.key == name
    assert help in str(finding.help)


@pytest.mark.parametrize("number, gpus", [("8", 8), ("0", 0), ("'4'", 4), ("null", None)])
def test_the_gpus_of_a_wrapped_file(number: str, gpus: int | None) -> None:
    assert read(f"{{script: finetune.py, num_gpus: {number}}}", "wrapped").gpus == gpus


@pytest.mark.parametrize("number", ["-1", "1.5", "true", "x", "²", "[8]"])
def test_gpus_that_are_no_number(number: str) -> None:
    assert refuse(f"num_gpus: {number}", "wrapped").code == "bad-num-gpus"


@pytest.mark.parametrize("name", keys.DEEPSPEED)
def test_deepspeed_by_name(name: str) -> None:
    sharded = read(f"deepspeed: {name}")
    assert sharded.deepspeed_name == name
    assert sharded.deepspeed is not None
    assert "zero_optimization" in json.loads(sharded.deepspeed.read_text())


def test_a_file_without_options() -> None:
    assert read("stage: sft") == Options(stage="sft", backend="open_instruct")


def test_deepspeed_by_path(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = write("files/ds.json", "{}")
    here = write("here/ds2.json", "{}")
    there = write("checkout/configs/ds3.json", "{}")
    path = write("files/a.yaml", "stage: sft\ndeepspeed: ds.json\n")
    monkeypatch.chdir(here.parent)

    def read_file(*overrides: str) -> Options:
        return options.read_stage_options(load(path, overrides), "sft", tmp_path / "checkout")[0]

    assert read_file().deepspeed == beside
    assert read_file("deepspeed=ds2.json").deepspeed == here
    in_checkout = read_file("deepspeed=configs/ds3.json")
    assert in_checkout.deepspeed == there
    assert in_checkout.deepspeed_name == "ds3"


def test_arguments_are_not_judged_where_the_backend_is_unknown(write: Write) -> None:
    text = "backend: TRL\nargs:\n  dataset_name: d\n  max_steps: 3\n  eval_strategy: steps\n"
    judged = stage.judge_stage_file(load(write("b.yaml", text), ()))
    assert {finding.code for finding in judged.findings} == {"bad-backend", "bad-stage"}


@pytest.mark.parametrize(
    "shape, text, name",
    [
        ("stage", "stage: dpo", "dpo"),
        ("wrapped", "script: open_instruct/finetune.py", "sft"),
        ("flat", "", None),
    ],
)
def test_the_stage_of_a_file(shape: str, text: str, name: str | None) -> None:
    config = config_of(text, shape)
    assert options.find_stage(config) == name
    assert options.find_stage_fault(config) is None


@pytest.mark.parametrize(
    "shape, text, code, message",
    [
        ("stage", "", "bad-stage", "`stage` is missing"),
        ("stage", "stage: grpo", "bad-stage", "`grpo` is not a stage"),
        ("stage", "stage: {a: 1}", "bad-stage", "is not a stage"),
        ("flat", "stage: x", "bad-stage", "`x` is not a stage"),
        ("wrapped", "", "bad-script", "`script` is missing"),
        ("wrapped", "script: grpo.py", "bad-script", "`grpo.py` is not a script"),
    ],
)
def test_a_file_that_names_no_stage(shape: str, text: str, code: str, message: str) -> None:
    finding = options.find_stage_fault(config_of(text, shape))
    assert finding is not None
    assert finding.code == code
    assert message in finding.message
