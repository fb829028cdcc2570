"""Logs with lines of any length: bounded memory, time in proportion to their size, what was cut is said."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_world import LAUNCH
from made_runs import made, manifest

from launcher.lifecycle import log_lines
from launcher.lifecycle.log_lines import LINE_BYTES, LogLines, find_last_lines
from launcher.printable import printable
from launcher.redaction import redact_bytes
from launcher.report.progress import TAIL_LINES, Tail, read_last_lines
from launcher.runs.rundir import RunFolder

MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A finished run of TRL with 40 steps."""
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "20260101T000000Z-sft-long"
    return RunFolder(made(tmp_path / "runs" / name, told=manifest(stage="sft", backend="trl")))


def put_between(log: Path, write: Callable[[int], None]) -> None:
    """Have a line in the middle of a log; `write` writes it at the end of the file of a descriptor."""
    text = log.read_bytes()
    half = text.index(b"\n", len(text) // 2) + 1
    with log.open("wb", buffering=0) as file:
        file.write(text[:half])
        write(file.fileno())
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + text[half:])


def repeated(unit: bytes, size: int) -> Callable[[int], None]:
    def write(file: int) -> None:
        block = unit * (MIB // len(unit))
        for _ in range(size // MIB):
            os.write(file, block)

    return write


def hole(size: int) -> Callable[[int], None]:
    def write(file: int) -> None:
        os.ftruncate(file, os.fstat(file).st_size + size)

    return write


def peak_of(*words: str) -> tuple[bytes, int]:
    """What a command prints, and the most memory that it had, in bytes."""
    script = "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=1); "
    script += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script, *LAUNCH, *words], capture_output=True)
    return done.stdout, int(done.stderr.split()[-1]) * 1024


