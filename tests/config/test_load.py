"""Stage files of every shape, their parents and their interpolation -> `Config`."""

from pathlib import Path

import pytest
from conftest import Write
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.cli import main
from launcher.config import load
from launcher.errors import Finding, InvalidConfig

STAGE = """\
stage: sft
deepspeed: zero2
batch: {global: 128, per_device: 16}
args:
  learning_rate: 1e-5
  dataset_mixer_list: [a, 1.0]
"""
OTHER_TOOL = """\
num_gpus: 8
open_instruct:
  script: open_instruct/finetune.py
  args:
    seed: 1
"""


def refusals(path: Path) -> tuple[Finding, ...]:
    with pytest.raises(InvalidConfig) as raised:
        load.load(path)
    return raised.value.findings


def origins(config: load.Config, *keys: str) -> list[str]:
    """File and line of each key."""
    return [str(config.origin(key)) for key in keys]


def test_a_stage_file(write: Write) -> None:
    path = write("a.yaml", STAGE)
    config = load.load(path)
    assert config.shape == "stage"
    batch = {"global": 128, "per_device": 16}
    assert config.options == {"stage": "sft", "deepspeed": "zero2", "batch": batch}
    assert config.args == {"learning_rate": 1e-5, "dataset_mixer_list": ["a", 1.0]}
    # a key that is not there has the line of what it would be in
    keys = ("args.learning_rate", "args.dataset_mixer_list[7]", "args.missing", "missing")
    assert origins(config, *keys) == [f"{path}:5", f"{path}:6", f"{path}:4", f"{path}:1"]


def test_a_flat_file_of_upstream(write: Write) -> None:
    path = write("a.yaml", "\nlearning_rate: 1\nname: x\n")
    config = load.load(path)
    assert config.shape == "flat"
    assert config.options == {}
    assert config.args == {"learning_rate": 1, "name": "x"}
    assert origins(config, "args.learning_rate", "args.missing") == [f"{path}:2", f"{path}:2"]


def test_a_wrapped_file_of_upstream(write: Write) -> None:
    path = write("a.yaml", OTHER_TOOL)
    config = load.load(path)
    assert config.shape == "wrapped"
    assert config.options == {"num_gpus": 8, "script": "open_instruct/finetune.py"}
    assert config.args == {"seed": 1}
    keys = ("script", "args.seed", "args.missing", "num_gpus")
    assert origins(config, *keys) == [f"{path}:3", f"{path}:5", f"{path}:4", f"{path}:1"]


def test_a_parent_is_merged_deeply_and_lists_are_replaced_whole(write: Write) -> None:
    parent = write("base/parent.yaml", STAGE)
    args = "args:\n  dataset_mixer_list: [b]\n"
    child = write("child.yaml", f"extends: base/parent.yaml\nbatch: {{per_device: 4}}\n{args}")
    config = load.load(child)
    assert config.options["batch"] == {"global": 128, "per_device": 4}
    assert config.args == {"learning_rate": 1e-5, "dataset_mixer_list": ["b"]}
    assert "extends" not in config.options
    assert config.parents == (parent,)
    # not the parent's line of an entry that the child's list does not have
    keys = ("args.learning_rate", "batch.per_device", "args.dataset_mixer_list[1]")
    assert origins(config, *keys) == [f"{parent}:5", f"{child}:2", f"{child}:4"]


def test_faults_of_a_grandparent_name_its_file(write: Write) -> None:
    first = write("first.yaml", "args: {seed: 1, weight_decay: 1}\nargs: {seed: 1}\n")
    second = write("deep/second.yaml", "extends: ../first.yaml\nargs: {seed: 2}\n")
    config = load.load(write("third.yaml", "extends: deep/second.yaml\nstage: sft\n"))
    assert config.args == {"seed": 2}
    assert config.parents == (second, second.parent / "../first.yaml")
    (fault,) = config.faults
    assert (fault.code, fault.line) == ("duplicate-key", 2)
    assert Path(str(fault.file)).resolve() == first


@pytest.mark.parametrize(
    ("parent", "code"),
    [
        ("[x]", "bad-extends"),
        ("' '", "bad-extends"),
        ("no.yaml", "missing-parent"),
        ("~nobody-here/no.yaml", "missing-parent"),
        pytest.param("x" * 5000 + ".yaml", "missing-parent", id="long"),
        ("/etc/passwd", "bad-extends"),
        ("../.env", "bad-extends"),
        ("linked.yaml", "bad-extends"),
        ("./x/../me.yaml", "extends-cycle"),
    ],
)
def test_a_parent_that_cannot_be_read_is_refused(
    tmp_path: Path, write: Write, parent: str, code: str
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "linked.yaml").symlink_to("/etc/passwd")
    path = write("me.yaml", f"a: 1\nextends: {parent}\n")
    (finding,) = refusals(path)
    assert (finding.code, finding.file, finding.line) == (code, str(path), 2)


def test_broken_yaml_of_a_parent_names_the_parent(write: Write) -> None:
    parent = write("parent.yaml", "a: [\n")
    (finding,) = refusals(write("a.yaml", "extends: parent.yaml\n"))
    assert (finding.code, finding.file) == ("broken-yaml", str(parent))


