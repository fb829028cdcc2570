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


def faults(path: Path, *overrides: str) -> tuple[Finding, ...]:
    with pytest.raises(InvalidConfig) as raised:
        load.load(path, overrides)
    return raised.value.findings


def places(loaded: load.Config, *keys: str) -> list[str]:
    return [str(loaded.origin(key)) for key in keys]


def test_a_stage_file(write: Write) -> None:
    path = write("a.yaml", STAGE)
    loaded = load.load(path)
    assert loaded.shape == "stage"
    assert loaded.options == {
        "stage": "sft",
        "deepspeed": "zero2",
        "batch": {"global": 128, "per_device": 16},
    }
    assert loaded.args == {"learning_rate": 1e-5, "dataset_mixer_list": ["a", 1.0]}
    keys = ("args.learning_rate", "args.dataset_mixer_list[7]", "args.not_there", "not_there")
    assert places(loaded, *keys) == [f"{path}:{line}" for line in (5, 6, 4, 1)]


def test_files_of_upstream(write: Write) -> None:
    loaded = load.load(write("a.yaml", "\nlearning_rate: 1\nname: x\n"))
    assert (loaded.shape, loaded.options) == ("flat", {})
    assert loaded.args == {"learning_rate": 1, "name": "x"}
    assert places(loaded, "args.learning_rate", "args.absent") == [f"{loaded.path}:2"] * 2
    # a wrapped file
    text = (
        "num_gpus: 8\nopen_instruct:\n  script: open_instruct/finetune.py\n  args:\n    seed: 1\n"
    )
    loaded = load.load(write("a.yaml", text))
    assert loaded.shape == "wrapped"
    assert loaded.options == {"num_gpus": 8, "script": "open_instruct/finetune.py"}
    assert loaded.args == {"seed": 1}
    lines = [f"{loaded.path}:{line}" for line in (3, 5, 4, 1)]
    assert places(loaded, "script", "args.seed", "args.absent", "num_gpus") == lines


def test_a_parent_is_merged_deeply_and_lists_are_replaced_whole(write: Write) -> None:
    parent = write("base/parent.yaml", STAGE)
    text = "extends: base/parent.yaml\nbatch: {per_device: 4}\nargs:\n  dataset_mixer_list: [b]\n"
    child = write("child.yaml", text)
    loaded = load.load(child)
    assert loaded.options["batch"] == {"global": 128, "per_device": 4}
    assert loaded.args == {"learning_rate": 1e-5, "dataset_mixer_list": ["b"]}
    assert "extends" not in loaded.options
    assert loaded.parents == (parent,)
    # not the parent's line of an entry that the child's list does not have
    keys = ("args.learning_rate", "batch.per_device", "args.dataset_mixer_list[1]")
    assert places(loaded, *keys) == [f"{parent}:5", f"{child}:2", f"{child}:4"]


def test_grandparents_and_faults_of_parents(write: Write) -> None:
    first = write("first.yaml", "args: {seed: 1, weight_decay: 1}\nargs: {seed: 1}\n")
    second = write("deep/second.yaml", "extends: ../first.yaml\nargs: {seed: 2}\n")
    third = write("third.yaml", "extends: deep/second.yaml\nstage: sft\n")
    loaded = load.load(third)
    assert loaded.args == {"seed": 2}
    assert loaded.parents == (second, second.parent / "../first.yaml")
    assert [(f.code, Path(f.file or "").resolve(), f.line) for f in loaded.faults] == [
        ("duplicate-key", first, 2)
    ]


def test_parents_that_cannot_be(write: Write) -> None:
    (write("x/file", "").parent.parent / "linked.yaml").symlink_to("/etc/passwd")
    for parent, code in (
        ("[x]", "bad-extends"), ("' '", "bad-extends"), ("no.yaml", "missing-parent"),
        ("~nobody-here/no.yaml", "missing-parent"), ("x" * 5000 + ".yaml", "missing-parent"),
        ("/etc/passwd", "bad-extends"), ("../.env", "bad-extends"), ("linked.yaml", "bad-extends"),
        ("./x/../me.yaml", "extends-cycle"),
    ):  # fmt: skip
        path = write("me.yaml", f"a: 1\nextends: {parent}\n")
        (found,) = faults(path)
        assert (found.code, found.file, found.line) == (code, str(path), 2)
    broken = write("parent.yaml", "a: [\n")
    (found,) = faults(write("a.yaml", "extends: parent.yaml\n"))
    assert (found.code, found.file) == ("broken-yaml", str(broken))


