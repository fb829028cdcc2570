"""`launch validate-config` as people and machines call it."""

from pathlib import Path

import pytest
from answers import Ask
from answers import ask as ask  # a fixture
from conftest import Write

from launcher.cli.main import main
from launcher.errors import Exit, Finding
from launcher.report import console

WRONG = """\
# ours
stage: sft
args:
  model_name_or_path: m   # kept
  dataset_mixer_list: [a, 1.0]
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
  checkpointing_steps: epoch
  use_flash_attn: true
  chat_template: tulu
"""
FIXED = WRONG.replace("  use_flash_attn: true\n", "")
FIXED = FIXED.replace("chat_template:", "chat_template_name:")


def test_fix_writes_and_then_judges(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("a.yaml", WRONG)
    assert main(["validate-config", str(path)]) == Exit.CONFIG
    capsys.readouterr()
    assert main(["validate-config", "--fix", str(path)]) == Exit.OK
    assert path.read_text() == FIXED
    stdout = capsys.readouterr().out
    assert f"{path}:9: " in stdout
    assert f"{path}: valid" in stdout


def test_fix_for_machines(write: Write, ask: Ask) -> None:
    answer = ask("validate-config", "--fix", str(write("a.yaml", WRONG)))
    assert answer.code == Exit.OK
    (file,) = answer.data["files"]
    assert file["valid"]
    assert file["fix"]["changed"]
    assert [change["line"] for change in file["fix"]["changes"]] == [9, 10]


def test_a_folder_stands_for_the_files_in_it(tmp_path: Path, write: Write, ask: Ask) -> None:
    for name in ("all/b/c.yml", "all/a.yaml", "all/.git/x.yaml", "all/.hidden.yaml", "all/a.json"):
        write(name, FIXED)
    answer = ask("validate-config", str(tmp_path / "all"))
    assert answer.code == Exit.OK
    paths = [file["path"] for file in answer.data["files"]]
    assert paths == [f"{tmp_path}/all/a.yaml", f"{tmp_path}/all/b/c.yml"]


def test_an_empty_folder_is_refused(tmp_path: Path, ask: Ask) -> None:
    answer = ask("validate-config", str(tmp_path))
    assert answer.code == Exit.CONFIG
    assert "not-a-file" in answer.codes


@pytest.mark.parametrize("is_absolute", [True, False])
def test_annotations_of_github(
    write: Write,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_absolute: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    args = "dataset_mixer_list: [a, 1.0]\n  model_name_or_path: m\n  max_train_samples: 3"
    path = write("a,b/50%.yaml", f"stage: sft\nargs:\n  {args}\n  chat_template: tulu\n")
    name = str(path) if is_absolute else "a,b/50%.yaml"
    assert main(["validate-config", "--format", "github", name]) == Exit.CONFIG
    *_, unread, renamed = capsys.readouterr().out.splitlines()
    assert unread.startswith("::warning file=a%2Cb/50%25.yaml,line=5,title=unread-key::")
    assert renamed.startswith("::error file=a%2Cb/50%25.yaml,line=6,title=renamed-key::")
    assert "%0Ahelp: write `chat_template_name`" in renamed


def test_a_message_cannot_smuggle_in_another_workflow_command(tmp_path: Path) -> None:
    message = "x\n::add-mask::y\r\n::error::z%"
    note = Finding(severity="note", layer="launch", code="c", message=message)
    command = console.render_workflow_command(note, tmp_path)
    assert command == "::notice title=c::x%0A::add-mask::y%0D%0A::error::z%25"


@pytest.mark.parametrize("form", ["github", "json"])
def test_a_refused_command_answers_in_the_same_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, write: Write, form: str
) -> None:
    path = str(write("a.yaml", "stage: sft\nargs: {}\n"))
    missing = str(tmp_path / "no-checkout")
    code = main(["validate-config", path, "--open-instruct", missing, f"--format={form}"])
    assert code == Exit.NOT_READY
    streams = capsys.readouterr()
    assert "no-checkout" in streams.out
    assert streams.err == ""


def test_the_source_is_located_once_for_many_files(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from launcher.upstream import locate as upstream

    calls = []
    locate = upstream.locate

    def count_calls(*args: object, **options: object) -> object:
        calls.append(args)
        return locate(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(upstream, "locate", count_calls)
    paths = [str(write(f"{number}.yaml", FIXED)) for number in range(5)]
    assert main(["validate-config", *paths]) == Exit.OK
    assert len(calls) == 1
    assert capsys.readouterr().out.count(": valid") == 5


TRL = "stage: {stage}\nbackend: trl\nargs: {{{args}}}\n"


def test_a_pipeline_is_judged_with_all_its_stages(write: Write, ask: Ask) -> None:
    args = "model_name_or_path: m, dataset_name: d, output_dir: "
    write("sft.yaml", TRL.format(stage="sft", args=f"{args}one"))
    write("dpo.yaml", TRL.format(stage="dpo", args=f"{args}two, learning_rat: 1"))
    pipeline = write("all.yaml", "stages: [sft.yaml, dpo.yaml]\n")
    answer = ask("validate-config", str(pipeline))
    assert answer.code == Exit.CONFIG
    places = []
    for finding in answer.findings:
        places.append((finding["code"], Path(finding["file"]).name, finding["line"]))
    assert ("abbreviated-key", "dpo.yaml", 3) in places
    assert ("pipeline-model", "dpo.yaml", 3) in places


def test_a_stage_beside_its_pipeline_is_judged_once(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    args = "dataset_name: d, learning_rat: 1"
    stage = write("all/sft.yaml", TRL.format(stage="sft", args=args))
    write("all/pipeline.yaml", "gpus: 0\nstages: [{name: sft, config: sft.yaml}]\n")
    assert main(["validate-config", str(stage.parent)]) == Exit.CONFIG
    assert capsys.readouterr().err.count("`learning_rat`") == 1


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_what_is_fixed_may_hold_a_token(
    write: Write, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    token = "hf_" + "aB3" * 11
    text = WRONG.replace("use_flash_attn: true", f"use_flash_attn: {token}")
    text += "  additional_model_arguments:\n    hub_token: a-password\n"
    main(["validate-config", "--fix", str(write("a.yaml", text)), "--format", form])
    output = "".join(capsys.readouterr())
    assert token[:20] not in output
    assert "a-password" not in output


@pytest.mark.parametrize(
    ("backend", "line", "key"),
    [
        ("trl", "trust_remote_code: true", "trust_remote_code"),
        ("trl", "model_init_kwargs: {trust_remote_code: true}", "model_init_kwargs"),
        ("open_instruct", "trust_remote_code: true", "trust_remote_code"),
    ],
)
def test_code_of_a_repository_gets_a_note(
    write: Write, ask: Ask, backend: str, line: str, key: str
) -> None:
    args = f"args:\n  model_name_or_path: a/b\n  {line}\n"
    path = write("a.yaml", f"stage: sft\nbackend: {backend}\n{args}")
    (note,) = ask("validate-config", str(path)).with_code("remote-code")
    assert (note["severity"], note["key"], note["line"]) == ("note", f"args.{key}", 5)


def test_code_that_is_not_trusted_gets_no_note(write: Write, ask: Ask) -> None:
    args = "model_name_or_path: a/b, trust_remote_code: false"
    path = write("a.yaml", TRL.format(stage="sft", args=args))
    assert "remote-code" not in ask("validate-config", str(path)).codes


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        (["learning_rate=1e-5", "batch.global=8"], []),
        (["lerning_rate=1e-5"], ["unknown-key"]),
        (["learning_rate=x"], ["bad-value"]),
    ],
)
def test_overrides_are_judged_with_the_file(
    overrides: list[str], codes: list[str], write: Write, ask: Ask
) -> None:
    args = "model_name_or_path: m, dataset_name: d, output_dir: o"
    stage = write("sft.yaml", TRL.format(stage="sft", args=args))
    answer = ask("validate-config", str(stage), *overrides)
    errors = [finding for finding in answer.findings if finding["severity"] == "error"]
    assert [finding["code"] for finding in errors] == codes
    assert answer.code == (Exit.CONFIG if codes else Exit.OK)
    for finding in errors:
        assert finding["override"] == overrides[0]


def test_an_override_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate-config", "learning_rate=1e-5"]) == Exit.USAGE
    assert "launch validate-config FILE KEY=VALUE" in capsys.readouterr().err
