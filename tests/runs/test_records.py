"""Records that somebody edited, damaged or copied: what does not fit is left out and said, and ends no command."""

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
from launcher.cache import folders
from launcher.cli import main
from launcher.errors import NotReady
from launcher.machine import codec, process
from launcher.machine.codec import Count, Misfit
from launcher.report import overview
from launcher.runs import events, lease, rundir, runner, slurm
from launcher.runs.rundir import RunFolder

Capture = pytest.CaptureFixture[str]
OVER, LIVE, HEALTHY = (
    "20260101T000000Z-dpo-over",
    "20260102T000000Z-dpo-live",
    "20260103T000000Z-dpo-healthy",
)
SEED, NUMBER = int(os.environ.get("SEED", "1")), int(os.environ.get("N", "150"))


@pytest.fixture(autouse=True)
def _in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_GRACE", "0,0,0")
    monkeypatch.setattr(runner, "GRACE_S", (0.0, 0.0, 0.0))
    overview._marks.cache_clear()


def made(name: str, **changes: Any) -> RunFolder:
    path = rundir.runs_root() / name
    told = made_runs.manifest(cwd=str(Path.cwd()), output=str(path / "model"))
    return RunFolder(made_runs.made(path, **{"told": told, **changes}))


@pytest.fixture
def live() -> Iterator[tuple[RunFolder, Sleeper]]:
    folder = made(LIVE, ended=False)
    sleeper = Sleeper(folder)
    yield folder, sleeper
    sleeper.end()


def add(folder: RunFolder, line: str) -> None:
    with (folder.probe / "rank-0.jsonl").open(
        "a", encoding="utf-8", errors="surrogatepass"
    ) as record:
        record.write(f"{line}\n")


def states(capsys: Capture) -> dict[str, str]:
    capsys.readouterr()
    overview._marks.cache_clear()
    assert main.main(["runs", "--format", "json"]) == 0
    return {row["run"]: row["state"] for row in json.loads(capsys.readouterr().out)["data"]}


