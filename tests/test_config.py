"""Stage files of every shape, their parents and their interpolation -> `Config`."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Write
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import cli, config
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
        config.load(path, overrides)
    return raised.value.findings


# --- shapes ---------------------------------------------------------------------------------------


def test_a_stage_file(write: Write) -> None:
    path = write("a.yaml", STAGE)
    loaded = config.load(path)
    assert loaded.shape == "stage"
    assert loaded.options == {
        "stage": "sft", "deepspeed": "zero2", "batch": {"global": 128, "per_device": 16}
    }  # fmt: skip
    assert loaded.args == {"learning_rate": 1e-5, "dataset_mixer_list": ["a", 1.0]}
    assert str(loaded.origin("args.learning_rate")) == f"{path}:5"
    assert str(loaded.origin("args.dataset_mixer_list[7]")) == f"{path}:6"
    assert str(loaded.origin("args.not_there")) == f"{path}:4"
    assert str(loaded.origin("not_there")) == f"{path}:1"


def test_a_flat_upstream_file(write: Write) -> None:
    loaded = config.load(write("a.yaml", "\nlearning_rate: 1\nname: x\n"))
    assert (loaded.shape, loaded.options) == ("flat", {})
    assert loaded.args == {"learning_rate": 1, "name": "x"}
    assert loaded.origin("args.learning_rate").line == 2
    assert loaded.origin("args.absent").line == 2


def test_a_wrapped_file(write: Write) -> None:
    text = (
        "num_gpus: 8\nopen_instruct:\n  script: open_instruct/finetune.py\n  args:\n    seed: 1\n"
    )
    loaded = config.load(write("a.yaml", text))
    assert loaded.shape == "wrapped"
    assert loaded.options == {"num_gpus": 8, "script": "open_instruct/finetune.py"}
    assert loaded.args == {"seed": 1}
    assert loaded.origin("script").line == 3
    assert loaded.origin("args.seed").line == 5
    assert loaded.origin("args.absent").line == 4
    assert loaded.origin("num_gpus").line == 1


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("args: {}\n", "stage"),
        ("backend: trl\n", "stage"),
        ("stage: sft\nopen_instruct: {args: {}}\n", "stage"),
        ("open_instruct: {args: {}}\nargs: {}\n", "stage"),
        ("open_instruct:\n", "wrapped"),
        ("seed: 1\n", "flat"),
    ],
)
def test_which_shape_a_file_has(write: Write, text: str, shape: str) -> None:
    assert config.load(write("a.yaml", text)).shape == shape


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("stage: sft\nargs: [a]\n", 2),
        ("stage: sft\n\nargs: 5\n", 3),
        ("num_gpus: 1\nopen_instruct: x\n", 2),
        ("open_instruct:\n  script: finetune.py\n  args: x\n", 3),
    ],
)
def test_args_that_are_no_mapping(write: Write, text: str, line: int) -> None:
    (found,) = faults(write("a.yaml", text))
    assert (found.code, found.line) == ("bad-args", line)


@pytest.mark.parametrize("text", ["stage: sft\nargs:\n", "open_instruct:\n  args:\n"])
def test_args_may_be_empty(write: Write, text: str) -> None:
    assert config.load(write("a.yaml", text)).args == {}


def test_keys_that_stand_twice_are_faults_of_a_config_that_is_read(write: Write) -> None:
    loaded = config.load(write("a.yaml", "seed: 1\nseed: 2\n"))
    assert [f.code for f in loaded.faults] == ["duplicate-key"]
    assert loaded.args == {"seed": 2}


# --- extends --------------------------------------------------------------------------------------


def test_a_parent_is_merged_deeply_and_lists_are_replaced_whole(write: Write) -> None:
    parent = write("base/parent.yaml", STAGE)
    child = write(
        "child.yaml",
        "extends: base/parent.yaml\nbatch: {per_device: 4}\nargs:\n  dataset_mixer_list: [b]\n",
    )
    loaded = config.load(child)
    assert loaded.options["batch"] == {"global": 128, "per_device": 4}
    assert loaded.args == {"learning_rate": 1e-5, "dataset_mixer_list": ["b"]}
    assert "extends" not in loaded.options
    assert loaded.parents == (parent,)
    assert str(loaded.origin("args.learning_rate")) == f"{parent}:5"
    assert str(loaded.origin("batch.per_device")) == f"{child}:2"
    # not the parent's line of an entry that the child's list does not have
    assert str(loaded.origin("args.dataset_mixer_list[1]")) == f"{child}:4"


def test_grandparents_and_faults_of_parents(write: Write) -> None:
    first = write("first.yaml", "args: {seed: 1, weight_decay: 1}\nargs: {seed: 1}\n")
    second = write("deep/second.yaml", "extends: ../first.yaml\nargs: {seed: 2}\n")
    third = write("third.yaml", "extends: deep/second.yaml\nstage: sft\n")
    loaded = config.load(third)
    assert loaded.args == {"seed": 2}
    assert loaded.parents == (second, second.parent / "../first.yaml")
    assert [(f.code, Path(f.file or "").resolve(), f.line) for f in loaded.faults] == [
        ("duplicate-key", first, 2)
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a: 1\nextends: [x]\n", "bad-extends"),
        ("a: 1\nextends: 5\n", "bad-extends"),
        ("a: 1\nextends: ' '\n", "bad-extends"),
        ("a: 1\nextends: no.yaml\n", "missing-parent"),
        ("a: 1\nextends: ~nobody-here/no.yaml\n", "missing-parent"),
        ("a: 1\nextends: %s.yaml\n" % ("x" * 5000), "missing-parent"),
        ("a: 1\nextends: /etc/passwd\n", "bad-extends"),
        ("a: 1\nextends: ../.env\n", "bad-extends"),
        ("a: 1\nextends: linked.yaml\n", "bad-extends"),
        ("a: 1\nextends: me.yaml\n", "extends-cycle"),
        ("a: 1\nextends: ./x/../me.yaml\n", "extends-cycle"),
    ],
)
def test_parents_that_cannot_be(write: Write, text: str, code: str) -> None:
    path = write("me.yaml", text)
    (path.parent / "x").mkdir()
    (path.parent / "linked.yaml").symlink_to("/etc/passwd")
    (found,) = faults(path)
    assert (found.code, found.file, found.line) == (code, str(path), 2)


def test_a_circle_of_three(write: Write) -> None:
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "extends: c.yaml\n")
    last = write("c.yaml", "extends: a.yaml\n")
    (found,) = faults(last.with_name("a.yaml"))
    assert (found.code, found.file, found.line) == ("extends-cycle", str(last), 1)
    assert found.message.count("a.yaml") == 2


def test_too_many_parents(write: Write) -> None:
    for number in range(40):
        path = write(f"{number}.yaml", f"extends: {number - 1}.yaml\n" if number else "a: 1\n")
    (found,) = faults(path)
    assert found.code == "extends-depth"


def test_a_loop_of_links(write: Write, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (found,) = faults(write("a.yaml", "extends: loop\n"))
    assert found.line == 1


def test_a_broken_parent_is_named(write: Write) -> None:
    parent = write("parent.yaml", "a: [\n")
    (found,) = faults(write("a.yaml", "extends: parent.yaml\n"))
    assert (found.code, found.file) == ("broken-yaml", str(parent))


def test_extends_null_is_none(write: Write) -> None:
    assert config.load(write("a.yaml", "extends:\nseed: 1\n")).args == {"seed": 1}


# --- interpolation --------------------------------------------------------------------------------


def test_interpolation(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    text = (
        "stage: sft\nargs:\n  output_dir: ${oc.env:WHERE}/out\n  run: ${args.output_dir}/1\n"
        "  seed: ${args.n}\n  n: 5\n  mixer: {'a.b c[': '${args.n}'}\n  list: ['${args.n}', x]\n"
    )
    assert config.load(write("a.yaml", text)).args == {
        "output_dir": "/data/out",
        "run": "/data/out/1",
        "seed": 5,
        "n": 5,
        "mixer": {"a.b c[": 5},
        "list": [5, "x"],
    }


@pytest.mark.parametrize("text", ["'\\${x}'", "'a \\${x}'"])
def test_an_escaped_interpolation_is_text(write: Write, text: str) -> None:
    path = write("a.yaml", f"stage: sft\nargs: {{a: {text}}}\n")
    assert str(config.load(path).args["a"]).endswith("${x}")


@pytest.mark.parametrize(
    "value",
    [
        "${",
        "${a",
        "${nope}",
        "${args.a}",
        "${args}",
        "${args.b}",
        "${oc.env:LAUNCH_NOT_SET}",
        "${x:y}",
    ],
)
def test_interpolation_that_cannot_be(write: Write, value: str) -> None:
    path = write("a.yaml", f"stage: sft\nargs:\n  b: ${{args.a}}\n  a: '{value}'\n")
    found = faults(path)
    assert {f.code for f in found} == {"interpolation"}
    assert all(f.file == str(path) and f.line in {3, 4} for f in found)
    assert any(f.line == 4 for f in found)


ECHOED = ("seed", "learning_rate", "dataset_mixer_list", "packing", "loss_type")


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        "hunter2",
        "ab",
        "x'y z`{",
        "two words-of-it",
        "first\nsecond-line",
        "q" * 300,
        "[hunter2]",
        "~/hunter2.pem",
    ],
)
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
    for form in ("text", "json", "github", "sarif"):
        assert cli.main(["validate-config", str(path), "--format", form]) == 3
        told = "".join(capfd.readouterr())
        assert f"oc.env:{name}" in told
        said = told.replace(f"${{oc.env:{name}}}", "").replace(str(path), "")
        pieces = [value[:70], *value.split()] if len(value) > 2 else [f"`{value}`", f"'{value}'"]
        assert not [piece for piece in pieces if len(piece) > 3 and piece in said]


@pytest.mark.parametrize(
    "text",
    ["${oc.decode:'${oc.env:PGPASSWORD}'}", "${${oc.env:PGPASSWORD}}", "${oc.env:${oc.env:PGPASSWORD}}",
     "${args.a${oc.env:PGPASSWORD}}", "${oc.select:${oc.env:PGPASSWORD}}x${nope}",
     "${oc.create:${oc.env:PGPASSWORD}}"],
)  # fmt: skip
def test_nor_does_one_of_an_interpolation(
    write: Write, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    for value in ("hunter2{secret", "hunter2", "{a: hunter2", "a.hunter2[0"):
        monkeypatch.setenv("PGPASSWORD", value)
        path = write("a.yaml", f'stage: sft\nbackend: trl\nargs:\n  seed: "{text}"\n')
        assert cli.main(["validate-config", str(path)]) == 3
        assert "hunter2" not in "".join(capfd.readouterr())


def test_what_came_out_of_the_environment_is_known(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    monkeypatch.setenv("SCRATCH", "/data")
    monkeypatch.setenv("SOMETHING", "x9-y8-z7-secret")
    text = "a: ${oc.env:PGPASSWORD}\nb: '${a}!'\nc: ${oc.env:SCRATCH}/x\nd: [1, '${oc.env:SOMETHING}']\n"
    flat = {"args.a": "${oc.env:PGPASSWORD}", "args.b": "${a}!", "args.d[1]": "${oc.env:SOMETHING}"}
    assert config.load(write("a.yaml", text)).secrets == flat


@pytest.mark.parametrize(
    "text", ["*hunter2", "a: *hunter2", "!hunter2 x", "[hunter2]: 1", "hunter2 x: 1\nb: 2"]
)
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_stage_file_is_not_quoted(
    write: Write, capfd: pytest.CaptureFixture[str], text: str, linked: bool
) -> None:
    path = write("secrets.conf", text)
    if linked:
        path = path.with_name("a.yaml")
        path.symlink_to("secrets.conf")
    assert cli.main(["validate-config", str(path)]) == 3
    assert "hunter2" not in "".join(capfd.readouterr())


def test_every_bad_interpolation_is_named(write: Write) -> None:
    found = faults(write("a.yaml", "stage: sft\nargs:\n  a: ${x}\n  b: [1, '${y}']\n"))
    assert [(f.key, f.line) for f in found] == [("args.a", 3), ("args.b[1]", 4)]


def test_interpolation_inside_the_deepest_nesting(write: Write) -> None:
    deep = f"{'[' * 60}'${{n}}'{']' * 60}"
    assert "7" in str(config.load(write("a.yaml", f"n: 7\ndeep: {deep}\n")).args["deep"])


# --- anything at all ------------------------------------------------------------------------------

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


@settings(max_examples=500)
@given(LINES, OVERRIDES)
def test_any_file_and_overrides_load_or_are_refused_with_a_place(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], overrides: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        loaded = config.load(path, overrides)
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
