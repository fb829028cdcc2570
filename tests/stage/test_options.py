"""launch's own keys of a stage file -> `Options`, and everything wrong with them."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Write

from launcher.config import keys
from launcher.config.load import Config, load
from launcher.errors import Finding
from launcher.stage import options, stage
from launcher.stage.options import Batch, Options, Watch

LONG = "x" * 5000


def config(shape: str = "stage", **given: Any) -> Config:
    return Config(path=Path("a.yaml"), shape=shape, options=given, args={})  # type: ignore[arg-type]


def read(shape: str = "stage", **given: Any) -> Options:
    found, faults = options.read(config(shape, **given), "sft")
    assert faults == []
    return found


def fault(shape: str = "stage", **given: Any) -> Finding:
    _, faults = options.read(config(shape, **given), "sft", (), {"learning_rate"})
    (finding,) = faults
    assert (finding.severity, finding.layer) == ("error", "launch")
    assert len(finding.message) < 200
    return finding


READ: tuple[tuple[dict[str, Any], str, Any], ...] = (
    ({"deepspeed": False}, "deepspeed", None),
    ({"deepspeed": "none"}, "deepspeed_name", "none"),
    ({"mixed_precision": "bf16"}, "mixed_precision", "bf16"),
    ({"mixed_precision": False}, "mixed_precision", "no"),
    ({"batch": {"global": "128", "per_device": 16}}, "batch", Batch(total=128, per_device=16)),
    ({"batch": {"per_device": 4, "global": None}}, "batch", Batch(per_device=4)),
    ({"expect": {"packing": False}}, "expect", {"packing": "off"}),
    ({"expect": {"packing": True}}, "expect", {"packing": "on"}),
    ({"expect": {"packing": None}}, "expect", {"packing": "any"}),
    ({"probe": {}}, "probe", Watch()),
    ({"probe": {"within": "5", "isolation": False}}, "probe", Watch(within=5, isolation=False)),
    ({"probe": False}, "probe", None),
    ({"probe": "No"}, "probe", None),
    ({"on_violation": "warn"}, "on_violation", "warn"),
    ({"slurm": {"partition": "h100"}}, "slurm", {"partition": "h100"}),
)


def test_what_a_key_takes() -> None:
    for given, name, value in READ:
        assert getattr(read(**given), name) == value, given
    for value, gpus in ((8, 8), (0, 0), ("4", 4), (None, None)):
        assert read("wrapped", script="finetune.py", num_gpus=value).gpus == gpus
    # what a key does not take
    for given, key, help in FAULTS:
        found, name = fault(**given), next(iter(given))
        known = name in keys.KEYS
        assert found.code == (f"bad-{name.replace('_', '-')}" if known else "unknown-option")
        assert found.key == key
        assert help in (found.help or ""), given
    for value in (-1, 1.5, True, "x", "²", [8]):
        assert fault("wrapped", num_gpus=value).code == "bad-num-gpus"


FAULTS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"deepspeed": "zero2_fp32"}, "deepspeed", "did you mean `zero2_fp32_comm`?"),
    ({"deepspeed": "no/such.json"}, "deepspeed", "a path"),
    ({"deepspeed": LONG}, "deepspeed", "a path"),
    ({"mixed_precision": True}, "mixed_precision", "one of no"),
    ({"batch": 5}, "batch", ""),
    ({"batch": {"global": 0}}, "batch.global", ""),
    ({"batch": {"global": 1.5}}, "batch.global", ""),
    ({"batch": {"global": "9" * 5000}}, "batch.global", ""),
    ({"batch": {"total": 8}}, "batch.total", "global, per_device"),
    ({"expect": {"liger": "engagd"}}, "expect.liger", "engaged, off, any"),
    ({"expect": {"liger": {"a": 1}}}, "expect.liger", "engaged, off, any"),
    ({"expect": {"ligr": "off"}}, "expect.ligr", "did you mean `liger`?"),
    ({"expect": "liger"}, "expect", ""),
    ({"backend": "TRL"}, "backend", "did you mean `trl`?"),
    ({"backend": []}, "backend", "open_instruct, trl"),
    ({"name": ["x"]}, "name", ""),
    ({"on_hang": True}, "on_hang", "one of report, stop"),
    ({"probe": "light"}, "probe", ""),
    ({"probe": {"isolatoin": "off"}}, "probe.isolatoin", "did you mean `isolation`?"),
    ({"probe": {"within": 0}}, "probe.within", ""),
    ({"probe": {"isolation": "perhaps"}}, "probe.isolation", ""),
    ({"deepsped": 1}, "deepsped", "did you mean `deepspeed`?"),
    ({"learning_rate": 1}, "learning_rate", "write it under `args:`"),
    ({"num_gpus": 1}, "num_gpus", "--gpus"),
    ({"open_instruct": 1}, "open_instruct", "either `stage:` and `args:`"),
    ({"something": 1}, "something", "ours are stage, backend"),
)


def test_deepspeed_by_name_and_nothing_given() -> None:
    for name in keys.DEEPSPEED:
        found = read(deepspeed=name)
        assert found.deepspeed_name == name and found.deepspeed is not None
        assert "zero_optimization" in json.loads(found.deepspeed.read_text())
    assert read(stage="sft") == Options(stage="sft", backend="open_instruct")


def test_deepspeed_by_path(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = write("files/ds.json", "{}")
    here = write("here/ds2.json", "{}")
    there = write("checkout/configs/ds3.json", "{}")
    monkeypatch.chdir(here.parent)
    path = write("files/a.yaml", "stage: sft\ndeepspeed: ds.json\n")
    assert options.read(load(path), "sft")[0].deepspeed == beside
    assert options.read(load(path, ["deepspeed=ds2.json"]), "sft")[0].deepspeed == here
    checkout = options.read(
        load(path, ["deepspeed=configs/ds3.json"]), "sft", [tmp_path / "checkout"]
    )
    assert (checkout[0].deepspeed, checkout[0].deepspeed_name) == (there, "ds3")


def test_a_backend_that_is_none_is_held_against_no_other(write: Write) -> None:
    text = "backend: TRL\nargs:\n  dataset_name: d\n  max_steps: 3\n  eval_strategy: steps\n"
    judged = stage.judge(load(write("b.yaml", text), ()))
    assert {finding.code for finding in judged.findings} == {"bad-backend", "bad-stage"}


def test_stages_and_backends_that_a_file_names() -> None:
    for shape, given, name in (
        ("stage", {"stage": "dpo"}, "dpo"),
        ("wrapped", {"script": "open_instruct/finetune.py"}, "sft"),
        ("flat", {}, None),
    ):
        assert options.stage_of(config(shape, **given)) == name
        assert options.stage_fault(config(shape, **given)) is None
    # files that name no stage
    for shape, given, code, part in (
        ("stage", {}, "bad-stage", "`stage` is missing"),
        ("stage", {"stage": "grpo"}, "bad-stage", "`grpo` is not a stage"),
        ("stage", {"stage": {"a": 1}}, "bad-stage", "is not a stage"),
        ("flat", {"stage": "x"}, "bad-stage", "`x` is not a stage"),
        ("wrapped", {}, "bad-script", "`script` is missing"),
        ("wrapped", {"script": "grpo.py"}, "bad-script", "`grpo.py` is not a script"),
    ):
        found = options.stage_fault(config(shape, **given))
        assert found is not None and found.code == code and part in found.message
