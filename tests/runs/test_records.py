"""Records that somebody edited, damaged or copied: what does not fit is left out and reported.

No damage ends a command, and no record makes launch end or delete what is not the run's.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_runs
import pytest
import saved
from conftest import DATA
from record_fuzz import Fuzz, Scene, Sleeper, dumped

from launcher import files
from launcher.cache import folders, keys
from launcher.cli import main
from launcher.errors import NotReady
from launcher.machine import codec, process
from launcher.machine.codec import Count, Misfit
from launcher.report import overview
from launcher.runs import events, lease, rundir, runner, slurm
from launcher.runs.lease import Lease
from launcher.runs.rundir import RunFolder

Capture = pytest.CaptureFixture[str]

OVER = "20260101T000000Z-dpo-over"
LIVE = "20260102T000000Z-dpo-live"
HEALTHY = "20260103T000000Z-dpo-healthy"

SEED = int(os.environ.get("SEED", "1"))
NUMBER = int(os.environ.get("N", "100"))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_GRACE", "0,0,0")
    monkeypatch.setattr(runner, "GRACE_S", (0.0, 0.0, 0.0))
    overview._list_marks.cache_clear()


def make_run(name: str = OVER, *, ended: bool = True, **changes: Any) -> RunFolder:
    path = rundir.find_runs_root() / name
    changes = {"cwd": str(Path.cwd()), "output": str(path / "model"), **changes}
    manifest = made_runs.manifest(**changes)
    return RunFolder(made_runs.write_run(path, record=manifest, ended=ended))


@pytest.fixture
def live() -> Iterator[Sleeper]:
    """A run with a process that stands for its training."""
    sleeper = Sleeper(make_run(LIVE, ended=False))
    yield sleeper
    sleeper.end()


def add_lines(folder: RunFolder, *lines: str) -> None:
    record = folder.probe / "rank-0.jsonl"
    with record.open("a", encoding="utf-8", errors="surrogatepass") as stream:
        for line in lines:
            stream.write(f"{line}\n")


def manifest_of(folder: RunFolder) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(folder.manifest.read_text())
    return content


def launch(*words: str) -> int:
    return main.main(list(words))


def answer_of(capsys: Capture, *words: str) -> Any:
    """The data of a command's JSON answer."""
    capsys.readouterr()
    overview._list_marks.cache_clear()
    launch(*words, "--format", "json")
    return json.loads(capsys.readouterr().out)["data"]


def states(capsys: Capture) -> dict[str, str]:
    return {row["run"]: row["state"] for row in answer_of(capsys, "runs")}


def point_of(capsys: Capture, name: str) -> dict[str, Any]:
    """A point of the verdict of the finished run."""
    points = {point["name"]: point for point in answer_of(capsys, "check", OVER)["points"]}
    return points[name]


# Lines of the probe


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(
            [
                '{"event": {}}',
                '{"event": []}',
                '{"event": 1}',
                '{"event": null}',
                '{"event": {"event": "step"}}',
            ],
            id="no event",
        ),
        pytest.param(
            [
                '{"event": "step", "step": {}, "loss": 1}',
                '{"event": "step", "step": true}',
                '{"event": "step", "step": 1.5}',
                '{"event": "step", "step": -4, "loss": 1}',
                '{"event": "step", "step": 41, "loss": []}',
                '{"event": "step", "step": 41, "loss": 1e400, "elapsed": Infinity, "t": 1e400}',
            ],
            id="step",
        ),
        pytest.param(
            [
                '{"event": "start", "world": {}, "attempt": []}',
                '{"event": "start", "world": -1, "attempt": 1e400}',
            ],
            id="start",
        ),
        pytest.param(
            [
                '{"event": "end", "exit": {}}',
                '{"event": "end", "exit": "0"}',
                '{"event": "end", "exit": ' + "9" * 5000 + "}",
            ],
            id="end",
        ),
        pytest.param(
            [
                '{"event": "liger", "calls": []}',
                '{"event": "liger", "calls": {"rope": {}}}',
                '{"event": "device", "name": []}',
                '{"event": "packing", "state": {}}',
                '{"event": "model", "attention": "\\ud800"}',
                '{"event": "memory", "phase": {}}',
                '{"event": "dataset_cache", "state": "miss", "path": "a\\u0000b"}',
            ],
            id="model and data",
        ),
        pytest.param(
            [
                '{"event": "gradients", "state": []}',
                '{"event": "gradients", "state": "true", "checks": {}, "largest_error": "x"}',
                '{"event": "weights", "sampled": 1e400, "moved": NaN}',
                '{"event": "weights", "sampled": 0, "moved": -1}',
                '{"event": "nonfinite", "step": "1", "what": [], "value": {}}',
            ],
            id="checks",
        ),
        pytest.param(
            [
                '{"event": "violation", "stopped": "yes"}',
                '{"event": "error", "type": {}, "message": []}',
                '{"event": "resumed", "step": [], "path": 7}',
                '{"event": "saved", "path": {}, "t": "now"}',
                '{"event": "saved_model", "path": "/", "files": [1, {}, {"name": []}]}',
                '{"event": "saved_model", "path": "/", "files": [{"name": "../../etc/passwd"}]}',
            ],
            id="what happened",
        ),
    ],
)
def test_a_line_that_does_not_fit_ends_no_command(
    live: Sleeper, lines: list[str], capsys: Capture
) -> None:
    for run in (live.folder, make_run()):
        add_lines(run, *lines)

    assert states(capsys) == {OVER: "finished", LIVE: "running"}
    assert launch("check", OVER) in (0, 1)
    assert launch("report", OVER) == 0
    assert launch("attach", OVER) in (0, 1, 4)
    assert launch("stop", LIVE) == 0
    assert not live.is_alive()


