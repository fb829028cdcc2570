"""`launch validate-config` as people and machines call it."""

import json
from pathlib import Path

import pytest
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
MENDED = WRONG.replace("  use_flash_attn: true\n", "").replace(
    "chat_template:", "chat_template_name:"
)


def test_fix_writes_and_then_judges(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("a.yaml", WRONG)
    assert main(["validate-config", str(path)]) == Exit.CONFIG
    capsys.readouterr()
    assert main(["validate-config", "--fix", str(path)]) == Exit.OK
    assert path.read_text() == MENDED
    told = capsys.readouterr().out
    assert f"{path}:9: " in told
    assert f"{path}: valid" in told


def test_a_folder_is_the_files_in_it(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("all/b/c.yml", "all/a.yaml", "all/.git/x.yaml", "all/.hidden.yaml", "all/a.json"):
        write(name, MENDED)
    folder = tmp_path / "all"
    assert main(["validate-config", str(folder), "--format", "json"]) == Exit.OK
    told = json.loads(capsys.readouterr().out)["data"]["files"]
    assert [entry["path"] for entry in told] == [f"{folder}/a.yaml", f"{folder}/b/c.yml"]
    (tmp_path / "empty").mkdir()
    assert main(["validate-config", str(tmp_path / "empty")]) == Exit.CONFIG
    assert "not-a-file" in capsys.readouterr().err


def test_fix_for_machines(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("a.yaml", WRONG)
    assert main(["validate-config", "--fix", "--format", "json", str(path)]) == Exit.OK
    (told,) = json.loads(capsys.readouterr().out)["data"]["files"]
    assert told["valid"]
    assert told["fix"]["changed"]
    assert [change["line"] for change in told["fix"]["changes"]] == [9, 10]


def test_annotations_of_github(
    write: Write,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = (
        "dataset_mixer_list: [a, 1.0]",
        "model_name_or_path: m",
        "max_train_samples: 3",
        "chat_template: tulu",
    )
    path = write("a,b/50%.yaml", "stage: sft\nargs:\n" + "".join(f"  {line}\n" for line in lines))
    for name in (str(path), "a,b/50%.yaml"):
        assert main(["validate-config", "--format", "github", name]) == Exit.CONFIG
        *_, unread, renamed = capsys.readouterr().out.splitlines()
        place = "file=a%2Cb/50%25.yaml,line="
        assert unread.startswith(f"::warning {place}5,title=unread-key::")
        assert renamed.startswith(f"::error {place}6,title=renamed-key::")
        assert "%0Ahelp: write `chat_template_name`" in renamed


def test_a_message_cannot_smuggle_in_another_workflow_command(tmp_path: Path) -> None:
    note = Finding(
        severity="note", layer="launch", code="c", message="x\n::add-mask::y\r\n::error::z%"
    )
    told = console.workflow_command(note, tmp_path)
    assert told == "::notice title=c::x%0A::add-mask::y%0D%0A::error::z%25"


def test_a_command_that_cannot_go_on_answers_in_the_same_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, write: Write
) -> None:
    path = str(write("a.yaml", "stage: sft\nargs: {}\n"))
    for form in ("github", "json"):
        words = [
            "validate-config",
            path,
            "--open-instruct",
            str(tmp_path / "no-checkout"),
            f"--format={form}",
        ]
        assert main(words) == Exit.NOT_READY
        told = capsys.readouterr()
        assert "no-checkout" in told.out and not told.err


def test_one_source_serves_a_thousand_files(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from launcher.upstream import locate as upstream

    looked = []
    locate = upstream.locate
    monkeypatch.setattr(
        upstream, "locate", lambda *given, **named: looked.append(1) or locate(*given, **named)
    )
    paths = [str(write(f"{number}.yaml", MENDED)) for number in range(50)]
    assert main(["validate-config", *paths]) == Exit.OK
    assert len(looked) == 1
    assert capsys.readouterr().out.count(": valid") == 50


def test_a_pipeline_is_judged_with_all_its_stages(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = "stage: {}\nbackend: trl\nargs: {{model_name_or_path: m, dataset_name: d, output_dir: {}{}}}\n"
    write("sft.yaml", stage.format("sft", "one", ""))
    write("dpo.yaml", stage.format("dpo", "two", ", learning_rat: 1"))
    path = write("all.yaml", "stages: [sft.yaml, dpo.yaml]\n")
    assert main(["validate-config", str(path), "--format", "json"]) == Exit.CONFIG
    told = json.loads(capsys.readouterr().out)
    codes = {(one["code"], Path(one["file"]).name, one["line"]) for one in told["findings"]}
    assert {("abbreviated-key", "dpo.yaml", 3), ("pipeline-model", "dpo.yaml", 3)} <= codes


def test_what_is_mended_may_hold_a_token(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    token = "hf_" + "aB3" * 11
    text = WRONG.replace("use_flash_attn: true", f"use_flash_attn: {token}")
    text += "  additional_model_arguments:\n    hub_token: a-password\n"
    for form in ("text", "json", "github"):
        main(["validate-config", "--fix", str(write("a.yaml", text)), "--format", form])
        said = "".join(capsys.readouterr())
        assert token[:20] not in said and "a-password" not in said


def test_a_stage_beside_its_pipeline_is_said_once(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = write(
        "all/sft.yaml", "stage: sft\nbackend: trl\nargs: {dataset_name: d, learning_rat: 1}\n"
    )
    write("all/pipeline.yaml", "gpus: 0\nstages: [{name: sft, config: sft.yaml}]\n")
    assert main(["validate-config", str(stage.parent)]) == Exit.CONFIG
    assert capsys.readouterr().err.count("`learning_rat`") == 1


@pytest.mark.parametrize(
    ("backend", "more", "key"),
    [
        ("trl", "trust_remote_code: true", "trust_remote_code"),
        ("trl", "model_init_kwargs: {trust_remote_code: true}", "model_init_kwargs"),
        ("open_instruct", "trust_remote_code: true", "trust_remote_code"),
        ("trl", "trust_remote_code: false", None),
        ("open_instruct", "use_fast: true", None),
    ],
)
def test_code_of_a_repository_gets_a_note(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], backend: str, more: str, key: str | None
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"stage: sft\nbackend: {backend}\nargs:\n  model_name_or_path: a/b\n  {more}\n")
    main(["validate-config", str(path), "--format", "json"])
    found = json.loads(capfd.readouterr().out)["findings"]
    noted = [(f["severity"], f["key"], f["line"]) for f in found if f["code"] == "remote-code"]
    assert noted == ([] if key is None else [("note", f"args.{key}", 5)])


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        (["learning_rate=1e-5", "batch.global=8"], []),
        (["lerning_rate=1e-5"], ["unknown-key"]),
        (["learning_rate=x"], ["bad-value"]),
    ],
)
def test_overrides_are_judged_with_the_file(
    overrides: list[str], codes: list[str], write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    args = "{model_name_or_path: m, dataset_name: d, output_dir: o}"
    stage = write("sft.yaml", f"stage: sft\nbackend: trl\nargs: {args}\n")
    code = main(["validate-config", str(stage), *overrides, "--format", "json"])
    errors = [
        f for f in json.loads(capsys.readouterr().out)["findings"] if f["severity"] == "error"
    ]
    assert [finding["code"] for finding in errors] == codes
    assert code == (Exit.CONFIG if codes else Exit.OK)
    assert all(finding["override"] == overrides[0] for finding in errors)


def test_an_override_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate-config", "learning_rate=1e-5"]) == Exit.USAGE
    assert "launch validate-config FILE KEY=VALUE" in capsys.readouterr().err