LINES = {
    "x": repeated(b"x", 120 * MIB),
    "a tensor": repeated(b"0.123456, ", 120 * MIB),
    "a hole": hole(200 * MIB),
    "words of a loss": repeated(b"'loss': ", 80 * MIB),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_without_an_end_costs_neither_memory_nor_facts(folder: RunFolder, line: str) -> None:
    lines = folder.console(1).read_text().splitlines()
    put_between(folder.console(1), LINES[line])
    printed, peak = peak_of("logs", str(folder.path), "-n", "1")
    assert printed.decode().splitlines() == lines[-1:]
    assert peak < 64 * MIB
    for words in (("-n", "99"), ()):
        printed, peak = peak_of("logs", str(folder.path), *words)
        shown = printed.decode().splitlines()
        assert (shown[0], shown[-1]) == (lines[0], lines[-1])
        assert len(shown) == len(lines) + 1
        assert printed.count(b" of this line left out ... ") == 1
        assert peak < 64 * MIB
    # what stands before and behind it is judged
    printed, peak = peak_of("check", str(folder.console(1)), "--format", "json")
    metrics = json.loads(printed)["data"]["metrics"]
    assert metrics["first_loss"] == pytest.approx(0.6046, abs=1e-3)
    assert metrics["last_loss"] == pytest.approx(0.25, abs=1e-2)
    assert peak < 100 * MIB


def test_how_much_was_left_out_is_said() -> None:
    lines = LogLines(())
    whole = b"begin " + b"x" * (3 * MIB) + b" end\nnext\n"
    shown = lines.of(whole) + lines.rest()
    begin, _, end = shown.partition(b" ... 2.9 MiB of this line left out ... ")
    assert begin.startswith(b"begin xxx")
    assert end.endswith(b"xxx end\nnext\n")
    assert len(shown) < MIB


@pytest.mark.parametrize("size", [10_000, 2**16, 2**18, 10**7])
def test_lines_are_cut_alike_however_they_come(size: int) -> None:
    raw = b"a\n" + b"x" * LINE_BYTES + b"\r\nb\n" + b"y" * 1_300_000 + b"\rc\n" + b"z" * 1_400_000
    lines = LogLines(())
    shown = (
        b"".join(lines.of(raw[at : at + size]) for at in range(0, len(raw), size)) + lines.rest()
    )
    texts = shown.split(b"\n")
    assert [text[:1] for text in texts if text] == [b"a", b"x", b"b", b"y", b"c", b"z"]
    assert shown.count(b"left out") == 3


def test_a_secret_at_a_cut_is_not_shown_by_half() -> None:
    token = b"hf_" + b"aB3" * 11
    for unit in (token + b",", token + b" "):
        lines = LogLines(())
        shown = lines.of(unit * (3 * MIB // len(unit))) + lines.rest()
        assert b"aB3" not in shown
        assert b"left out" in shown


def test_of_a_progress_bar_the_last_frame_is_left(folder: RunFolder) -> None:
    frames = b"".join(b"\r%d%%|###| %d/100" % (at % 100, at % 100) for at in range(200_000))
    folder.console(1).write_bytes(b"one\n" + frames + b"\r100%|###| 100/100")
    printed, peak = peak_of("logs", str(folder.path), "-n", "1")
    assert printed == b"100%|###| 100/100"
    assert peak < 64 * MIB
    lines = LogLines((), frames=False)
    shown = lines.of(b"x" * (3 * MIB) + b"\rlast frame\n") + lines.rest()
    assert shown == b"last frame\n"


def test_last_lines_that_begin_within_a_private_key_hide_it(folder: RunFolder) -> None:
    key = "".join(f"{'MIIabc0' * 9}{at}\n" for at in range(20))
    folder.console(1).write_text(
        f"-----BEGIN PRIVATE KEY-----\n{key}-----END PRIVATE KEY-----\nlast\n"
    )
    printed, _ = peak_of("logs", str(folder.path), "-n", "5")
    assert b"MIIabc0" not in printed
    assert printed.endswith(b"last\n")


def test_the_begin_of_a_line_is_not_sought_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "_SEARCHED_BYTES", 4 * MIB)
    log = tmp_path / "log"
    log.write_bytes(b"one\n" + b"x" * (9 * MIB) + b"\nlast\n")
    with log.open("rb") as file:
        found = find_last_lines(file.fileno(), 2)
    (gap,) = found.gaps
    assert gap.at_least
    assert found.start == gap.start > MIB
    lines = LogLines(())
    lines.leave_out(gap.stop - gap.start, at_least=True)
    with log.open("rb") as file:
        file.seek(gap.stop)
        assert lines.of(file.read()).startswith(b" ... at least ")


UNITS = [
    "x",
    "-",
    "--",
    "--a",
    "_",
    ".",
    " ",
    "a=",
    "eyJ-",
    "_eyJ",
    "token",
    "TOKEN ",
    "://",
    "http://a/",
    "a/",
    "\x1b[",
]


@pytest.mark.parametrize("unit", UNITS)
def test_redaction_takes_time_in_proportion_to_a_line(unit: str) -> None:
    def seconds(size: int) -> float:
        raw = (unit * (size // len(unit))).encode()
        begun = time.process_time()
        redact_bytes(printable(raw.decode()).encode(), ("a-secret-value",))
        return time.process_time() - begun

    small = min(seconds(2**14) for _ in range(3))
    # sixteen times as long a line; in a quadratic pattern it takes 256 times as long
    assert min(seconds(2**18) for _ in range(2)) < max(0.5, 80 * small)


def test_frames_take_time_in_proportion_to_a_line() -> None:
    def seconds(size: int) -> float:
        lines = LogLines((), frames=False)
        begun = time.process_time()
        lines.of(b"x" * size)
        lines.rest()
        return time.process_time() - begun

    small = min(seconds(2**15) for _ in range(3))
    assert min(seconds(2**19) for _ in range(2)) < max(0.5, 80 * small)


def test_the_view_of_a_run_reads_a_long_line_in_bounded_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n")
    put_between(log, repeated(b"x", 64 * MIB))
    with log.open("ab") as file:
        file.write(b"\nlast\n")
    tail = Tail(log)
    lines: list[bytes] = []
    longest = 0
    for _ in range(40):
        lines += tail.read()
        longest = max(longest, len(tail.rest))
    assert lines[0] == b"first" and lines[-1] == b"last"
    assert longest <= 2**16


def test_the_end_of_a_long_line_is_shown_on_the_page(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * MIB + b" the end")
    (line,) = read_last_lines(log)
    assert line.startswith("... ") and "left out" in line and line.endswith("the end")
    log.write_bytes(b"short\n" + b"y" * 1_000 + b"\n")
    assert read_last_lines(log) == (
        "short",
        f"{'y' * 400} ... 600 characters of this line left out",
    )
    log.write_bytes(b"a\n" * 100_000)
    assert read_last_lines(log) == ("a",) * TAIL_LINES


@pytest.fixture
def telling(folder: RunFolder) -> Iterator[dict[str, str]]:
    """Secrets of the environment that a run was started in, all printed by its training."""
    environ = {
        "MY_TOKEN_B64": "cTlXbTItWmswNHhQbDk=",
        "LANGFUSE_PK": "pk-lf-77-aa31",
        "SSHPASS": "hunter2",
    }
    start = {
        "number": 1,
        "argv": [],
        "env": {},
        "environ": environ,
        "cwd": "/",
        "stage": "sft",
        "backend": "trl",
    }
    folder.start.write_text(json.dumps({**start, "title": "a run"}))
    said = " ".join(environ.values())
    with folder.console(1).open("a") as log:
        log.write(f"config: {said}\n")
        log.write(
            f'Traceback (most recent call last):\n  File "a.py", line 1, in b\nRuntimeError: {said}\n'
        )
    folder.exit(1).write_text(json.dumps({"returncode": 1, "signal": None, "stopped": None}))
    yield environ


@pytest.mark.parametrize(
    "command", [("logs",), ("logs", "-n", "4"), ("attach",), ("check",), ("report",)]
)
def test_secrets_of_the_start_are_hidden_whoever_looks(
    folder: RunFolder, telling: dict[str, str], command: tuple[str, ...]
) -> None:
    place = str(folder.console(1)) if command == ("check",) else str(folder.path)
    first, *words = command
    for target in dict.fromkeys((place, str(folder.path))):
        done = subprocess.run([*LAUNCH, first, target, *words], capture_output=True, text=True)
        shown = done.stdout + done.stderr
        for path in (folder.verdict, folder.report):
            shown += path.read_text() if path.exists() else ""
        assert [value for value in telling.values() if value in shown] == []
        assert done.returncode in (0, 1, 4)