def test_each_kind_of_misfit_is_reported_once(capsys: Capture) -> None:
    folder = make_run(output=7, args={"a": 1})
    add_lines(folder, '{"event": "liger", "calls": []}', '{"event": {}}')

    launch("check", OVER)

    err = capsys.readouterr().err
    assert "warning[damaged-record]: `output` is 7, not a text or null, and 1 more like it" in err
    assert "warning[damaged-record]: `calls` is [], not a mapping, and 1 more like it" in err
    assert f"{folder.probe / 'rank-0.jsonl'}:44" in err


# Manifests


@pytest.mark.parametrize(
    "name", ["expect", "plan", "args", "output", "resume", "contents", "stage", "deepspeed"]
)
def test_a_manifest_of_other_types_ends_no_command(name: str, capsys: Capture) -> None:
    folder = make_run()
    content = manifest_of(folder)
    for value in (None, -1, "@1e400", "@digits", "a\0b", "\ud800", "x" * 5000, [[]], {"a": {}}):
        folder.manifest.write_text(dumped({**content, name: value}))
        assert OVER in states(capsys)
        for word in ("check", "stop"):
            assert launch(word, OVER) in (0, 1, 2), (word, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", {}),
        ("liger", []),
        ("finish", 3),
        ("batch", True),
        ("trend", "@nan"),
        ("loss", {"a": 1}),
    ],
)
def test_an_expectation_that_is_no_word_is_never_met(
    name: str, value: object, capsys: Capture
) -> None:
    folder = make_run()
    content = manifest_of(folder)
    content["expect"][name] = value
    folder.manifest.write_text(dumped(content))

    assert launch("check", OVER) == 1
    point = point_of(capsys, name)
    assert point["expected"] == "unknown"
    assert point["ok"] is None
    assert launch("report", OVER) == 0


def test_a_run_that_cannot_be_read_is_a_row_with_the_reason(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run()
    make_run(HEALTHY)
    read = overview._read_lasting_columns

    def fail_for_one(folder: RunFolder, manifest: Any) -> dict[str, Any]:
        if folder.path.name == OVER:
            raise RuntimeError("an unforeseen error")
        return read(folder, manifest)

    monkeypatch.setattr(overview, "_read_lasting_columns", fail_for_one)

    assert states(capsys) == {OVER: "unknown", HEALTHY: "finished"}
    assert launch("runs") == 0
    assert "an unforeseen error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, 3.0, 3),
        (int, True, None),
        (int, 3.5, None),
        (int, "3", None),
        (int, float("inf"), None),
        (float, 1, 1),
        (float, False, None),
        (bool, 1, None),
        (str, 1, None),
        (str | None, None, None),
        (Count, -1, None),
        (Count, 0, 0),
        (Count, 1e300, None),
        (Path, "a/b", Path("a/b")),
        (Path, "x" * 300, None),
        (Path, "", None),
        (list[int], [1, "a", None, 2], [1, 2]),
        (list[int], {}, None),
        (tuple[str, ...], ["a"], ("a",)),
        (dict[str, int], {"a": 1, "b": "x"}, {"a": 1}),
        (dict[str, int], [], None),
    ],
)
def test_the_codec_takes_a_value_or_leaves_it(kind: Any, value: object, expected: object) -> None:
    assert codec.fit_value(value, kind) == expected


