"""`key=value` on the command line, for every shape of file."""

from pathlib import Path

import pytest
from answers import Ask
from answers import ask as ask  # a fixture
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


def refusal(path: Path, override: str) -> str:
    """Message and help of the one finding about an override."""
    with pytest.raises(InvalidConfig) as raised:
        load.load(path, [override])
    (finding,) = raised.value.findings
    assert (finding.code, finding.file) == ("bad-override", str(path))
    return f"{finding.message} | {finding.help}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("1e-5", 1e-5),
        ("true", True),
        ("null", None),
        ('""', ""),
        ("'no'", "no"),
        ("[x, 1.0, 2]", ["x", 1.0, 2]),
        ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
    ],
)
def test_a_value_is_read_as_yaml(stage_file: Path, text: str, value: object) -> None:
    result = load.load(stage_file, [f"seed={text}"]).args["seed"]
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        "a=b=c",
        "http://x?y=1&z=2",
        "a b  c",
        "a: b",
        "a # b",
        "*a",
        "a\nb: c\n",
        "'a' and 'b'",
        "/data/ü/x y.jsonl",
        "{% if x %}{{ y }}{% endif %}",
        "{{ messages[0]['role'] }}",
    ],
)
def test_other_text_is_a_value_as_it_is(stage_file: Path, text: str) -> None:
    assert load.load(stage_file, [f"seed={text}"]).args["seed"] == text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "not of the form key=value"),
        ("=5", "not of the form key=value"),
        ("a b=5", "not of the form key=value"),
        ("1=x", "not of the form key=value"),
        ("a..b=1", "not of the form key=value"),
        ("a.=1", "not of the form key=value"),
        ("a[x]=1", "not of the form key=value"),
        ("seed=[1", "seed=[1"),
        ("seed={a: 1, a: 2}", "seed={a: 1, a: 2}"),
        ("seed=None", "write seed=null"),
        ("seed=", "`seed=` has no value"),
        ("extends=other.yaml", "named in the file"),
        ("seed=\udcff", "not UTF-8"),
        ("learning_rate.x=1", "is not a mapping or a list"),
        ("seed[0]=1", "is not a list"),
        ("extra.x[1].y=1", "is not a list"),
        ("dataset_mixer_list[4]=1", "is a list of 4 entries"),
        ("dataset_mixer_list.x=1", "is a list of 4 entries"),
    ],
)
def test_what_is_no_override_is_refused(stage_file: Path, override: str, words: str) -> None:
    assert words in refusal(stage_file, override)


def test_all_bad_overrides_are_named_at_once(stage_file: Path) -> None:
    with pytest.raises(InvalidConfig) as raised:
        load.load(stage_file, ["a", "seed=1", "b=None"])
    assert len(raised.value.findings) == 2


def test_an_override_sets_an_option_or_an_argument(stage_file: Path) -> None:
    words = "batch.global=64 deepspeed=none seed=1 args.a=2 name=x extra.x.y=2 extra.z=3 empty.b=4"
    config = load.load(stage_file, words.split())
    batch = {"global": 64, "per_device": 16}
    assert config.options == {"stage": "sft", "batch": batch, "deepspeed": "none", "name": "x"}
    assert (config.args["seed"], config.args["a"]) == (1, 2)
    assert config.args["extra"] == {"x": {"y": 2}, "z": 3}
    assert config.args["empty"] == {"b": 4}


def test_the_origin_of_a_value_is_its_override(stage_file: Path) -> None:
    config = load.load(stage_file, ["learning_rate=2", "dataset_mixer_list=[c]"])
    origin = config.origin("args.learning_rate")
    assert str(origin) == "override `learning_rate=2`"
    assert origin.file == str(stage_file)
    origin = config.origin("args.dataset_mixer_list[0]")
    assert str(origin) == "override `dataset_mixer_list=[c]`"


@pytest.mark.parametrize("override", ["learning_rate=fast", "batch.global=0", "probe={within: 0}"])
def test_a_finding_names_the_override_that_it_is_about(
    stage_file: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    assert main(["sft", str(stage_file), override, "--gpus", "1", "--dry-run"]) == 3
    assert f"--> override `{override}` of {stage_file}\n" in capsys.readouterr().err


def test_a_finding_in_json_has_the_override_in_place_of_a_line(stage_file: Path, ask: Ask) -> None:
    (finding,) = ask("sft", str(stage_file), "seed", "--gpus", "1").findings
    assert finding["file"] == str(stage_file)
    assert finding["line"] is None
    assert finding["override"] == "seed"


def test_an_interpolation_in_an_override(stage_file: Path) -> None:
    config = load.load(stage_file, ["output_dir=out/${args.learning_rate}"])
    assert config.args["output_dir"] == "out/1e-05"
    with pytest.raises(InvalidConfig) as raised:
        load.load(stage_file, ["x=${a//b}"])
    assert raised.value.findings[0].place == f"override `x=${{a//b}}` of {stage_file}"


@pytest.mark.parametrize("text", [STAGE, FLAT, WRAPPED], ids=["stage", "flat", "wrapped"])
@pytest.mark.parametrize(("key", "added"), [("a.b.c", "a"), ("args.args.seed", "args")])
def test_the_origin_of_a_mapping_that_an_override_adds(
    write: Write, text: str, key: str, added: str
) -> None:
    config = load.load(write("a.yaml", text), [f"{key}=1"])
    assert str(config.origin(f"args.{added}")) == f"override `{key}=1`"
    # what nobody set is missing in the file
    assert config.origin("args.model_name_or_path").override is None


@pytest.mark.parametrize(
    "key", ["dataset_mixer_list[1]", "args.dataset_mixer_list[1]", "dataset_mixer_list.1"]
)
def test_an_override_sets_an_entry_of_a_list(stage_file: Path, key: str) -> None:
    config = load.load(stage_file, [f"{key}=0.5"])
    assert config.args["dataset_mixer_list"] == ["a", 0.5, "b", 2]
    assert config.origin("args.dataset_mixer_list[1]").override == f"{key}=0.5"
    assert config.origin("args.dataset_mixer_list[2]").line == 5


def test_flat_files_take_arguments_and_options(write: Write) -> None:
    words = "learning_rate=2 args.seed=3 mixer_list[1]=0.5 deepspeed=zero3 batch.global=8"
    config = load.load(write("flat.yaml", FLAT), words.split())
    assert config.shape == "flat"
    assert config.args == {"learning_rate": 2, "seed": 3, "mixer_list": ["a", 0.5]}
    assert config.options == {"deepspeed": "zero3", "batch": {"global": 8}}
    assert config.origin("args.seed").override == "args.seed=3"
    assert config.origin("batch.global").override == "batch.global=8"
    assert config.origin("args.mixer_list[0]").line == 2


def test_wrapped_files_take_arguments_and_options(write: Write) -> None:
    words = "seed=2 args.a=3 open_instruct.args.b=4 mixer_list[0]=c num_gpus=2 script=x name=y"
    config = load.load(write("wrapped.yaml", WRAPPED), words.split())
    assert config.args == {"seed": 2, "a": 3, "b": 4, "mixer_list": ["c"]}
    assert config.options == {"num_gpus": 2, "script": "x", "name": "y"}
    assert config.origin("args.a").override == "args.a=3"