LINES = (
    '{"event": {}}', '{"event": []}', '{"event": 1}', '{"event": null}', '{"event": {"event": "step"}}',
    '{"event": "step", "step": {}, "loss": 1}', '{"event": "step", "step": true}', '{"event": "step", "step": 1.5}',
    '{"event": "step", "step": -4, "loss": 1}', '{"event": "step", "step": 41, "loss": []}',
    '{"event": "step", "step": 41, "loss": 1e400, "elapsed": Infinity, "seconds": 1e-320, "t": 1e400}',
    '{"event": "start", "world": {}, "attempt": []}', '{"event": "start", "world": -1, "attempt": 1e400}',
    '{"event": "end", "exit": {}}', '{"event": "end", "exit": "0"}', '{"event": "end", "exit": ' + "9" * 5000 + "}",
    '{"event": "liger", "calls": []}', '{"event": "liger", "calls": {"rope": {}}}', '{"event": "device", "name": []}',
    '{"event": "packing", "state": {}}', '{"event": "saved", "path": {}, "t": "now"}',
    '{"event": "memory", "phase": {}}', '{"event": "gradients", "state": []}',
    '{"event": "weights", "sampled": 1e400, "moved": NaN}', '{"event": "weights", "sampled": 0, "moved": -1}',
    '{"event": "gradients", "state": "true", "checks": {}, "largest_error": "x"}',
    '{"event": "saved_model", "path": "/", "files": [1, {}, {"name": []}, {"name": "../../etc/passwd"}]}',
    '{"event": "dataset_cache", "state": "miss", "path": "a\\u0000b"}', '{"event": "model", "attention": "\\ud800"}',
    '{"event": "nonfinite", "step": "1", "what": [], "value": {}}', '{"event": "violation", "stopped": "yes"}',
    '{"event": "error", "type": {}, "message": []}', '{"event": "resumed", "step": [], "path": 7}',
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_does_not_fit_costs_what_does_not_fit(
    live: tuple[RunFolder, Sleeper], line: str, capsys: Capture
) -> None:
    folder, sleeper = live
    over = made(OVER)
    for run in (folder, over):
        add(run, line)
    assert states(capsys) == {OVER: "finished", LIVE: "running"}
    assert main.main(["check", OVER]) in (0, 1)
    assert main.main(["report", OVER]) == 0
    assert main.main(["attach", OVER]) in (0, 1, 4)
    assert main.main(["stop", LIVE]) == 0
    assert not sleeper.is_alive()


def test_what_is_left_out_is_said(capsys: Capture) -> None:
    folder = made(OVER, told=made_runs.manifest(output=7, args={"a": 1}))
    add(folder, '{"event": "liger", "calls": []}')
    add(folder, '{"event": {}}')
    main.main(["check", OVER])
    said = capsys.readouterr().err
    assert "warning[damaged-record]: `output` is 7, not a text or null, and 1 more like it" in said
    assert "warning[damaged-record]: `calls` is [], not a mapping, and 1 more like it" in said
    assert f"{folder.probe / 'rank-0.jsonl'}:44" in said


@pytest.mark.parametrize(
    "name", ["expect", "plan", "args", "output", "resume", "contents", "stage", "deepspeed"]
)
def test_a_manifest_of_other_types_ends_no_command(name: str, capsys: Capture) -> None:
    folder = made(OVER)
    told = json.loads(folder.manifest.read_text())
    for value in (
        None,
        -1,
        "@1e400",
        "@digits",
        "a\0b",
        "\ud800",
        "x" * 5000,
        [],
        {},
        [[]],
        {"a": {}},
    ):
        folder.manifest.write_text(dumped({**told, name: value}))
        assert OVER in states(capsys)
        for words in (["check", OVER], ["stop", OVER]):
            assert main.main(words) in (0, 1, 2), (words, value)


@pytest.mark.parametrize("name", ["loss", "liger", "finish", "batch", "trend"])
@pytest.mark.parametrize("value", [{}, [], 3, True, "@nan", {"a": 1}])
def test_an_expectation_that_is_no_word_is_never_met(
    name: str, value: object, capsys: Capture
) -> None:
    folder = made(OVER)
    told = json.loads(folder.manifest.read_text())
    told["expect"][name] = value
    folder.manifest.write_text(dumped(told))
    assert main.main(["check", OVER, "--format", "json"]) == 1
    verdict = json.loads(capsys.readouterr().out)["data"]
    (point,) = (point for point in verdict["points"] if point["name"] == name)
    assert (point["expected"], point["ok"]) == ("unknown", None)
    assert main.main(["report", OVER]) == 0


def test_a_run_that_cannot_be_read_is_a_row_with_the_reason(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(OVER)
    made(HEALTHY)
    read = overview._lasting_columns

    def fails(folder: RunFolder, manifest: Any) -> dict[str, Any]:
        if folder.path.name == OVER:
            raise RuntimeError("nobody thought of it")
        return read(folder, manifest)

    monkeypatch.setattr(overview, "_lasting_columns", fails)
    assert states(capsys) == {OVER: "unknown", HEALTHY: "finished"}
    assert main.main(["runs"]) == 0
    assert "nobody thought of it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, 3, 3), (int, 3.0, 3), (int, True, None), (int, 3.5, None), (int, "3", None), (int, float("inf"), None),
        (float, 1, 1), (float, False, None), (bool, 1, None), (str, 1, None), (str | None, None, None),
        (Count, -1, None), (Count, 0, 0), (Count, 1e300, None), (Path, "a/b", Path("a/b")), (Path, "x" * 300, None),
        (Path, "", None), (list[int], [1, "a", None, 2], [1, 2]), (list[int], {}, None),
        (tuple[str, ...], ["a"], ("a",)),
        (dict[str, int], {"a": 1, "b": "x"}, {"a": 1}), (dict[str, int], [], None),
    ],
)  # fmt: skip
def test_one_codec_takes_a_value_or_leaves_it(kind: Any, value: object, expected: object) -> None:
    assert codec.fit_value(value, kind) == expected


def test_a_record_without_what_it_is_about_is_none() -> None:
    left_out: list[codec.Omission] = []
    own = process.identify(os.getpid())
    assert (
        codec.read_record(process.Identity, {**own.as_json(), "namespace": "x"}, left_out).namespace
        is None
    )
    assert [str(one) for one in left_out] == ["`namespace` is 'x', not a whole number or null"]
    for damage in (
        {"pid": 0},
        {"pid": -3},
        {"pid": 2**40},
        {"pid": True},
        {"pid": "1"},
        {"host": None},
    ):
        assert process.parse_identity({**own.as_json(), **damage}) is None
    with pytest.raises(Misfit):
        codec.read_record(process.Identity, [])
    assert events.parse_event(b'{"event": "step", "step": 1, "loss": "low"}') is None


