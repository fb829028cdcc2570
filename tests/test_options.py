"""launch's own keys of a stage file -> `Options`, and everything wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Write

from launcher import keys, options, stage
from launcher.backends import BACKENDS
from launcher.config import Config, load
from launcher.errors import Finding
from launcher.options import Batch, Options


def config(shape: str = "stage", **given: Any) -> Config:
    return Config(path=Path("a.yaml"), shape=shape, options=given, args={})  # type: ignore[arg-type]


def read(shape: str = "stage", **given: Any) -> Options:
    found, faults = options.read(config(shape, **given), "sft")
    assert faults == []
    return found


def fault(shape: str = "stage", **given: Any) -> Finding:
    _, faults = options.read(config(shape, **given), "sft")
    (finding,) = faults
    assert (finding.severity, finding.layer) == ("error", "launch")
    assert finding.file == "a.yaml" and finding.line == 1
    return finding


def test_nothing_given() -> None:
    assert read(stage="sft") == Options(stage="sft", backend="open_instruct")


@pytest.mark.parametrize("name", keys.DEEPSPEED)
def test_deepspeed_by_name_ships_with_the_package(name: str) -> None:
    found = read(deepspeed=name)
    assert found.deepspeed_name == name
    assert found.deepspeed is not None
    assert "zero_optimization" in json.loads(found.deepspeed.read_text())


@pytest.mark.parametrize("value", [None, False, "none"])
def test_no_deepspeed(value: Any) -> None:
    found = read(deepspeed=value)
    assert (found.deepspeed, found.deepspeed_name) == (None, "none")


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
    absolute = options.read(load(path, [f"deepspeed={there}"]), "sft")
    assert absolute[0].deepspeed == there


@pytest.mark.parametrize(
    "value", ["zero4", "no/such.json", "x" * 5000, "~nobody-here/x", True, 2, ["a"], {"a": 1}]
)
def test_deepspeed_that_is_not_there(value: Any) -> None:
    found = fault(deepspeed=value)
    assert found.code == "bad-deepspeed"
    assert len(found.message) < 200


def test_deepspeed_nearly_spelt() -> None:
    assert fault(deepspeed="zero2_fp32").help == "did you mean `zero2_fp32_comm`?"


@pytest.mark.parametrize(
    ("value", "meant"), [("bf16", "bf16"), (False, "no"), ("no", "no"), (None, None)]
)
def test_mixed_precision(value: Any, meant: str | None) -> None:
    assert read(mixed_precision=value).mixed_precision == meant


@pytest.mark.parametrize("value", ["fp32", True, ["no"], {}])
def test_bad_mixed_precision(value: Any) -> None:
    assert fault(mixed_precision=value).code == "bad-mixed-precision"


@pytest.mark.parametrize(
    ("value", "batch"),
    [
        ({"global": 128, "per_device": 16}, Batch(total=128, per_device=16)),
        ({"global": "128"}, Batch(total=128)),
        ({"per_device": 4, "global": None}, Batch(per_device=4)),
        ({}, Batch()),
    ],
)
def test_batch(value: Any, batch: Batch) -> None:
    assert read(batch=value).batch == batch


@pytest.mark.parametrize("value", [5, "x", [1], True])
def test_batch_that_is_no_mapping(value: Any) -> None:
    assert "batch" in (fault(batch=value).help or "")


@pytest.mark.parametrize("value", [0, -1, 1.5, "x", "²", "9" * 5000, 10**12, True, [1], {"a": 1}])
def test_batch_numbers_that_are_none(value: Any) -> None:
    found = fault(batch={"global": value})
    assert found.key == "batch.global"
    assert "above 0" in found.message


def test_unknown_part_of_the_batch() -> None:
    assert fault(batch={"total": 8}).key == "batch.total"


@pytest.mark.parametrize(
    ("value", "state"), [("off", "off"), (False, "off"), ("on", "on"), (True, "on"), (None, "any")]
)
def test_a_state_that_yaml_reads_as_a_bool(value: Any, state: str) -> None:
    assert read(expect={"packing": value}).expect == {"packing": state}


@pytest.mark.parametrize("value", ["engagd", True, ["a"], {"a": 1}, 5, "x" * 5000])
def test_states_that_cannot_be_expected(value: Any) -> None:
    found = fault(expect={"liger": value})
    assert found.key == "expect.liger"
    assert "engaged, off, any" in (found.help or "")


def test_unknown_points_and_what_is_no_mapping() -> None:
    assert fault(expect={"ligr": "off"}).help == "did you mean `liger`?"
    assert "dataset_cache" in (fault(expect={"speed": "off"}).help or "")
    assert fault(expect="liger").code == "bad-expect"


@pytest.mark.parametrize("value", ["a", 0, 5.5, [], {}])
def test_unknown_backends(value: Any) -> None:
    found = fault(backend=value)
    assert found.code == "bad-backend"
    assert all(name in (found.help or "") for name in BACKENDS)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("TRL", "trl"),
        ("tlr", "trl"),
        ("open-instruct", "open_instruct"),
        ("Open_Instruct", "open_instruct"),
    ],
)
def test_backends_nearly_spelt(value: str, meant: str) -> None:
    assert fault(backend=value).help == f"did you mean `{meant}`?"


def test_a_backend_that_is_none_is_held_against_no_other(write: Write) -> None:
    text = "stage: sft\nbackend: TRL\nargs:\n  dataset_name: d\n  max_steps: 3\n  eval_strategy: steps\n"
    judged = stage.judge(load(write("a.yaml", text), ()))
    assert [finding.code for finding in judged.findings] == ["bad-backend"]
    judged = stage.judge(load(write("b.yaml", text.replace("stage: sft\n", "")), ()))
    assert {finding.code for finding in judged.findings} == {"bad-backend", "bad-stage"}


@pytest.mark.parametrize(("value", "name"), [("run 1", "run 1"), (5, "5"), (None, None)])
def test_names(value: Any, name: str | None) -> None:
    assert read(name=value).name == name
    assert fault(name=["x"]).code == "bad-name"


@pytest.mark.parametrize(("value", "gpus"), [(8, 8), (0, 0), ("4", 4), ("0", 0), (None, None)])
def test_num_gpus_of_the_wrapped_shape(value: Any, gpus: int | None) -> None:
    assert read("wrapped", script="finetune.py", num_gpus=value).gpus == gpus


@pytest.mark.parametrize("value", [-1, 1.5, True, False, "x", "²", "9" * 5000, [8]])
def test_bad_num_gpus(value: Any) -> None:
    assert fault("wrapped", num_gpus=value).code == "bad-num-gpus"


def test_all_faults_at_once() -> None:
    _, faults = options.read(
        config(backend="x", deepspeed="y", batch={"global": 0}, expect={"loss": "no"}, nope=1),
        "sft",
    )
    assert {f.code for f in faults} == {
        "bad-backend", "bad-deepspeed", "bad-batch", "bad-expect", "unknown-option"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("deepsped", "did you mean `deepspeed`?"),
        ("learning_rate", "write it under `args:`"),
        ("num_gpus", "--gpus"),
        ("open_instruct", "either `stage:` and `args:`"),
        ("something", "ours are stage, backend"),
    ],
)
def test_unknown_options(key: str, part: str) -> None:
    _, faults = options.read(config(**{key: 1}), "sft", (), {"learning_rate"})
    assert [f.code for f in faults] == ["unknown-option"]
    assert part in (faults[0].help or "")


@pytest.mark.parametrize(
    ("shape", "given", "stage"),
    [
        ("stage", {"stage": "sft"}, "sft"),
        ("stage", {"stage": "dpo"}, "dpo"),
        ("wrapped", {"script": "open_instruct/finetune.py"}, "sft"),
        ("wrapped", {"script": "dpo_tune_cache.py"}, "dpo"),
        ("flat", {}, None),
        ("flat", {"stage": "dpo"}, "dpo"),
    ],
)
def test_the_stage_that_a_file_names(shape: str, given: dict[str, Any], stage: str | None) -> None:
    assert options.stage_of(config(shape, **given)) == stage
    assert options.stage_fault(config(shape, **given)) is None


@pytest.mark.parametrize(
    ("shape", "given", "code", "part"),
    [
        ("stage", {}, "bad-stage", "`stage` is missing"),
        ("stage", {"stage": "grpo"}, "bad-stage", "`grpo` is no stage"),
        ("stage", {"stage": ["sft"]}, "bad-stage", "is no stage"),
        ("stage", {"stage": {"a": 1}}, "bad-stage", "is no stage"),
        ("flat", {"stage": "x"}, "bad-stage", "`x` is no stage"),
        ("wrapped", {}, "bad-script", "`script` is missing"),
        ("wrapped", {"script": "grpo.py"}, "bad-script", "`grpo.py` is no script"),
        ("wrapped", {"script": ["finetune.py"]}, "bad-script", "is no script"),
    ],
)
def test_files_that_name_no_stage(shape: str, given: dict[str, Any], code: str, part: str) -> None:
    found = options.stage_fault(config(shape, **given))
    assert found is not None
    assert found.code == code
    assert part in found.message


def test_how_the_probe_watches() -> None:
    assert read().probe == options.Watch()
    assert read(probe={}).probe == options.Watch()
    changed = read(probe={"within": "5", "isolation": False, "hang_seconds": 60}).probe
    assert changed == options.Watch(within=5, isolation=False, hang_seconds=60)
    for off in (False, "off", "No"):
        assert read(probe=off).probe is None
    found = read(on_violation="warn", on_hang="stop")
    assert (found.on_violation, found.on_hang) == ("warn", "stop")


@pytest.mark.parametrize(
    ("given", "key", "help"),
    [
        ({"on_violation": "ignore"}, "on_violation", "one of stop, warn"),
        ({"on_hang": True}, "on_hang", "one of report, stop"),
        ({"probe": "light"}, "probe", "probe: off"),
        ({"probe": {"isolatoin": "off"}}, "probe.isolatoin", "did you mean `isolation`?"),
        ({"probe": {"within": 0}}, "probe.within", "for example `probe: {within: 3}`"),
        ({"probe": {"isolation": "perhaps"}}, "probe.isolation", "`probe: {isolation: on}`"),
        ({"probe": {"profile": "all"}}, "probe.profile", "for example `probe: {profile: 4}`"),
    ],
)
def test_a_probe_that_is_none(given: dict[str, Any], key: str, help: str) -> None:
    found = fault(**given)
    assert found.key == key
    assert found.code == f"bad-{key.partition('.')[0].replace('_', '-')}"
    assert help in str(found.help)