def test_an_optional_field_that_does_not_fit_is_left_out() -> None:
    left_out: list[codec.Omission] = []
    identity = {**process.identify(os.getpid()).as_json(), "namespace": "x"}
    assert codec.read_record(process.Identity, identity, left_out).namespace is None
    assert list(map(str, left_out)) == ["`namespace` is 'x', not a whole number or null"]


@pytest.mark.parametrize(
    "damage", [{"pid": 0}, {"pid": -3}, {"pid": 2**40}, {"pid": True}, {"pid": "1"}, {"host": None}]
)
def test_a_record_without_a_required_field_is_none(damage: dict[str, object]) -> None:
    identity = process.identify(os.getpid()).as_json()
    assert process.parse_identity({**identity, **damage}) is None


def test_a_list_is_no_record() -> None:
    with pytest.raises(Misfit):
        codec.read_record(process.Identity, [])


def test_an_event_with_a_field_that_does_not_fit_is_none() -> None:
    assert events.parse_event(b'{"event": "step", "step": 1, "loss": "low"}') is None


def test_no_text_of_a_record_is_one_that_no_path_can_be() -> None:
    line = rb'{"a": "x\u0000y", "\ud800": ["\udfff", "\udc80", "\ud83d\ude00"]}'
    assert files.parse_line(line) == {"a": "x�y", "�": ["�", "\udc80", "😀"]}


# Processes


