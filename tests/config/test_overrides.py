"""`key=value` on the command line, for every shape of file."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Write

from launcher.cli.main import main
from launcher.config import load
from launcher.errors import InvalidConfig

STAGE = """\
stage: sft
batch: {global: 128, per_device: 16}
args:
  learning_rate: 1.0e-5
  dataset_mixer_list: [a, 1.0, b, 2]
  extra: {x: {y: 1}}
  empty:
"""
FLAT = "learning_rate: 1\nmixer_list: [a, 1.0]\n"
WRAPPED = "num_gpus: 8\nopen_instruct:\n  script: finetune.py\n  args: {seed: 1, mixer_list: [a]}\n"


@pytest.fixture
def stage_file(write: Write) -> Path:
    return write("stage.yaml", STAGE)


def args(path: Path, *overrides: str) -> dict[str, Any]:
    return dict(load.load(path, overrides).args)


def fault(path: Path, *overrides: str) -> str:
    with pytest.raises(InvalidConfig) as raised:
        load.load(path, overrides)
    (found,) = raised.value.findings
    assert (found.code, found.file) == ("bad-override", str(path))
    return f"{found.message} | {found.help}"


VALUES: tuple[tuple[str, Any], ...] = (
    ("5", 5), ("1e-5", 1e-5), ("true", True), ("null", None), ('""', ""), ("'no'", "no"),
    ("[x, 1.0, 2]", ["x", 1.0, 2]), ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
    *((text, text) for text in (
        "a=b=c", "http://x?y=1&z=2", "a b  c", "a: b", "a # b", "*a", "a\nb: c\n", "'a' and 'b'", "/data/ü/x y.jsonl",
        "{% if x %}{{ y }}{% endif %}", "{{ messages[0]['role'] }}",
    )),
)  # fmt: skip


def test_values(stage_file: Path) -> None:
    for text, value in VALUES:
        found = args(stage_file, f"seed={text}")["seed"]
        assert (found, type(found)) == (value, type(value))


def test_what_is_no_override(stage_file: Path) -> None:
    for text in ("seed", "=5", "a b=5", "1=x", "a..b=1", "a.=1", "a[x]=1", "-seed=1", "seed:5"):
        assert "not of the form key=value" in fault(stage_file, text)
    for text in ("seed=[1", "seed={a: 1, a: 2}", "seed=[*x]"):
        assert text in fault(stage_file, text)
    assert "write seed=null" in fault(stage_file, "seed=None")
    assert "`seed=` has no value" in fault(stage_file, "seed=")
    assert "named in the file" in fault(stage_file, "extends=other.yaml")
    assert "not UTF-8" in fault(stage_file, b"seed=\xff".decode("utf-8", "surrogateescape"))
    assert "is not a mapping or a list" in fault(stage_file, "learning_rate.x=1")
    for key in ("seed[0]", "extra[0]", "extra.x[1].y"):
        assert "is not a list" in fault(stage_file, f"{key}=1")
    for key in ("dataset_mixer_list[4]", "dataset_mixer_list.x"):
        assert "is a list of 4 entries" in fault(stage_file, f"{key}=1")


def test_options_and_arguments_of_a_stage_file(stage_file: Path) -> None:
    loaded = load.load(
        stage_file, ["batch.global=64", "deepspeed=none", "seed=1", "args.a=2", "name=x"]
    )
    batch = {"global": 64, "per_device": 16}
    assert loaded.options == {"stage": "sft", "batch": batch, "deepspeed": "none", "name": "x"}
    assert (loaded.args["seed"], loaded.args["a"]) == (1, 2)
    # below mappings and what is empty
    found = args(stage_file, "extra.x.y=2", "extra.z=3", "empty.a.b=4")
    assert found["extra"] == {"x": {"y": 2}, "z": 3}
    assert found["empty"] == {"a": {"b": 4}}
    # the origin of an override
    loaded = load.load(stage_file, ["learning_rate=2", "dataset_mixer_list=[c]"])
    assert str(loaded.origin("args.learning_rate")) == "override `learning_rate=2`"
    assert str(loaded.origin("args.dataset_mixer_list[0]")) == "override `dataset_mixer_list=[c]`"
    assert loaded.origin("args.learning_rate").file == str(stage_file)
    # all bad overrides at once
    with pytest.raises(InvalidConfig) as raised:
        load.load(stage_file, ["a", "seed=1", "b=None"])
    assert len(raised.value.findings) == 2


def test_a_fault_of_an_override_is_where_it_was_said(
    stage_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["learning_rate=fast", "batch.global=0", "probe={within: 0}"]
    assert main(["sft", str(stage_file), *words, "--gpus", "1", "--dry-run"]) == 3
    said = capsys.readouterr().err
    for text in words:
        assert f"--> override `{text}` of {stage_file}\n" in said
    assert main(["sft", str(stage_file), "seed", "--gpus", "1", "--format", "json"]) == 3
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["file"], found["line"], found["override"]) == (str(stage_file), None, "seed")
    with pytest.raises(InvalidConfig) as raised:
        load.load(stage_file, ["x=${a//b}"])
    assert raised.value.findings[0].place == f"override `x=${{a//b}}` of {stage_file}"


@pytest.mark.parametrize("shape", [STAGE, FLAT, WRAPPED])
@pytest.mark.parametrize("key", ["a.b.c", "args.args.seed"])
def test_the_origin_of_what_an_override_goes_through(write: Write, shape: str, key: str) -> None:
    path = write("a.yaml", shape)
    loaded = load.load(path, [f"{key}=1"])
    (made,) = [name for name in loaded.args if name in {"a", "args", "seed", "empty"}][-1:]
    assert str(loaded.origin(f"args.{made}")) == f"override `{key}=1`"
    # what nobody gave is missing in the file
    assert loaded.origin("args.model_name_or_path").override is None


def test_an_entry_of_a_list(stage_file: Path) -> None:
    for key in ("dataset_mixer_list[1]", "args.dataset_mixer_list[1]", "dataset_mixer_list.1"):
        loaded = load.load(stage_file, [f"{key}=0.5"])
        assert loaded.args["dataset_mixer_list"] == ["a", 0.5, "b", 2]
        assert loaded.origin("args.dataset_mixer_list[1]").override == f"{key}=0.5"
        assert loaded.origin("args.dataset_mixer_list[2]").line == 5


def test_flat_files_take_arguments_and_options(write: Write) -> None:
    path = write("flat.yaml", FLAT)
    words = "learning_rate=2 args.seed=3 mixer_list[1]=0.5 deepspeed=zero3 batch.global=8"
    loaded = load.load(path, words.split())
    assert loaded.shape == "flat"
    assert loaded.args == {"learning_rate": 2, "seed": 3, "mixer_list": ["a", 0.5]}
    assert loaded.options == {"deepspeed": "zero3", "batch": {"global": 8}}
    assert loaded.origin("args.seed").override == "args.seed=3"
    assert loaded.origin("batch.global").override == "batch.global=8"
    assert loaded.origin("args.mixer_list[0]").line == 2


def test_wrapped_files_take_arguments_and_options(write: Write) -> None:
    path = write("wrapped.yaml", WRAPPED)
    words = "seed=2 args.a=3 open_instruct.args.b=4 mixer_list[0]=c num_gpus=2 deepspeed=zero3 script=x name=y"
    loaded = load.load(path, words.split())
    assert loaded.args == {"seed": 2, "a": 3, "b": 4, "mixer_list": ["c"]}
    assert loaded.options == {"num_gpus": 2, "script": "x", "deepspeed": "zero3", "name": "y"}
    assert loaded.origin("args.a").override == "args.a=3"


def test_an_interpolation_in_an_override(stage_file: Path) -> None:
    assert args(stage_file, "output_dir=out/${args.learning_rate}")["output_dir"] == "out/1e-05"
