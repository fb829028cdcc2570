"""A token given anywhere is found nowhere but in the two private files of the run; no text becomes
shell.
"""

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S
from fake_world import World, cmdline, made, needs_trl, until

from launcher import files
from launcher.cli import main
from launcher.lifecycle import on_finish
from launcher.machine import process
from launcher.probe.watching import script
from launcher.report import overview
from launcher.runs import rundir
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder

HF = "hf_" + "aB3" * 11
SK = "sk-proj-" + "a1b2" * 8
GHP = "ghp_" + "a1" * 18
AKIA = "AKIA" + "ABCD" * 4
XOX = "xoxb-1234567890-abcdef"
JWT = "eyJhbGciOiJI.eyJzdWIiOiIx.abc-_def12"
PASSWORD = "s3cret-pass"
URL = f"https://me:{PASSWORD}@host/set"
# of no shape: known by the name of the variable that holds it
WANDB = "0123456789abcdef" * 2 + "01234567"
ODD = "an-odd-token-of-a-company"
SECRETS = (HF, SK, GHP, AKIA, XOX, JWT, PASSWORD, WANDB, ODD)
PRIVATE = {"start.json", "keeper.log"}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with made(tmp_path / "world") as world:
        for name in ("LAUNCH_RUNS", "LAUNCH_CACHE", "LAUNCH_GRACE", "FAKE_WORLD", "FAKE_PIDS"):
            monkeypatch.setenv(name, world.environ[name])
        world.environ |= {
            "WANDB_API_KEY": WANDB, "COMPANY_TOKEN": ODD, "HF_TOKEN": HF,
            "SAID": f"{SK} {GHP} {AKIA} {XOX} {JWT} {URL}",
        }  # fmt: skip
        yield world


def clean(text: str) -> bool:
    told = [text[max(0, at - 200) : at + 60] for one in SECRETS if (at := text.find(one)) >= 0]
    assert not told, told[0]
    return True


def clean_folder(place: Path) -> bool:
    """Whether no file below holds one, but the private ones, which are for their owner alone."""
    for path in place.rglob("*"):
        if not path.is_file():
            continue
        if path.name in PRIVATE or path.name.startswith("console."):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        raw = path.name == "start.json" or path.name.startswith("console.")
        if not raw and path.parent.name != "probe":
            clean(f"{path}: {path.read_bytes().decode(errors='replace')}")
    return True


def without_tokens(world: World) -> dict[str, str]:
    gone = {"WANDB_API_KEY", "COMPANY_TOKEN", "HF_TOKEN", "SAID"}
    return {name: value for name, value in world.environ.items() if name not in gone}


def loud_errors() -> tuple[str, ...]:
    return ("env=WANDB_API_KEY", "env=COMPANY_TOKEN", "env=SAID", "step=1")


def record(folder: RunFolder) -> None:
    events = [
        {"event": "error", "type": "HTTPError", "message": f"401 for {URL}, {HF}, {ODD}, {WANDB}"},
        {"event": "saved", "path": f"out/{GHP}"},
    ]
    with (folder.probe / "rank-0.jsonl").open("a") as stream:
        stream.writelines(rundir.json_line(event) for event in events)


@pytest.mark.slow
@needs_trl
def test_tokens_stay_where_they_are(world: World) -> None:
    config = str(
        world.config(hub_token=HF, run_name=f"see {GHP}", hub_model_id=URL, trackio_space_id=SK)
    )
    words = (config, f"hub_revision={XOX}", f"project={JWT}", "--on-finish", f"true {AKIA} {ODD}")
    python = ("--gpus", "0", "--python", str(world.python()))
    shown = ""
    for form in ("text", "json"):
        done = world.launch("sft", *python, *words[:3], "--dry-run", "--format", form)
        assert done.returncode == 0, done.stderr
        shown += done.stdout + done.stderr
    boom = f"raise=cannot log in with {WANDB} or {ODD} or {HF} at {URL}"
    steps = (*loud_errors(), boom)
    for form in ("text", "json"):
        done = world.trained(*words, "--format", form, steps=steps)
        assert done.returncode == 4, done.stderr
        shown += done.stdout + done.stderr
    folder = rundir.known_runs()[0]
    assert WANDB in folder.console(1).read_text()
    record(folder)
    for form in ("text", "json"):
        for words in (("check", "last"), ("attach", "last"), ("runs",), ("report", "last")):
            # whoever looks later need not have the tokens to know them
            done = world.launch(*words, "--format", form, only=without_tokens(world))
            assert done.returncode in {0, 1, 4}
            shown += done.stdout + done.stderr
    shown += world.launch("logs", "last", only=without_tokens(world)).stdout
    clean(shown)
    clean_folder(world.root / "runs")
    clean_folder(world.root / "state")
    clean_folder(world.root / "cache")


