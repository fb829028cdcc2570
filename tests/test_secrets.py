"""Tokens are found nowhere but in private files of the run; no text becomes shell."""

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE_S
from fake_world import World, needs_trl, open_world, read_cmdline, wait_until

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
VARIABLES = {
    "WANDB_API_KEY": WANDB,
    "COMPANY_TOKEN": ODD,
    "HF_TOKEN": HF,
    "NOTES": f"{SK} {GHP} {AKIA} {XOX} {JWT} {URL}",
}
PRINT_VARIABLES = ("env=WANDB_API_KEY", "env=COMPANY_TOKEN", "env=NOTES", "step=1")
"""Steps of the fake trainer that print the variables."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        for name in ("LAUNCH_RUNS", "LAUNCH_CACHE", "LAUNCH_GRACE", "FAKE_WORLD", "FAKE_PIDS"):
            monkeypatch.setenv(name, world.environ[name])
        world.environ |= VARIABLES
        yield world


def without_variables(world: World) -> dict[str, str]:
    """The environment of somebody who looks later and has no tokens."""
    return {name: value for name, value in world.environ.items() if name not in VARIABLES}


def require_clean(text: str) -> None:
    for secret in SECRETS:
        place = text.find(secret)
        assert place < 0, text[max(0, place - 200) : place + 60]


def require_clean_folder(folder: Path) -> None:
    """No file below holds a secret, but for the private ones, which only their owner may read."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        is_console = path.name.startswith("console.")
        if is_console or path.name in ("start.json", "keeper.log"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        if is_console or path.name == "start.json" or path.parent.name == "probe":
            continue
        require_clean(f"{path}: {path.read_bytes().decode(errors='replace')}")


def record_events(folder: RunFolder) -> None:
    """Events of the probe that quote tokens."""
    message = f"401 for {URL}, {HF}, {ODD}, {WANDB}"
    events = [
        {"event": "error", "type": "HTTPError", "message": message},
        {"event": "saved", "path": f"out/{GHP}"},
    ]
    with (folder.probe / "rank-0.jsonl").open("a") as stream:
        stream.writelines(rundir.render_json_line(event) for event in events)


def output_of(result: subprocess.CompletedProcess[str]) -> str:
    return result.stdout + result.stderr


@pytest.mark.slow
@needs_trl
def test_a_run_shows_and_keeps_no_tokens(world: World) -> None:
    config = world.config(
        hub_token=HF, run_name=f"see {GHP}", hub_model_id=URL, trackio_space_id=SK
    )
    overrides = (str(config), f"hub_revision={XOX}", f"project={JWT}")
    cpu = ("--gpus", "0", "--python", str(world.python()))
    for form in ("text", "json"):
        result = world.launch("sft", *cpu, *overrides, "--dry-run", "--format", form)
        assert result.returncode == 0, result.stderr
        require_clean(output_of(result))

    steps = (*PRINT_VARIABLES, f"raise=cannot log in with {WANDB} or {ODD} or {HF} at {URL}")
    ending = ("--on-finish", f"true {AKIA} {ODD}")
    for form in ("text", "json"):
        result = world.trained(*overrides, *ending, "--format", form, steps=steps)
        assert result.returncode == 4, result.stderr
        require_clean(output_of(result))

    folder = rundir.list_known_runs()[0]
    assert WANDB in folder.console(1).read_text()
    record_events(folder)
    later = without_variables(world)
    for form in ("text", "json"):
        for words in (("check", "last"), ("attach", "last"), ("runs",), ("report", "last")):
            result = world.launch(*words, "--format", form, only=later)
            assert result.returncode in {0, 1, 4}
            require_clean(output_of(result))
    require_clean(world.launch("logs", "last", only=later).stdout)
    for name in ("runs", "state", "cache"):
        require_clean_folder(world.root / name)


def test_a_run_is_stopped_without_a_word_of_them(world: World) -> None:
    steps = (*PRINT_VARIABLES, "pid=leader", "sleep=600")
    folder = world.prepared(*steps, title=f"sft {GHP}")
    running = world.started("exec", "a run")
    world.pid("leader")
    record_events(folder)
    require_clean(world.launch("stop", "a run", "--format", "json").stdout)
    out, err = running.communicate(timeout=PATIENCE_S)
    require_clean(out.decode() + err.decode())
    require_clean_folder(world.runs)


def command_lines(world: World) -> str:
    """The command lines of all processes of a run."""
    return b"\n".join(map(read_cmdline, world.left())).decode()


def test_nobody_sees_them_in_the_list_of_processes(world: World) -> None:
    steps = ("pid=leader", f"wait={world.root}/go")
    folder = world.prepared(*steps, on_finish=("echo", HF, ODD))
    running = world.started("exec", "a run")
    world.pid("leader")
    lines = command_lines(world)
    assert "launcher.lifecycle.supervisor" in lines
    require_clean(lines)
    (world.root / "go").touch()
    running.communicate(timeout=PATIENCE_S)
    # what the user's own command printed is the user's
    assert stat.S_IMODE(folder.supervisor_log.stat().st_mode) == 0o600
    assert HF in folder.supervisor_log.read_text()


@pytest.mark.parametrize("program", [f"/no/{HF}", f"/no/{ODD}"])
def test_a_command_that_cannot_be_called_at_the_end_is_not_quoted(
    world: World, capfd: pytest.CaptureFixture[str], program: str
) -> None:
    attempt = Attempt(
        number=1,
        argv=(),
        env={},
        environ={"COMPANY_TOKEN": ODD},
        cwd=str(world.root),
        stage="sft",
        backend="trl",
        title="t",
        on_finish=(program, SK),
    )
    assert on_finish.call(world.prepared(), attempt, 0) is None
    stderr = capfd.readouterr().err
    assert "cannot be started" in stderr
    require_clean(stderr)


@needs_trl
@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "words",
    [
        [f"hub_tokn={HF}"],
        [f"learning_rate={HF}"],
        [HF],
        [f"deepspeed={SK}"],
        [f"expect.{AKIA}=x"],
        [f"model_name_or_path=${{{XOX}}}"],
        ["--on-finish", f"'{SK}"],
        ["--python", f"/no/{GHP}"],
        [f"dataset_name={URL}", "max_steps=x"],
    ],
)
def test_an_error_does_not_repeat_them(
    world: World,
    words: list[str],
    form: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = str(world.config(name="a.yaml"))
    monkeypatch.chdir(world.root)
    command = ["sft", config, "--gpus", "0", "--dry-run", *words, "--format", form]
    assert main.main(command) in {0, 2, 3, 5}
    require_clean("".join(capfd.readouterr()))


@pytest.mark.parametrize("form", ["text", "json", "github"])
@pytest.mark.parametrize(
    "text", [f"args: {{hub_token: [{HF}", f"a: b: {SK}", f"stage: {AKIA}\nargs: {{}}"]
)
def test_a_file_that_cannot_be_read_is_not_quoted(
    tmp_path: Path, text: str, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert main.main(["validate-config", str(path), "--format", form]) == 3
    require_clean("".join(capfd.readouterr()))


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("words", [[HF], ["sft", "x.yaml", "--gpus", SK], ["runs", GHP]])
def test_a_command_line_that_cannot_be_parsed_is_not_repeated(
    capfd: pytest.CaptureFixture[str], words: list[str], form: str
) -> None:
    assert main.main([*words, "--format", form]) == 2
    output = "".join(capfd.readouterr())
    require_clean(output)
    assert "<redacted>" in output


def test_a_bug_is_reported_without_them(
    world: World, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_folders: list[RunFolder]) -> None:
        raise RuntimeError(f"{HF} {URL} {ODD}")

    world.prepared()
    monkeypatch.setenv("COMPANY_TOKEN", ODD)
    monkeypatch.setattr(overview, "list_rows", fail)
    assert main.main(["runs", "--format", "json"]) == 70
    # where the report cannot be written, it is printed
    monkeypatch.setattr(rundir, "find_state_folder", lambda: Path("/dev/null/none"))
    assert main.main(["runs", "--format", "json"]) == 70
    streams = capfd.readouterr()
    assert "RuntimeError" in streams.err
    require_clean(streams.out + streams.err)
    (report,) = Path(os.environ["XDG_STATE_HOME"]).rglob("bug-*.txt")
    require_clean(report.read_text())


def test_an_address_is_listed_without_the_key_in_it(world: World) -> None:
    folder = world.prepared()
    files.write_json(folder.manifest, {"tracked": True, **rundir.read_manifest(folder)})
    address = "https://wandb.ai/anony/p/runs/abc"
    folder.console(1).write_text(f"wandb: View run at {address}?apiKey={WANDB}\n")
    result = world.launch("runs", "--format", "json", only=without_variables(world))
    (row,) = json.loads(result.stdout)["data"]
    assert row["wandb"].startswith(address)
    require_clean(result.stdout)


# -- texts that a shell would run

SHELL = (
    "$(touch pwned)`touch pwned`;touch pwned\ntouch pwned '\" && touch pwned | touch pwned "
    "#(touch pwned)"
)


def argument(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


@needs_trl
def test_a_dry_run_can_be_pasted(world: World) -> None:
    config = world.config(run_name=SHELL, output_dir=f"out {SHELL}", hub_model_id=SHELL)
    words = (str(config), f"project={SHELL}", f"name={SHELL}", "--gpus", "0", "--dry-run")
    result = world.launch("sft", *words, "--python", str(world.python()))
    assert result.returncode == 0, result.stderr
    pasted = subprocess.run(
        ["bash", "-c", result.stdout],
        cwd=world.root,
        env={**world.environ, "FAKE_STEPS": "[]"},
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert pasted.returncode == 0, pasted.stderr
    argv = json.loads((world.root / "argv.json").read_text())
    for flag in ("--run_name", "--project", "--hub_model_id"):
        assert argument(argv, flag) == SHELL
    assert not list(world.root.rglob("pwned"))


def test_what_is_called_at_the_end_is_given_to_no_shell(world: World) -> None:
    folder = world.prepared("exit=0", on_finish=("touch", "--", SHELL), env={"X": SHELL})
    assert world.launch("exec", "a run").returncode == 1
    wait_until(lambda: (world.root / SHELL).exists())
    assert not list(world.root.rglob("pwned"))
    assert not process.ProcessTree(None, str(folder.path)).living()


def test_what_the_log_says_is_not_taken_for_markup(world: World) -> None:
    folder = world.prepared("raise=<script>alert(1)</script>[red]x[/red]$(touch pwned)")
    assert "[red]x[/red]" in world.launch("exec", "a run").stdout
    assert "<script>alert(1)" not in folder.report.read_text()
    assert not list(world.root.rglob("pwned"))


# -- values that the stage file takes from the environment


@pytest.mark.slow
@needs_trl
def test_a_borrowed_value_reaches_the_training_and_no_command_line(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    del world.environ["HF_TOKEN"]
    borrowed = {"DB_PASS": "hunter2", "SOMETHING": "x9-y8-z7", "MY_HUB": "my-hub-token-1"}
    world.environ |= {**borrowed, "SCRATCH": "out"}
    config = str(
        world.config(
            hub_token="${oc.env:MY_HUB}",
            run_name="at-${oc.env:DB_PASS}",
            project="${oc.env:SOMETHING}",
            hub_model_id=URL,
            output_dir="${oc.env:SCRATCH}/model",
        )
    )
    steps = json.dumps(["pid=leader", f"wait={world.root}/go"])
    words = ("sft", config, "--gpus", "0", "--python", str(world.python()))
    running = world.started(*words, env={"FAKE_STEPS": steps})
    world.pid("leader")
    texts = {"processes": command_lines(world)}
    (folder,) = rundir.list_known_runs()
    (world.root / "go").touch()
    running.communicate(timeout=PATIENCE_S)

    # the training gets the values
    start = rundir.read_json(folder.start)
    monkeypatch.setattr(os, "environ", {**os.environ, **start["env"]})
    recorded = json.loads((world.root / "argv.json").read_text())
    argv = [script.resolve_word(word) for word in recorded]
    assert argument(argv, "--run_name") == "at-hunter2"
    assert argument(argv, "--project") == "x9-y8-z7"
    assert argument(argv, "--hub_model_id") == URL
    assert "--hub_token" not in argv
    assert start["env"]["HF_TOKEN"] == "my-hub-token-1"

    # and nothing else does
    texts["argv"] = json.dumps(start["argv"])
    for path in (folder.manifest, folder.stage_file, folder.report):
        texts[path.name] = path.read_text()
    for form in ("text", "json"):
        dry_run = world.launch("sft", config, "--gpus", "0", "--dry-run", "--format", form)
        texts[f"dry run {form}"] = output_of(dry_run)
    for place, text in texts.items():
        for value in (*borrowed.values(), PASSWORD):
            assert value not in text, place
    assert "run_name: at-${oc.env:DB_PASS}" in texts["stage.yaml"]
    assert "out/model" in texts["run.json"]
    assert 'LAUNCH_ARG_PROJECT="$SOMETHING"' in texts["dry run text"]
    assert 'HF_TOKEN="$MY_HUB"' in texts["dry run text"]


@needs_trl
def test_a_borrowed_value_that_no_probe_could_hand_over_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DB_PASS", "hunter2")
    config = world.config(project="${oc.env:DB_PASS}")
    words = ["sft", str(config), "--gpus", "0", "--dry-run", "--python", str(world.python())]
    assert main.main([*words, "--no-probe"]) == 3
    output = "".join(capfd.readouterr())
    before, _, _ = config.read_text().partition("${oc.env:DB_PASS}")
    assert "error[exposed-secret]" in output
    assert f"{config}:{before.count(chr(10)) + 1}" in output
    assert "hunter2" not in output


@needs_trl
def test_a_token_in_an_override_gets_a_warning(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["sft", str(world.config()), "--gpus", "0", "--dry-run"]
    words += ["--python", str(world.python()), f"hub_revision={GHP}"]
    assert main.main(words) == 0
    assert "warning[exposed-secret]: `hub_revision`" in "".join(capfd.readouterr())