def test_interpolation_of_variables_and_keys(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    text = """\
stage: sft
args:
  output_dir: ${oc.env:WHERE}/out
  run: ${args.output_dir}/1
  seed: ${args.n}
  n: 5
  mixer: {'a.b c[': '${args.n}'}
  list: ['${args.n}', x]
"""
    assert load.load(write("a.yaml", text)).args == {
        "output_dir": "/data/out",
        "run": "/data/out/1",
        "seed": 5,
        "n": 5,
        "mixer": {"a.b c[": 5},
        "list": [5, "x"],
    }


def test_values_of_the_environment_are_secrets_but_paths(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    monkeypatch.setenv("SCRATCH", "/data")
    monkeypatch.setenv("SOMETHING", "x9-y8-z7-secret")
    text = """\
a: ${oc.env:PGPASSWORD}
b: '${a}!'
c: ${oc.env:SCRATCH}/x
d: [1, '${oc.env:SOMETHING}']
"""
    assert load.load(write("a.yaml", text)).secrets == {
        "args.a": "${oc.env:PGPASSWORD}",
        "args.b": "${a}!",
        "args.d[1]": "${oc.env:SOMETHING}",
    }


@pytest.mark.parametrize(
    "value", ["${", "${nope}", "${args.a}", "${args}", "${oc.env:LAUNCH_NOT_SET}", "${x:y}"]
)
def test_an_interpolation_that_has_no_value_is_refused(write: Write, value: str) -> None:
    path = write("a.yaml", f"stage: sft\nargs:\n  b: ${{args.a}}\n  a: '{value}'\n")
    findings = refusals(path)
    assert {(finding.code, finding.file) for finding in findings} == {("interpolation", str(path))}
    lines = {finding.line for finding in findings}
    assert 4 in lines
    assert lines <= {3, 4}


def test_an_interpolation_that_doubles_is_stopped(write: Write) -> None:
    lines = [f"a{number}: '${{a{number + 1}}}${{a{number + 1}}}'" for number in range(40)]
    finding = refusals(write("a.yaml", "\n".join([*lines, "a40: x"])))[0]
    assert (finding.code, finding.line) == ("interpolation", 1)
    assert "expands to too much" in finding.message


# -- what messages may quote


def validate(capfd: pytest.CaptureFixture[str], path: Path, form: str = "text") -> str:
    """All that `launch validate-config` prints about an invalid file."""
    assert main.main(["validate-config", str(path), "--format", form]) == 3
    return "".join(capfd.readouterr())


@pytest.mark.parametrize("form", ["text", "json", "github"])
@pytest.mark.parametrize(
    ("value", "pieces"),
    [
        ("x'y z`{", ["x'y z`{"]),
        ("first\nsecond-line", ["first", "second-line"]),
        ("q" * 300, ["q" * 70]),
    ],
    ids=["quotes", "lines", "long"],
)
@pytest.mark.parametrize("name", ["PGPASSWORD", "INNOCENT"])
def test_no_message_quotes_a_value_of_the_environment(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    value: str,
    pieces: list[str],
    name: str,
    form: str,
) -> None:
    monkeypatch.setenv(name, value)
    borrowed = f"${{oc.env:{name}}}"
    text = f"stage: sft\nbackend: trl\ndeepspeed: {borrowed}\nargs:\n"
    for key in ("seed", "learning_rate", "dataset_mixer_list", "packing", "loss_type"):
        text += f"  {key}: {borrowed}\n"
    output = validate(capfd, write("a.yaml", f"{text}expect: {{liger: '{borrowed}'}}\n"), form)
    assert f"oc.env:{name}" in output
    for piece in pieces:
        assert piece not in output


@pytest.mark.parametrize("value", ["hunter2{secret", "{a: hunter2"])
@pytest.mark.parametrize(
    "text", ["${${oc.env:PGPASSWORD}}", "${oc.select:${oc.env:PGPASSWORD}}x${nope}"]
)
def test_no_message_quotes_an_interpolation_of_a_value(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    value: str,
    text: str,
) -> None:
    monkeypatch.setenv("PGPASSWORD", value)
    path = write("a.yaml", f'stage: sft\nbackend: trl\nargs:\n  seed: "{text}"\n')
    assert "hunter2" not in validate(capfd, path)


@pytest.mark.parametrize("text", ["a: *hunter2", "hunter2 x: 1\nb: 2"])
def test_what_is_no_stage_file_is_not_quoted(
    write: Write, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    path = write("secrets.conf", text)
    link = path.with_name("a.yaml")
    link.symlink_to("secrets.conf")
    assert "hunter2" not in validate(capfd, path)
    assert "hunter2" not in validate(capfd, link)


LINES = """
stage: sft
args:
  seed: 1
  a: ${args.seed}
  b: '${'
extends: any.yaml
extends: other.yaml
open_instruct:
  script: finetune.py
  args: {x: 1}
backend: [
batch: {global: 8}
- x
seed: *a
seed: &a [1]
<<: {a: 1}
	x: 1
? [1]
: 2
a: "\\ud800"
a: "\\0"
stage: {a: ${b}}
...
""".strip("\n").split("\n")
KEYS = ["seed", "args.seed", "batch.global", "a[0]", "a[0].b", "a.0", "stage", "x y", ""]
VALUES = ["[", "{a: b}", "'", '"', "${x}", "1e-5", "a=b", "None"]
OVERRIDE = st.tuples(
    st.sampled_from(KEYS),
    st.sampled_from(["=", "==", "", " = "]),
    st.text(max_size=8) | st.sampled_from(VALUES),
).map("".join)


@settings(max_examples=150)
@given(st.lists(st.sampled_from(LINES), max_size=8), st.lists(OVERRIDE, max_size=3))
def test_any_file_and_overrides_load_or_are_refused_with_a_place(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], overrides: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        config = load.load(path, overrides)
    except InvalidConfig as error:
        findings = error.findings
        assert findings
    else:
        findings = config.faults
        for key in (*config.options, *config.args):
            assert isinstance(key, str)
    for finding in findings:
        assert finding.file
        assert finding.line or finding.code == "bad-override"
        finding.message.encode()