def record_process(run: RunFolder, pid: int, /, **changes: object) -> None:
    """Have the record of a run name a process."""
    content = {
        **process.identify(pid).as_json(),
        "mark": str(run.path),
        "attempt": 1,
        "started": rundir.format_utc_now(),
        **changes,
    }
    run.process.unlink(missing_ok=True)
    files.write_bytes(run.process, json.dumps(content).encode(), mode=0o600)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user that belongs to no run."""
    environ = dict(os.environ)
    environ.pop(process.MARK, None)
    child = subprocess.Popen(["sleep", "600"], env=environ, start_new_session=True)
    yield child
    child.kill()
    child.wait()


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_the_owner_can_write_what_names_processes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    umask = os.umask(0o002)
    try:
        runner.run(runner.Command(argv=("true",), env={}, cwd=tmp_path), folder, 1)
        runner.StopRequest(attempt=1).write(folder)
        held = lease.acquire(tmp_path / "out", folder.path)
    finally:
        os.umask(umask)
    assert mode_of(folder.process) == 0o600
    assert mode_of(folder.stop) == 0o600
    assert mode_of(held.path) == 0o644


@pytest.mark.parametrize("mode", [0o600, 0o664])
@pytest.mark.parametrize("as_supervisor", [False, True])
@pytest.mark.parametrize("mark", ["", "/elsewhere"])
def test_stop_ends_no_process_that_is_not_of_the_run(
    bystander: subprocess.Popen[bytes], mode: int, as_supervisor: bool, mark: str, capsys: Capture
) -> None:
    folder = make_run(LIVE, ended=False)
    changes: dict[str, object] = {"mark": mark or str(folder.path)}
    if as_supervisor:
        changes["keeper"] = process.identify(bystander.pid).as_json()
    record_process(folder, bystander.pid, **changes)
    folder.process.chmod(mode)

    assert launch("stop", LIVE) == 5

    assert "error[not-your-process]" in capsys.readouterr().err
    assert bystander.poll() is None


def test_a_process_of_another_run_is_not_ended(live: Sleeper, capsys: Capture) -> None:
    record_process(make_run(HEALTHY, ended=False), live.child.pid)

    assert launch("stop", HEALTHY) == 2

    assert states(capsys) == {LIVE: "running", HEALTHY: "finished"}
    assert live.is_alive()


def test_a_process_with_the_mark_of_the_run_is_ended_whatever_its_record(live: Sleeper) -> None:
    live.folder.process.chmod(0o666)

    assert launch("stop", LIVE) == 0

    assert not live.is_alive()


def test_a_copy_of_a_live_run_has_no_processes(live: Sleeper, capsys: Capture) -> None:
    copy = live.folder.path.with_name("20260109T000000Z-dpo-copy")
    subprocess.run(["cp", "-a", str(live.folder.path), str(copy)], check=True)

    for word in ("stop", "attach"):
        assert launch(word, copy.name) == 5
        message = f"error[run-is-a-copy]: {copy.name} is a copy of {live.folder.path}"
        assert message in capsys.readouterr().err
    # the probe had recorded its end before the copy was made
    assert states(capsys) == {LIVE: "running", copy.name: "finished"}
    assert live.is_alive()

    link = live.folder.path.with_name("link")
    link.symlink_to(live.folder.path)
    assert launch("stop", str(link)) == 0
    assert not live.is_alive()


def test_a_run_that_was_moved_is_stopped(live: Sleeper) -> None:
    status = live.folder.path.stat()
    record_process(live.folder, live.child.pid, folder=[status.st_dev, status.st_ino])
    moved = live.folder.path.rename(live.folder.path.with_name("20260109T000000Z-dpo-moved"))

    assert launch("stop", moved.name) == 0

    assert not live.is_alive()


# Jobs


@pytest.mark.parametrize("job", ["1; rm -rf /", "-1", "٣", "", "../1", {}, 7, None, "9" * 400])
def test_what_is_no_number_is_no_job(job: object) -> None:
    folder = make_run()
    files.write_json(folder.job, {"job": job})
    assert slurm.find_job(folder) is None


def test_a_job_is_that_of_the_run_itself() -> None:
    folder = make_run()
    files.write_json(folder.job, {"job": "12", "run": str(make_run(HEALTHY).path)})
    assert slurm.find_job(folder) is None

    files.write_json(folder.job, {"job": "12", "run": str(folder.path)})
    assert slurm.find_job(folder) == "12"

    folder.job.chmod(0o666)
    with pytest.raises(NotReady, match="can be written by others"):
        slurm.require_own(folder)


@pytest.mark.parametrize(
    ("log", "state", "finish"),
    [
        ("Traceback (most recent call last):\nKeyboardInterrupt\n", "stopped", "stopped"),
        ("boom\n", "failed", "crashed"),
    ],
)
def test_runs_and_check_agree_if_only_the_probe_recorded_the_end(
    log: str, state: str, finish: str, capsys: Capture
) -> None:
    """The folder became read-only; the probe had its file open."""
    path = made_runs.write_run(rundir.find_runs_root() / OVER, steps=20, ended=False, extra=log)
    record = path / "probe" / "rank-0.jsonl"
    lines = record.read_text().splitlines()[:-1]
    record.write_text("\n".join([*lines, '{"event": "end", "exit": 1}', ""]))

    assert states(capsys) == {OVER: state}
    assert point_of(capsys, "finish")["state"] == finish


# Leases


def write_stray_lease(output: Path, number: int) -> Path:
    """An old file with the name of a lease."""
    stray = output / lease.FOLDER / f"lease-{number}.json"
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_text("{}")
    os.utime(stray, (0, 0))
    return stray


@pytest.mark.parametrize(
    "name",
    [
        "lease-999999999",
        "lease-99999999999",
        "lease-" + "9" * 200,
        "lease-2",
        "lease-0",
        "lease-007",
        "lease--5",
        "lease-٣",
        "lease-1e9",
        "lease-",
    ],
)
@pytest.mark.parametrize("content", ["copy", "", "{}", "[]", "folder", "link"])
def test_a_file_that_is_no_lease_ends_no_training(tmp_path: Path, name: str, content: str) -> None:
    held = lease.acquire(tmp_path, tmp_path / "run")
    stray = held.path.with_name(f"{name}.json")
    if content == "folder":
        stray.mkdir()
    elif content == "link":
        stray.symlink_to("nowhere")
    elif content == "copy":
        shutil.copy(held.path, stray)
    else:
        stray.write_text(content)

    assert lease.find_successor(held) is None


def test_a_lease_of_another_run_ends_a_training(tmp_path: Path) -> None:
    held = lease.acquire(tmp_path, tmp_path / "run")
    path = held.path.with_name("lease-2.json")
    parent = process.identify(os.getppid())
    Lease(path=path, run=str(tmp_path / "other"), owner=parent).write()
    assert lease.find_successor(held) is not None

    # others may have written it
    path.chmod(0o666)
    assert lease.find_successor(held) is None


@pytest.mark.parametrize("number", [lease.LARGEST_FENCE, 10**60])
def test_a_lease_with_the_highest_number_is_named_to_be_deleted(
    tmp_path: Path, number: int
) -> None:
    stray = write_stray_lease(tmp_path, number)
    with pytest.raises(NotReady, match="has the highest number") as refused:
        lease.acquire(tmp_path, tmp_path / "run")
    assert refused.value.findings[0].help == f"delete it: rm {stray}"


def test_the_next_lease_follows_a_stray_one(tmp_path: Path) -> None:
    write_stray_lease(tmp_path, 999_999_998)
    held = lease.acquire(tmp_path, tmp_path / "run")
    assert held.fence == 999_999_999
    assert lease.find_successor(held) is None


def test_a_stray_lease_hides_no_run_that_trains(tmp_path: Path) -> None:
    lease.acquire(tmp_path, tmp_path / "run")
    write_stray_lease(tmp_path, 40)
    with pytest.raises(NotReady, match="trains into"):
        lease.acquire(tmp_path, tmp_path / "next")


# What a record names


def test_no_record_makes_check_write_elsewhere(tmp_path: Path) -> None:
    elsewhere = made_runs.write_run(tmp_path / "elsewhere" / "a run")
    content = sorted(elsewhere.rglob("*"))
    bench = rundir.find_runs_root() / "20260101T000000Z-bench-x"
    trial = made_runs.write_run(bench / "20260101T000001Z-dpo-trial")
    samples = [{"run": str(elsewhere)}, {"run": str(trial)}, {"run": 7}]
    files.write_json(bench / "bench.json", {"samples": samples})

    launch("check", str(bench))

    assert [run.path for run in rundir.list_campaign_runs(bench)] == [trial]
    assert sorted(elsewhere.rglob("*")) == content


def test_no_record_makes_launch_delete_what_is_no_cache(tmp_path: Path) -> None:
    thesis = tmp_path / "mine" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    data = keys.Input(role="data", name=str(thesis), digest="", shown={"kind": "file"})
    cache = keys.Cache(
        kind="dataset", path=thesis.parent, digest="0" * 64, stage="sft", backend="trl", read=1.0,
        inputs=(data,),
    )  # fmt: skip

    assert folders.discard_spoiled(cache) is None

    assert thesis.exists()


# Everything at once


RICH = (
    '{"event": "device", "name": "H100", "total_gib": 79.1, "versions": {"torch": "2.13.0"}}',
    '{"event": "memory", "phase": "load", "step": 0, "allocated_gib": 1.5, "peak_host_gib": 0.5}',
    '{"event": "liger", "calls": {"rope": 4, "rms_norm": 8}}',
    '{"event": "liger_patch", "function": "apply", "kwargs": {"rope": true}}',
    '{"event": "packing", "state": "on", "detail": "2 samples in one row"}',
    '{"event": "packing_isolation", "state": "isolated", "loss": 1.5, "samples": [1, 2]}',
    '{"event": "reference_cache", "state": "hit", "path": "/cache/a.pt"}',
    '{"event": "dataset_cache", "state": "miss", "path": "/cache/b"}',
    '{"event": "half_wasted", "pairs": 2, "filled": 0.4, "better": 4, "message": "batch 2"}',
    '{"event": "gradients", "state": "true", "engine": "Plain", "checks": 3, "last_step": 7}',
    '{"event": "weights", "step": 40, "sampled": 1000, "moved": 900, "largest": 0.1, "tensors": 9}',
    '{"event": "nonfinite", "step": 3, "what": "loss", "value": "nan"}',
    '{"event": "violation", "point": "loss", "message": "nan", "stopped": false, "last": {}}',
    '{"event": "resumed", "path": "/out/checkpoint-4", "step": 4}',
    '{"event": "error", "type": "E", "message": "m"}',
    '{"event": "saved", "path": "/out"}',
    '{"event": "saved_model", "path": "/out", "files": [{"name": "a", "size": 3, "digest": "b"}]}',
)


def copy_demo(root: Path) -> RunFolder:
    """A finished run of an earlier release of launch, with a lease of its output."""
    demo = root / "demo-run"
    shutil.copytree(DATA / "run_661540d", demo)
    for path in (demo / "runs").rglob("*"):
        if path.is_file():
            text = path.read_text().replace("PLACE", str(demo))
            path.write_text(text.replace("HOST", socket.gethostname()))
    shutil.move(demo / "runs", root / "runs")
    folder = RunFolder(root / "runs" / "20261124T110632Z-sft-sft")
    held = lease.acquire(demo / "out", folder.path)
    lease.keep_manifest(held, manifest_of(folder))
    lease.replace(held, state="finished", code=0).write()
    saved.trl(demo / "out", 8)
    return folder


def make_rich_run() -> RunFolder:
    """A finished run of two attempts with every kind of record."""
    folder = make_run()
    add_lines(folder, *RICH)
    manifest = made_runs.manifest()
    made_runs.write_run(folder.path, record=manifest, attempt=2, first=20)
    files.write_json(folder.path / "run.1.json", manifest)
    changed = {"role": "data", "name": "a", "file": "a", "before": "1"}
    files.write_json(folder.inputs(2), {"changed": [changed]})
    files.write_json(folder.checksums, {"checkpoints": {"checkpoint-4": {"a.bin": "ab"}}})
    files.write_json(folder.stop, {"attempt": 2, "after_checkpoint": False})
    files.write_json(folder.job, {"job": "12", "run": str(folder.path)})
    return folder


def make_campaign(name: str, record: str, content: dict[str, Any]) -> Path:
    folder = rundir.find_runs_root() / name
    folder.mkdir(exist_ok=True)
    files.write_json(folder / record, {"key": "k", **content})
    return folder


def make_cache(root: Path, *runs: RunFolder) -> None:
    """A cache folder that these runs used."""
    folder = root / "cache" / "dataset-0123456789abcdef"
    uses = folder / folders.USES
    uses.mkdir(parents=True)
    file = {"name": "a", "size": 3, "digest": "d", "mtime": 1.0}
    shown = {"kind": "folder", "count": 1, "files": [file]}
    cache = {
        "kind": "dataset",
        "path": str(folder),
        "digest": "0123456789abcdef" * 4,
        "stage": "dpo",
        "backend": "trl",
        "key": {"packing": True},
        "inputs": [{"role": "data", "name": "a/b", "digest": "d", "shown": shown}],
    }
    record = {**cache, "launch_cache": folders.RECORD_VERSION, "created": rundir.format_utc_now()}
    files.write_json(folder / folders.RECORD, record)
    for number, run in enumerate(runs, 1):
        use = {"run": str(run.path), "attempt": number, "time": 1e9, "config": None}
        files.write_json(uses / f"{number}.json", {**use, "cache": cache})
    rundir.register("caches", folder)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Runs with output, lease, campaigns, caches and index."""
    root = tmp_path / "scene"
    monkeypatch.setenv("LAUNCH_RUNS", str(root / "runs"))
    monkeypatch.setenv("LAUNCH_CACHE", str(root / "cache"))
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
    finished = copy_demo(root)
    monkeypatch.chdir(root / "demo-run")
    over = make_rich_run()
    bench = rundir.find_runs_root() / "20260105T000000Z-bench-x"
    trial = RunFolder(made_runs.write_run(bench / "20260105T000001Z-dpo-trial"))
    sample = {"variant": "a", "curve": [[1, 1, 0.5]], "run": str(trial.path), "seconds": 3.5}
    make_campaign(bench.name, "bench.json", {"samples": [{**sample, "metrics": {"loss": 1.0}}]})
    stages = {"state": "finished", "stages": [{"run": str(over.path)}]}
    pipeline = make_campaign("20260105T000000Z-pipeline-y", "pipeline.json", stages)
    make_cache(root, finished, over)
    for run in (finished, over, trial):
        rundir.register("runs", run.path)
    return Scene(
        root=root,
        live=make_run(LIVE, ended=False),
        healthy=make_run(HEALTHY, ended=False),
        over=[finished.path.name, OVER],
        campaigns=[bench.name, pipeline.name],
        dry=[["sft", "sft.yaml", "--gpus", "0", "--dry-run"]],
    )


@pytest.mark.slow
def test_no_damage_to_any_record_ends_a_command(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SEED=` tries other damage, `N=` more of it."""
    alarm = signal.getsignal(signal.SIGALRM)
    fuzz = Fuzz(scene, monkeypatch)
    try:
        fuzz.launch("runs")
        assert fuzz.bug is None
        for name in scene.over:
            fuzz.launch("check", name)
            assert fuzz.bug is None
        failures = fuzz.run(SEED, NUMBER)
    finally:
        signal.signal(signal.SIGALRM, alarm)
    assert not failures, "\n".join(map(str, failures[:20]))
    assert len({path.name for path in fuzz.paths}) > 20