def test_a_run_is_stopped_without_a_word_of_them(world: World) -> None:
    folder = world.prepared(*loud_errors(), "pid=leader", "sleep=600", title=f"sft {GHP}")
    running = world.started("exec", "a run")
    world.pid("leader")
    record(folder)
    shown = world.launch("stop", "a run", "--format", "json").stdout
    out, err = running.communicate(timeout=PATIENCE_S)
    clean(shown + out.decode() + err.decode())
    clean_folder(world.runs)


def test_nobody_sees_them_in_the_list_of_processes(world: World) -> None:
    words = ("echo", HF, ODD)
    folder = world.prepared("pid=leader", f"wait={world.root}/go", on_finish=words)
    running = world.started("exec", "a run")
    world.pid("leader")
    lines = b"\n".join(map(cmdline, world.left()))
    assert b"launcher.lifecycle.supervisor" in lines
    clean(lines.decode())
    (world.root / "go").touch()
    running.communicate(timeout=PATIENCE_S)
    assert stat.S_IMODE(folder.supervisor_log.stat().st_mode) == 0o600
    assert HF in folder.supervisor_log.read_text(), (
        "what the user's own command printed is the user's"
    )


def test_what_cannot_be_called_at_the_end_is_said_without_them(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = world.prepared()
    environ = {"COMPANY_TOKEN": ODD}
    for program in (f"/no/{HF}", f"/no/{ODD}"):
        attempt = Attempt(
            number=1, argv=(), env={}, environ=environ, cwd=str(world.root), stage="sft",
            backend="trl", title="t", on_finish=(program, SK),
        )  # fmt: skip
        assert on_finish.call(folder, attempt, 0) is None
    told = capfd.readouterr().err
    assert "cannot be started" in told
    clean(told)


@needs_trl
@pytest.mark.parametrize(
    "words",
    [
        (f"hub_tokn={HF}",), (f"learning_rate={HF}",), (HF,), (f"deepspeed={SK}",), (f"expect.{AKIA}=x",),
        (f"model_name_or_path=${{{XOX}}}",), ("--on-finish", f"'{SK}"), ("--python", f"/no/{GHP}"),
        (f"dataset_name={URL}", "max_steps=x"),
    ],
)  # fmt: skip
def test_an_error_does_not_repeat_them(
    world: World,
    words: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = world.config(name="a.yaml")
    monkeypatch.chdir(world.root)
    for form in ("text", "json"):
        given = ["sft", str(config), "--gpus", "0", "--dry-run", *words, "--format", form]
        assert main.main(given) in {0, 2, 3, 5}
        told = capfd.readouterr()
        clean(told.out + told.err)


@pytest.mark.parametrize(
    "text", [f"args: {{hub_token: [{HF}", f"a: b: {SK}", f"stage: {AKIA}\nargs: {{}}"]
)
def test_a_file_that_cannot_be_read_is_not_quoted(
    world: World, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = world.root / "a.yaml"
    path.write_text(text)
    for form in ("text", "json", "github"):
        assert main.main(["validate-config", str(path), "--format", form]) == 3
    told = capfd.readouterr()
    clean(told.out + told.err)


def test_a_bug_is_reported_without_them(
    world: World, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_folders: list[RunFolder]) -> list[dict[str, Any]]:
        raise RuntimeError(f"{HF} {URL} {ODD}")

    world.prepared()
    monkeypatch.setenv("COMPANY_TOKEN", ODD)
    monkeypatch.setattr(overview, "list_rows", broken)
    assert main.main(["runs", "--format", "json"]) == 70
    monkeypatch.setattr(rundir, "state_folder", lambda: Path("/dev/null/none"))
    assert main.main(["runs", "--format", "json"]) == 70
    told = capfd.readouterr()
    assert "RuntimeError" in told.err
    clean(told.out + told.err)
    bugs = list(Path(os.environ["XDG_STATE_HOME"]).rglob("bug-*.txt"))
    assert len(bugs) == 1
    clean(bugs[0].read_text())


def test_an_address_with_a_key_in_it_is_listed_without(world: World) -> None:
    folder = world.prepared()
    files.write_json(folder.manifest, {"tracked": True, **rundir.read_manifest(folder)})
    folder.console(1).write_text(
        f"wandb: View run at https://wandb.ai/anony/p/runs/abc?apiKey={WANDB}\n"
    )
    (row,) = json.loads(
        world.launch("runs", "--format", "json", only=without_tokens(world)).stdout
    )["data"]
    assert row["wandb"].startswith("https://wandb.ai/anony/p/runs/abc")
    clean(json.dumps(row))


SHELL = "$(touch pwned)`touch pwned`;touch pwned\ntouch pwned '\" && touch pwned | touch pwned #(touch pwned)"


@needs_trl
def test_a_dry_run_can_be_pasted(world: World) -> None:
    config = world.config(run_name=SHELL, output_dir=f"out {SHELL}", hub_model_id=SHELL)
    done = world.launch(
        "sft", str(config), f"project={SHELL}", f"name={SHELL}", "--gpus", "0", "--dry-run",
        "--python", str(world.python()),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    env = {**world.environ, "FAKE_STEPS": "[]"}
    pasted = subprocess.run(
        ["bash", "-c", done.stdout],
        cwd=world.root,
        env=env,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert pasted.returncode == 0, pasted.stderr
    argv = json.loads((world.root / "argv.json").read_text())
    for flag in ("--run_name", "--project", "--hub_model_id"):
        assert argv[argv.index(flag) + 1] == SHELL
    assert not list(world.root.rglob("pwned"))


def test_what_is_called_at_the_end_is_given_to_no_shell(world: World) -> None:
    folder = world.prepared(
        "exit=0", on_finish=("touch", "--", SHELL.replace("/", "")), env={"X": SHELL}, name="a run"
    )
    assert world.launch("exec", "a run").returncode == 1
    until(lambda: (world.root / SHELL).exists())
    assert not list(world.root.rglob("pwned"))
    assert not process.ProcessTree(None, str(folder.path)).living()


def test_what_the_log_says_is_not_taken_for_markup(world: World) -> None:
    folder = world.prepared("raise=<script>alert(1)</script>[red]x[/red]$(touch pwned)")
    done = world.launch("exec", "a run")
    assert "[red]x[/red]" in done.stdout
    assert "<script>alert(1)" not in folder.report.read_text()
    assert not list(world.root.rglob("pwned"))


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("words", [(HF,), ("sft", "x.yaml", "--gpus", SK), ("runs", GHP)])
def test_a_command_line_that_cannot_be_parsed_repeats_none(
    capfd: pytest.CaptureFixture[str], words: tuple[str, ...], form: str
) -> None:
    assert main.main([*words, "--format", form]) == 2
    shown = "".join(capfd.readouterr())
    assert clean(shown) and "<redacted>" in shown


@pytest.mark.slow
@needs_trl
def test_no_command_line_holds_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {
        "DB_PASS": "hunter2",
        "SOMETHING": "x9-y8-z7",
        "MY_HUB": "my-hub-token-1",
        "SCRATCH": "out",
    }
    del world.environ["HF_TOKEN"]
    world.environ |= held
    config = world.config(
        hub_token="${oc.env:MY_HUB}", run_name="at-${oc.env:DB_PASS}", project="${oc.env:SOMETHING}",
        hub_model_id=URL, output_dir="${oc.env:SCRATCH}/model",
    )  # fmt: skip
    running = world.started(
        "sft", str(config), "--gpus", "0", "--python", str(world.python()),
        env={"FAKE_STEPS": json.dumps(["pid=leader", f"wait={world.root}/go"])},
    )  # fmt: skip
    world.pid("leader")
    lines = b"\n".join(map(cmdline, world.left())).decode()
    (folder,) = rundir.known_runs()
    (world.root / "go").touch()
    running.communicate(timeout=PATIENCE_S)
    start = rundir.read_json(folder.start)
    monkeypatch.setattr(os, "environ", {**os.environ, **start["env"]})
    argv = [script.word(one) for one in json.loads((world.root / "argv.json").read_text())]
    for flag, value in (
        ("--run_name", "at-hunter2"),
        ("--project", "x9-y8-z7"),
        ("--hub_model_id", URL),
    ):
        assert argv[argv.index(flag) + 1] == value
    assert "--hub_token" not in argv
    assert start["env"]["HF_TOKEN"] == "my-hub-token-1"
    told = {"ps": lines, "start": json.dumps(start["argv"])}
    told |= {p.name: p.read_text() for p in (folder.manifest, folder.stage_file, folder.report)}
    for form in ("text", "json"):
        dry = world.launch("sft", str(config), "--gpus", "0", "--dry-run", "--format", form)
        told[f"dry run {form}"] = dry.stdout + dry.stderr
    for place, text in told.items():
        for one in ("hunter2", "x9-y8-z7", "my-hub-token-1", PASSWORD):
            assert one not in text, (place, one)
    assert "run_name: at-${oc.env:DB_PASS}" in told["stage.yaml"]
    assert "out/model" in told["run.json"]
    assert 'LAUNCH_ARG_PROJECT="$SOMETHING"' in told["dry run text"]
    assert 'HF_TOKEN="$MY_HUB"' in told["dry run text"]


@needs_trl
def test_a_secret_that_no_probe_could_hand_over_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DB_PASS", "hunter2")
    config = world.config(project="${oc.env:DB_PASS}")
    words = ["sft", str(config), "--gpus", "0", "--dry-run", "--python", str(world.python())]
    assert main.main([*words, "--no-probe"]) == 3
    shown = "".join(capfd.readouterr())
    line = next(n for n, text in enumerate(config.read_text().splitlines(), 1) if "DB_PASS" in text)
    assert "error[exposed-secret]" in shown and f"{config}:{line}" in shown
    assert "hunter2" not in shown
    assert main.main([*words, f"hub_revision={GHP}"]) == 0
    assert "warning[exposed-secret]: `hub_revision`" in "".join(capfd.readouterr())