def test_no_text_of_a_record_is_one_that_no_path_can_be() -> None:
    value = files.parse_line(
        b'{"a": "x\\u0000y", "\\ud800": ["\\udfff", "\\udc80", "\\ud83d\\ude00"]}'
    )
    assert value == {"a": "x�y", "�": ["�", "\udc80", "😀"]}


# Processes


def named(folder: RunFolder, pid: int, **changes: Any) -> None:
    told = {
        **process.identify(pid).as_json(),
        "mark": str(folder.path),
        "attempt": 1,
        "started": rundir.utc_now(),
    }
    text = json.dumps({**told, **changes})
    folder.process.unlink(missing_ok=True)
    files.write_bytes(folder.process, text.encode(), mode=0o600)


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user that is of no run."""
    environ = {name: value for name, value in os.environ.items() if name != process.MARK}
    child = subprocess.Popen(["sleep", "600"], env=environ, start_new_session=True)
    yield child
    child.kill()
    child.wait()


def test_what_names_processes_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    before = os.umask(0o002)
    try:
        runner.run(runner.Command(argv=("true",), env={}, cwd=tmp_path), folder, 1)
        runner.StopRequest(attempt=1).write(folder)
        granted = lease.acquire(tmp_path / "out", folder.path)
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in (folder.process, folder.stop, granted.path)
    }
    assert modes == {"process.json": 0o600, "stop.json": 0o600, "lease-1.json": 0o644}


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o666])
@pytest.mark.parametrize("keeper", [False, True])
@pytest.mark.parametrize("mark", ["own", "another"])
def test_stop_ends_no_process_that_is_not_of_the_run(
    innocent: subprocess.Popen[bytes], mode: int, keeper: bool, mark: str, capsys: Capture
) -> None:
    folder = made(LIVE, ended=False)
    told = process.identify(innocent.pid).as_json()
    more = {} if mark == "own" else {"mark": "/elsewhere"}
    named(folder, innocent.pid, **({"keeper": told} if keeper else {}), **more)
    folder.process.chmod(mode)
    assert main.main(["stop", LIVE]) == 5
    assert "error[not-your-process]" in capsys.readouterr().err
    assert innocent.poll() is None


def test_a_process_of_another_run_is_not_ended(
    live: tuple[RunFolder, Sleeper], capsys: Capture
) -> None:
    _, sleeper = live
    other = made(HEALTHY, ended=False)
    assert sleeper.child is not None
    named(other, sleeper.child.pid)
    assert main.main(["stop", HEALTHY]) == 2
    assert states(capsys) == {LIVE: "running", HEALTHY: "finished"}
    assert sleeper.is_alive()


def test_a_record_that_others_may_write_is_done_without(live: tuple[RunFolder, Sleeper]) -> None:
    """What bears the mark of the run is ended all the same: that is no word of the record."""
    folder, sleeper = live
    folder.process.chmod(0o666)
    assert main.main(["stop", LIVE]) == 0
    assert not sleeper.is_alive()


def test_a_copy_of_a_live_run_has_no_processes(
    live: tuple[RunFolder, Sleeper], capsys: Capture
) -> None:
    folder, sleeper = live
    copy = folder.path.with_name("20260109T000000Z-dpo-copy")
    subprocess.run(["cp", "-a", str(folder.path), str(copy)], check=True)
    for verb in ("stop", "attach"):
        assert main.main([verb, copy.name]) == 5
        assert (
            f"error[run-is-a-copy]: {copy.name} is a copy of {folder.path}"
            in capsys.readouterr().err
        )
    assert sleeper.is_alive()
    # its probe had written its end
    assert states(capsys) == {LIVE: "running", copy.name: "finished"}
    # the original by a link, and under another name, is still itself
    link = folder.path.with_name("link")
    link.symlink_to(folder.path)
    assert main.main(["stop", str(link)]) == 0
    assert not sleeper.is_alive()


def test_a_run_that_was_moved_is_stopped(live: tuple[RunFolder, Sleeper]) -> None:
    folder, sleeper = live
    status = folder.path.stat()
    told = json.loads(folder.process.read_text())
    files.write_private_json(folder.process, {**told, "folder": [status.st_dev, status.st_ino]})
    moved = folder.path.rename(folder.path.with_name("20260109T000000Z-dpo-moved"))
    assert main.main(["stop", moved.name]) == 0
    assert not sleeper.is_alive()


@pytest.mark.parametrize("job", ["1; rm -rf /", "-1", "٣", "", "../1", {}, 7, None, "9" * 400])
def test_a_job_is_a_number_of_the_run_itself(job: object) -> None:
    folder = made(OVER)
    files.write_json(folder.job, {"job": job})
    assert slurm.job_of(folder) is None
    files.write_json(folder.job, {"job": "12", "run": str(made(HEALTHY).path)})
    assert slurm.job_of(folder) is None
    files.write_json(folder.job, {"job": "12", "run": str(folder.path)})
    assert slurm.job_of(folder) == "12"
    folder.job.chmod(0o666)
    with pytest.raises(NotReady, match="can be written by others"):
        slurm.require_own(folder)


@pytest.mark.parametrize(
    "log", ["Traceback (most recent call last):\nKeyboardInterrupt\n", "boom\n"]
)
def test_runs_and_check_agree_where_the_end_could_not_be_recorded(
    log: str, capsys: Capture
) -> None:
    """Its folder became read-only: nothing but the probe, whose file was open, says that it ended."""
    folder = made(OVER, steps=20, ended=False, extra=log)
    lines = (folder.probe / "rank-0.jsonl").read_text().splitlines()[:-1]
    (folder.probe / "rank-0.jsonl").write_text(
        "\n".join([*lines, '{"event": "end", "exit": 1}', ""])
    )
    (state,) = states(capsys).values()
    main.main(["check", OVER, "--format", "json"])
    points = {
        point["name"]: point["state"]
        for point in json.loads(capsys.readouterr().out)["data"]["points"]
    }
    assert (state, points["finish"]) in {("stopped", "stopped"), ("failed", "crashed")}
    assert state == ("stopped" if "KeyboardInterrupt" in log else "failed")


# Leases


def leases(output: Path) -> Path:
    return output / lease.FOLDER


@pytest.mark.parametrize(
    "name",
    ["lease-999999999", "lease-99999999999", "lease-" + "9" * 200, "lease-2", "lease-0", "lease-007", "lease--5",
     "lease-٣", "lease-1e9", "lease-"],
)  # fmt: skip
@pytest.mark.parametrize("content", ["copy", "", "{}", "[]", "folder", "link"])
def test_a_file_that_is_no_lease_ends_no_training(tmp_path: Path, name: str, content: str) -> None:
    granted = lease.acquire(tmp_path, tmp_path / "run")
    stray = leases(tmp_path) / f"{name}.json"
    if content == "folder":
        stray.mkdir()
    elif content == "link":
        stray.symlink_to("nowhere")
    else:
        stray.write_text(granted.path.read_text() if content == "copy" else content)
    assert lease.find_successor(granted) is None


def test_a_lease_of_another_run_ends_a_training(tmp_path: Path) -> None:
    granted = lease.acquire(tmp_path, tmp_path / "run")
    other = lease.Lease(
        path=leases(tmp_path) / "lease-2.json",
        run=str(tmp_path / "other"),
        owner=process.identify(os.getppid()),
    )
    other.write()
    assert lease.find_successor(granted) is not None
    other.path.chmod(0o666)
    assert lease.find_successor(granted) is None


@pytest.mark.parametrize("number", [lease.LARGEST_FENCE, 10**60])
def test_a_number_that_cannot_be_followed_is_refused_with_what_to_delete(
    tmp_path: Path, number: int
) -> None:
    leases(tmp_path).mkdir(parents=True)
    stray = leases(tmp_path) / f"lease-{number}.json"
    stray.write_text("{}")
    os.utime(stray, (0, 0))
    with pytest.raises(NotReady, match="has the highest number") as refused:
        lease.acquire(tmp_path, tmp_path / "run")
    assert refused.value.findings[0].help == f"delete it: rm {stray}"


@pytest.mark.parametrize("number", [7, 999_999_998])
def test_a_stray_number_is_followed(tmp_path: Path, number: int) -> None:
    leases(tmp_path).mkdir(parents=True)
    (stray := leases(tmp_path) / f"lease-{number}.json").write_text("{}")
    os.utime(stray, (0, 0))
    granted = lease.acquire(tmp_path, tmp_path / "run")
    assert granted.fence == number + 1
    assert lease.find_successor(granted) is None


def test_a_stray_file_hides_no_run_that_trains(tmp_path: Path) -> None:
    lease.acquire(tmp_path, tmp_path / "run")
    (stray := leases(tmp_path) / "lease-40.json").write_text("{}")
    os.utime(stray, (0, 0))
    with pytest.raises(NotReady, match="trains into"):
        lease.acquire(tmp_path, tmp_path / "next")


# What a record names


def test_no_record_makes_check_write_elsewhere(tmp_path: Path) -> None:
    elsewhere = made_runs.made(tmp_path / "elsewhere" / "a run")
    before = sorted(elsewhere.rglob("*"))
    bench = rundir.runs_root() / "20260101T000000Z-bench-x"
    trial = made_runs.made(bench / "20260101T000001Z-dpo-trial")
    files.write_json(
        bench / "bench.json",
        {"samples": [{"run": str(elsewhere)}, {"run": str(trial)}, {"run": 7}]},
    )
    assert [run.path for run in rundir.campaign_runs(bench)] == [trial]
    main.main(["check", str(bench)])
    assert sorted(elsewhere.rglob("*")) == before


def test_no_record_makes_launch_delete_what_is_no_cache(tmp_path: Path) -> None:
    from launcher.cache import keys

    (mine := tmp_path / "mine" / "thesis.txt").parent.mkdir()
    mine.write_text("years of work")
    named = keys.Cache(
        kind="dataset", path=mine.parent, digest="0" * 64, stage="sft", backend="trl", read=1.0,
        inputs=(keys.Input(role="data", name=str(mine), digest="", shown={"kind": "file"}),),
    )  # fmt: skip
    assert folders.discard_spoiled(named) is None
    assert mine.exists()


# Everything at once


RICH = (
    {"event": "device", "name": "NVIDIA H100", "total_gib": 79.1, "versions": {"torch": "2.13.0"}},
    {"event": "memory", "phase": "load", "step": 0, "allocated_gib": 1.5, "peak_host_gib": 0.5},
    {"event": "liger", "calls": {"rope": 4, "rms_norm": 8}},
    {"event": "liger_patch", "function": "apply", "kwargs": {"rope": True}},
    {"event": "packing", "state": "on", "detail": "2 samples in one row"},
    {"event": "packing_isolation", "state": "isolated", "loss": 1.5, "changed_loss": 1.5, "samples": [1, 2]},
    {"event": "reference_cache", "state": "hit", "path": "/cache/a.pt"},
    {"event": "dataset_cache", "state": "miss", "path": "/cache/b"},
    {"event": "half_wasted", "pairs": 2, "filled": 0.4, "better": 4, "message": "batch 2 uses 40% of each step"},
    {"event": "gradients", "state": "true", "engine": "Plain", "checks": 3, "last_step": 7, "parameters": 12,
     "elements": 900, "largest_error": 0.001, "allowed": 0.01},
    {"event": "weights", "step": 40, "steps": 40, "sampled": 1000, "moved": 900, "largest": 0.1, "tensors": 9},
    {"event": "nonfinite", "step": 3, "what": "loss", "value": "nan"},
    {"event": "violation", "point": "loss", "message": "loss is nan", "stopped": False, "last": {"step": 2}},
    {"event": "resumed", "path": "/out/checkpoint-4", "step": 4}, {"event": "error", "type": "E", "message": "m"},
    {"event": "saved", "path": "/out"},
    {"event": "saved_model", "path": "/out", "files": [{"name": "model.safetensors", "size": 3, "digest": "ab"}]},
)  # fmt: skip


def scene(root: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Runs with output, lease, campaigns, caches and index."""
    demo = root / "demo-run"
    shutil.copytree(DATA / "run_661540d", demo)
    for path in (demo / "runs").rglob("*"):
        if path.is_file():
            path.write_text(
                path.read_text().replace("PLACE", str(demo)).replace("HOST", socket.gethostname())
            )
    shutil.move(demo / "runs", root / "runs")
    monkeypatch.setenv("LAUNCH_RUNS", str(root / "runs"))
    monkeypatch.setenv("LAUNCH_CACHE", str(root / "cache"))
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
    monkeypatch.chdir(demo)
    finished = root / "runs" / "20261124T110632Z-sft-sft"
    granted = lease.acquire(demo / "out", finished)
    lease.keep_manifest(granted, json.loads((finished / "run.json").read_text()))
    lease.replace(granted, state="finished", code=0).write()
    (made(OVER).probe / "rank-0.jsonl").open("a").writelines(
        json.dumps(event) + "\n" for event in RICH
    )
    over = made(OVER, attempt=2, first=20)
    files.write_json(over.path / "run.1.json", made_runs.manifest())
    files.write_json(
        over.inputs(2), {"changed": [{"role": "data", "name": "a", "file": "a", "before": "1"}]}
    )
    files.write_json(over.checksums, {"checkpoints": {"checkpoint-4": {"model.safetensors": "ab"}}})
    files.write_json(over.stop, {"attempt": 2, "after_checkpoint": False})
    files.write_json(over.job, {"job": "12", "run": str(over.path)})
    saved.trl(demo / "out", 8)
    bench, pipeline = (
        root / "runs" / "20260105T000000Z-bench-x",
        root / "runs" / "20260105T000000Z-pipeline-y",
    )
    trial = made_runs.made(bench / "20260105T000001Z-dpo-trial")
    sample = {
        "variant": "a",
        "curve": [[1, 1, 0.5]],
        "run": str(trial),
        "metrics": {"loss": 1.0},
        "seconds": 3.5,
    }
    files.write_json(bench / "bench.json", {"key": "k", "samples": [sample]})
    pipeline.mkdir()
    files.write_json(
        pipeline / "pipeline.json",
        {"key": "k", "state": "finished", "stages": [{"run": str(over.path)}]},
    )
    cache = root / "cache" / "dataset-0123456789abcdef"
    digest = cache.name[8:] * 4
    shown = {
        "kind": "folder",
        "count": 1,
        "files": [{"name": "a", "size": 3, "digest": "d", "mtime": 1.0}],
    }
    described = {
        "kind": "dataset", "path": str(cache), "digest": digest, "stage": "dpo", "backend": "trl",
        "key": {"packing": True},
        "inputs": [{"role": "data", "name": "a/b", "digest": "d", "shown": shown}],
    }  # fmt: skip
    (cache / folders.USES).mkdir(parents=True)
    head = {"launch_cache": folders.RECORD_VERSION, "created": rundir.utc_now()}
    files.write_json(cache / folders.RECORD, {**head, **described})
    for number, run in enumerate((finished, over.path)):
        use = {
            "run": str(run),
            "attempt": 1 + number,
            "time": 1e9 + number,
            "config": None,
            "cache": described,
        }
        files.write_json(cache / folders.USES / f"{number}.json", use)
    rundir.register("caches", cache)
    for path in (finished, over.path, trial):
        rundir.register("runs", path)
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
    return Scene(
        root=root,
        live=made(LIVE, ended=False),
        healthy=made(HEALTHY, ended=False),
        over=[finished.name, OVER],
        campaigns=[bench.name, pipeline.name],
        dry=[["sft", "sft.yaml", "--gpus", "0", "--dry-run"]],
    )


@pytest.mark.slow
def test_no_damage_to_any_record_ends_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SEED=` other damage, `N=` more of it."""
    before = signal.getsignal(signal.SIGALRM)
    fuzz = Fuzz(scene(tmp_path / "scene", monkeypatch), monkeypatch)
    try:
        for words in (["runs"], *(["check", name] for name in fuzz.scene.over)):
            fuzz.launch(*words)
            assert fuzz.bug is None
        failures = fuzz.run(SEED, NUMBER)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not failures, "\n".join(map(str, failures[:20]))
    assert len({path.name for path in fuzz.paths}) > 20
