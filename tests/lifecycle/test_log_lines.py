"""Logs with lines of any length: bounded memory, time in proportion to their size, no secrets."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_world import LAUNCH
from made_runs import manifest, write_run

from launcher.cli import main
from launcher.lifecycle import log_lines
from launcher.lifecycle.log_lines import LINE_BYTES, LogLines, find_last_lines
from launcher.printable import make_printable
from launcher.redaction import redact_bytes
from launcher.report.progress import TAIL_LINES, Tail, read_last_lines
from launcher.runs.rundir import RunFolder

MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A finished run of TRL with 40 steps."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "runs" / "20260101T000000Z-sft-long"
    return RunFolder(write_run(path, record=manifest(stage="sft", backend="trl")))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


Write = Callable[[int], None]


def repeat(unit: bytes, mib: int) -> Write:
    """Write this again and again at the end of a file, given by its descriptor."""

    def write(file: int) -> None:
        block = unit * (MIB // len(unit))
        for _ in range(mib):
            os.write(file, block)

    return write


def leave_hole(mib: int) -> Write:
    def write(file: int) -> None:
        os.ftruncate(file, os.fstat(file).st_size + mib * MIB)

    return write


def insert_line(log: Path, write: Write) -> None:
    """Have one more line in the middle of a log."""
    text = log.read_bytes()
    half = text.index(b"\n", len(text) // 2) + 1
    with log.open("wb", buffering=0) as file:
        file.write(text[:half])
        write(file.fileno())
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + text[half:])


def print_all(lines: LogLines, raw: bytes) -> bytes:
    return lines.of(raw) + lines.rest()


MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=1)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""


def measure(*words: str) -> tuple[bytes, float]:
    """What a command prints, and the most memory that it had, in MiB."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *LAUNCH, *words], capture_output=True)
    return done.stdout, int(done.stderr.split()[-1]) / 1024


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(repeat(b"0.123456, ", 120), id="a tensor"),
        pytest.param(leave_hole(200), id="a hole"),
        pytest.param(repeat(b"'loss': ", 80), id="words of a loss"),
    ],
)
def test_a_line_without_an_end_costs_neither_memory_nor_facts(
    folder: RunFolder, write: Write
) -> None:
    lines = folder.console(1).read_text().splitlines()
    insert_line(folder.console(1), write)

    for words in (("-n", "99"), ()):
        printed, peak_mib = measure("logs", str(folder.path), *words)
        shown = printed.decode().splitlines()
        assert shown[0] == lines[0]
        assert shown[-1] == lines[-1]
        assert len(shown) == len(lines) + 1
        assert printed.count(b" of this line left out ... ") == 1
        assert peak_mib < 64

    # what stands before and behind it is judged
    printed, peak_mib = measure("check", str(folder.console(1)), "--format", "json")
    metrics = json.loads(printed)["data"]["metrics"]
    assert metrics["first_loss"] == pytest.approx(0.6046, abs=1e-3)
    assert metrics["last_loss"] == pytest.approx(0.25, abs=1e-2)
    assert peak_mib < 100


def test_how_much_was_left_out_is_said() -> None:
    shown = print_all(LogLines(()), b"begin " + b"x" * (3 * MIB) + b" end\nnext\n")
    begin, _, end = shown.partition(b" ... 2.9 MiB of this line left out ... ")
    assert begin.startswith(b"begin xxx")
    assert end.endswith(b"xxx end\nnext\n")
    assert len(shown) < MIB


@pytest.mark.parametrize("size", [10_000, 2**18, 10**7])
def test_lines_are_cut_alike_in_blocks_of_any_size(size: int) -> None:
    long_line = b"x" * LINE_BYTES
    raw = b"a\n" + long_line + b"\r\nb\n" + long_line * 2 + b"\rc\n" + long_line + b"xx"
    lines = LogLines(())
    shown = b""
    for start in range(0, len(raw), size):
        shown += lines.of(raw[start : start + size])
    shown += lines.rest()

    beginnings = [line[:1] for line in shown.split(b"\n") if line]
    assert beginnings == [b"a", b"x", b"b", b"x", b"c", b"x"]
    assert shown.count(b"left out") == 3