def test_interpolation(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    text = (
        "stage: sft\nargs:\n  output_dir: ${oc.env:WHERE}/out\n  run: ${args.output_dir}/1\n"
        "  seed: ${args.n}\n  n: 5\n  mixer: {'a.b c[': '${args.n}'}\n  list: ['${args.n}', x]\n"
    )
    expected = {
        "output_dir": "/data/out",
        "run": "/data/out/1",
        "seed": 5,
        "n": 5,
        "mixer": {"a.b c[": 5},
    }
    assert load.load(write("a.yaml", text)).args == {**expected, "list": [5, "x"]}
    # what came out of the environment is known
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    monkeypatch.setenv("SCRATCH", "/data")
    monkeypatch.setenv("SOMETHING", "x9-y8-z7-secret")
    text = "a: ${oc.env:PGPASSWORD}\nb: '${a}!'\nc: ${oc.env:SCRATCH}/x\nd: [1, '${oc.env:SOMETHING}']\n"
    flat = {"args.a": "${oc.env:PGPASSWORD}", "args.b": "${a}!", "args.d[1]": "${oc.env:SOMETHING}"}
    assert load.load(write("a.yaml", text)).secrets == flat


def test_interpolation_that_cannot_be(write: Write) -> None:
    for value in ("${", "${nope}", "${args.a}", "${args}", "${oc.env:LAUNCH_NOT_SET}", "${x:y}"):
        path = write("a.yaml", f"stage: sft\nargs:\n  b: ${{args.a}}\n  a: '{value}'\n")
        found = faults(path)
        assert {f.code for f in found} == {"interpolation"}
        assert all(f.file == str(path) and f.line in {3, 4} for f in found)
        assert any(f.line == 4 for f in found)


def test_an_interpolation_that_doubles_is_stopped(write: Write) -> None:
    lines = [f"a{n}: '${{a{n + 1}}}${{a{n + 1}}}'" for n in range(40)]
    found = faults(write("a.yaml", "\n".join([*lines, "a40: x"])))
    assert (found[0].code, found[0].line) == ("interpolation", 1)
    assert "expands to too much" in found[0].message


ECHOED = ("seed", "learning_rate", "dataset_mixer_list", "packing", "loss_type")


@pytest.mark.parametrize("value", ["x'y z`{", "first\nsecond-line", "q" * 300])
@pytest.mark.parametrize("name", ["PGPASSWORD", "INNOCENT"])
def test_no_message_says_what_the_environment_holds(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    value: str,
    name: str,
) -> None:
    monkeypatch.setenv(name, value)
    text = "".join(f"  {key}: ${{oc.env:{name}}}\n" for key in ECHOED)
    text = f"stage: sft\nbackend: trl\ndeepspeed: ${{oc.env:{name}}}\nargs:\n{text}"
    path = write("a.yaml", f"{text}expect: {{liger: '${{oc.env:{name}}}'}}\n")
    for form in ("text", "json", "github"):
        assert main.main(["validate-config", str(path), "--format", form]) == 3
        told = "".join(capfd.readouterr())
        assert f"oc.env:{name}" in told
        said = told.replace(f"${{oc.env:{name}}}", "").replace(str(path), "")
        pieces = [value[:70], *value.split()] if len(value) > 2 else [f"`{value}`", f"'{value}'"]
        assert not [piece for piece in pieces if len(piece) > 3 and piece in said]


@pytest.mark.parametrize("value", ["hunter2{secret", "{a: hunter2"])
def test_nor_does_one_of_an_interpolation(
    write: Write, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.setenv("PGPASSWORD", value)
    for text in ("${${oc.env:PGPASSWORD}}", "${oc.select:${oc.env:PGPASSWORD}}x${nope}"):
        path = write("a.yaml", f'stage: sft\nbackend: trl\nargs:\n  seed: "{text}"\n')
        assert main.main(["validate-config", str(path)]) == 3
        assert "hunter2" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("text", ["a: *hunter2", "hunter2 x: 1\nb: 2"])
def test_what_is_no_stage_file_is_not_quoted(
    write: Write, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    path = write("secrets.conf", text)
    link = path.with_name("a.yaml")
    link.symlink_to("secrets.conf")
    for named in (path, link):
        assert main.main(["validate-config", str(named)]) == 3
        assert "hunter2" not in "".join(capfd.readouterr())


LINES = st.lists(
    st.sampled_from(
        ["stage: sft", "args:", "  seed: 1", "  a: ${args.seed}", "  b: '${'", "extends: any.yaml",
         "extends: other.yaml", "open_instruct:", "  script: finetune.py", "  args: {x: 1}", "backend: [",
         "batch: {global: 8}", "- x", "seed: *a", "seed: &a [1]", "<<: {a: 1}", "\tx: 1", "? [1]", ": 2",
         "a: \"\\ud800\"", "a: \"\\0\"", "stage: {a: ${b}}", "..."]
    ),
    max_size=8,
)  # fmt: skip
OVERRIDES = st.lists(
    st.tuples(
        st.sampled_from(["seed", "args.seed", "batch.global", "a[0]", "a[0].b", "a.0", "stage", "x y", ""]),
        st.sampled_from(["=", "==", "", " = "]),
        st.text(max_size=8) | st.sampled_from(["[", "{a: b}", "'", '"', "${x}", "1e-5", "a=b", "None"]),
    ).map("".join),
    max_size=3,
)  # fmt: skip


@settings(max_examples=150)
@given(LINES, OVERRIDES)
def test_any_file_and_overrides_load_or_are_refused_with_a_place(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], overrides: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        loaded = load.load(path, overrides)
    except InvalidConfig as error:
        found = error.findings
        assert found
    else:
        found = loaded.faults
        assert all(isinstance(key, str) for key in (*loaded.options, *loaded.args))
    for finding in found:
        assert finding.file
        assert finding.line or finding.code == "bad-override"
        finding.message.encode()