@pytest.mark.parametrize("separator", [b",", b" "])
def test_a_secret_at_a_cut_is_not_shown_by_half(separator: bytes) -> None:
    secret = b"hf_" + b"aB3" * 11 + separator
    shown = print_all(LogLines(()), secret * (3 * MIB // len(secret)))
    assert b"aB3" not in shown
    assert b"left out" in shown


def test_of_a_progress_bar_the_last_frame_is_left(
    folder: RunFolder, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    frames = b"\r50%|###| 50/100" * 200_000
    folder.console(1).write_bytes(b"one\n" + frames + b"\r100%|###| 100/100")
    main.main(["logs", str(folder.path), "-n", "1"])
    assert capfdbinary.readouterr().out == b"100%|###| 100/100"

    lines = LogLines((), frames=False)
    assert print_all(lines, b"x" * (3 * MIB) + b"\rlast frame\n") == b"last frame\n"


def test_last_lines_that_begin_within_a_private_key_hide_it(
    folder: RunFolder, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    key = f"{'MIIabc0' * 9}\n" * 20
    text = f"-----BEGIN PRIVATE KEY-----\n{key}-----END PRIVATE KEY-----\nlast\n"
    folder.console(1).write_text(text)
    main.main(["logs", str(folder.path), "-n", "5"])
    printed = capfdbinary.readouterr().out
    assert b"MIIabc0" not in printed
    assert printed.endswith(b"last\n")


def test_the_search_for_the_begin_of_a_line_has_a_limit(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "_SEARCHED_BYTES", 4 * MIB)
    log.write_bytes(b"one\n" + b"x" * (9 * MIB) + b"\nlast\n")
    with log.open("rb") as file:
        last = find_last_lines(file.fileno(), 2)
    (gap,) = last.gaps
    assert gap.at_least
    assert last.start == gap.start > MIB

    lines = LogLines(())
    lines.leave_out(gap.stop - gap.start, at_least=True)
    assert lines.of(log.read_bytes()[gap.stop :]).startswith(b" ... at least ")


def require_linear(work: Callable[[int], object]) -> None:
    """Check that sixteen times the size takes far less than 256 times as long."""

    def seconds(size: int) -> float:
        begun = time.process_time()
        work(size)
        return time.process_time() - begun

    small = min(seconds(2**14) for _ in range(3))
    assert min(seconds(2**18) for _ in range(2)) < max(0.5, 80 * small)


@pytest.mark.parametrize(
    "unit", ["x", "--a", "_", ".", " ", "a=", "_eyJ-", "TOKEN ", "http://a/", "\x1b["]
)
def test_redaction_takes_time_in_proportion_to_a_line(unit: str) -> None:
    def redact(size: int) -> None:
        text = make_printable(unit * (size // len(unit)))
        redact_bytes(text.encode(), ("a-secret-value",))

    require_linear(redact)


def test_frames_take_time_in_proportion_to_a_line() -> None:
    require_linear(lambda size: print_all(LogLines((), frames=False), b"x" * size))


def test_the_view_of_a_run_reads_a_long_line_in_bounded_memory(log: Path) -> None:
    log.write_bytes(b"first\n")
    insert_line(log, repeat(b"x", 64))
    with log.open("ab") as file:
        file.write(b"\nlast\n")
    tail = Tail(log)
    lines: list[bytes] = []
    for _ in range(40):
        lines += tail.read()
        assert len(tail.rest) <= 2**16
    assert lines[0] == b"first"
    assert lines[-1] == b"last"


def test_the_page_shows_the_end_of_a_long_line(log: Path) -> None:
    log.write_bytes(b"x" * MIB + b" the end")
    (line,) = read_last_lines(log)
    assert line.startswith("... ")
    assert "left out" in line
    assert line.endswith("the end")

    log.write_bytes(b"short\n" + b"y" * 1_000 + b"\n")
    cut = f"{'y' * 400} ... 600 characters of this line left out"
    assert read_last_lines(log) == ("short", cut)

    log.write_bytes(b"a\n" * 100_000)
    assert read_last_lines(log) == ("a",) * TAIL_LINES


SECRETS = {
    "MY_TOKEN_B64": "cTlXbTItWmswNHhQbDk=",
    "LANGFUSE_PK": "pk-lf-77-aa31",
    "SSHPASS": "hunter2",
}


def print_secrets(folder: RunFolder) -> None:
    """Have a failed run whose training printed the secrets of its environment."""
    start = {"number": 1, "argv": [], "env": {}, "environ": SECRETS, "cwd": "/", "title": "a run"}
    folder.start.write_text(json.dumps({**start, "stage": "sft", "backend": "trl"}))
    text = " ".join(SECRETS.values())
    trace = f'Traceback (most recent call last):\n  File "a.py", line 1\nRuntimeError: {text}\n'
    with folder.console(1).open("a") as log:
        log.write(f"config: {text}\n{trace}")
    ended = {"returncode": 1, "signal": None, "stopped": None}
    folder.exit(1).write_text(json.dumps(ended))


@pytest.mark.parametrize(
    ("word", "target", "options"),
    [
        ("logs", "", []),
        ("logs", "", ["-n", "4"]),
        ("attach", "", []),
        ("check", "", []),
        ("check", "console.log", []),
        ("report", "", []),
    ],
)
def test_secrets_of_the_start_are_hidden_in_every_answer(
    folder: RunFolder, word: str, target: str, options: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    print_secrets(folder)
    assert main.main([word, str(folder.path / target), *options]) in (0, 1, 4)
    captured = capfd.readouterr()
    shown = captured.out + captured.err
    for path in (folder.verdict, folder.report):
        if path.exists():
            shown += path.read_text()
    for secret in SECRETS.values():
        assert secret not in shown
