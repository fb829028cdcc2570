"""Files and values that others may have written: within bounds, in time, with a documented exit
code.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import made_runs
import pytest

from launcher import files
from launcher.cli import main
from launcher.printable import escaped, printable, printable_bytes
from launcher.runs import rundir
from launcher.verdict import check, evidence

NAME = "20260101T000000Z-dpo-a"
LIMIT_S = 60.0
"""What hangs is ended after it: nothing here takes a tenth of that on a machine that has time."""


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    import signal

    def over(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run() -> Path:
    return made_runs.made(rundir.runs_root() / NAME)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


def _sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(2**40)


KINDS = (_fifo, _zero, _folder)


@pytest.mark.parametrize("make", [*KINDS, _sparse])
def test_what_is_no_file_of_a_usual_size_is_refused(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.json"
    make(path)
    with pytest.raises(OSError, match=r"regular|levels of symbolic|No such device|too large"):
        files.read_bytes(path)
    assert files.read_json(path) == {}


DEEP = b"[" * 200_000
BAD_LINES = (
    b'{"event": ' + DEEP, b'{"a":' * 70 + b"1" + b"}" * 70, b"\xff\xfe", b"[1, 2]",
    b'{"event": "' + b"x" * 2**21 + b'"}',
)  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_costs_itself(run: Path, line: bytes) -> None:
    record = run / "probe" / "rank-0.jsonl"
    first, *rest = record.read_bytes().splitlines()
    record.write_bytes(b"\n".join([first, line, *rest, line]))
    assert files.parse_line(line) == {}
    found = evidence.read_run(run).probe
    assert found is not None
    assert found.last_step == 40
    assert main.main(["check", NAME]) == 0


@pytest.mark.parametrize("digits", ["9" * 25, "-" + "9" * 400])
def test_a_number_that_is_too_large_is_infinite(digits: str) -> None:
    value = files.parse_line(f'{{"step": {digits}}}'.encode())["step"]
    assert abs(value) == float("inf")
    assert files.parse_line(b'{"inode": 18446744073709551615}') == {"inode": 2**64 - 1}


EVENTS = (
    '{"event": "step", "step": 999999999999, "loss": 1}',
    '{"event": "start", "world": 1000000000, "attempt": 1}',
    '{"event": "step", "step": 1e300, "tokens": 1e308, "seconds": -1}',
    '{"event": "liger", "calls": {"rope": 1e400}}',
)


@pytest.mark.parametrize("event", EVENTS)
def test_a_huge_number_takes_neither_memory_nor_the_command(run: Path, event: str) -> None:
    with (run / "probe" / "rank-0.jsonl").open("a") as record:
        record.write(f"{event}\n")
    for words in (["runs"], ["check", NAME], ["report", NAME]):
        assert main.main(words) in {0, 1}


RUN_FILES = ("run.json", "process.json", "exit.json", "verdict.json", "metrics.jsonl", "console.log",
             "probe/rank-0.jsonl", "lock")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_FILES)
def test_no_command_waits_for_a_file_of_a_run(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for words in (["runs"], ["cache", "list"], *([verb, str(run)] for verb in
                  ("check", "report", "attach", "logs", "stop"))):  # fmt: skip
        assert main.main(words) in {0, 1, 2, 4, 5, 130}, words


def test_a_run_of_another_user_is_not_ready(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "open_regular", refused)
    assert main.main(["check", str(run)]) == 5
    assert "rank-0.jsonl" in capsys.readouterr().err


HEAD = "stage: sft\nbackend: trl\ndeepspeed: none\nargs:\n  model_name_or_path: a/b\n  dataset_name: a/b\n"


def doubling(value: str, last: str) -> str:
    lines = [f"  x{n}: {value.replace('NEXT', f'args.x{n + 1}')}" for n in range(40)]
    return HEAD + "\n".join(lines) + f"\n  x40: {last}\n"


BOMBS = {
    "text": doubling("${NEXT}${NEXT}", "word"),
    "list": doubling("['${NEXT}', '${NEXT}']", "[1]"),
    "unclosed": HEAD + "  run_name: '" + "${" * 5000 + "'\n",
    "many": HEAD + "  run_name: '" + "${args.dataset_name}" * 50_000 + "'\n",
    "itself": HEAD + "  run_name: ${args}\n",
    "decoded": HEAD + "  run_name: ${oc.decode:'${args}'}\n",
    "keys": HEAD + "".join(f"  unknown_key_{n}: 1\n" for n in range(30_000)),
    "expected": HEAD + "expect:\n" + "".join(f"  unknown_key_{n}: 1\n" for n in range(30_000)),
    "expect": HEAD + "expect: {batch: [null]}\n",
    "exponent": HEAD + "  learning_rate: 1e999\n",
    "digits": HEAD + "  seed: " + "9" * 390 + "\n",
    "more digits": HEAD + "  seed: " + "9" * 5000 + "\n",
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"b{n}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)),
    "depth": "a: " + "[" * 100_000,
    "fifo": "extends: fifo.yaml\n" + HEAD,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_an_ordinary_error(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(BOMBS[name])
    os.mkfifo(tmp_path / "fifo.yaml")
    assert main.main(["validate-config", str(path)]) == 3
    told = capsys.readouterr().err
    assert "error[" in told
    assert f"{path}:" in told or "fifo.yaml" in told or "/dev/zero" in told


@pytest.mark.parametrize("value", ["1e+308", "-1e+308"])
def test_a_huge_number_is_planned_or_refused(tmp_path: Path, value: str) -> None:
    path, rows = tmp_path / "stage.yaml", tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 10)
    path.write_text(
        f"stage: sft\ndeepspeed: none\nargs:\n  model_name_or_path: a/b\n  num_train_epochs: {value}\n"
        f"  dataset_mixer_list: [{rows}, 1.0]\n  output_dir: {tmp_path}/out\n"
    )
    sizes = ["--gpus", "1", "--row-tokens", "10:20"]
    for words in (["validate-config", str(path)], ["plan", str(path), *sizes],
                  ["sft", str(path), "--dry-run", "--gpus", "0"]):  # fmt: skip
        assert main.main(words) in {0, 3, 5}


HOSTILE = (
    "\x1b]0;owned\x07a\x1b[31mb\x9b2Jc\x08\x7f\r\n::error::pwned\r ::warning::x\n##[error]y\u202e"
)


def harmless(text: str) -> None:
    assert all(one.isprintable() or one in "\n\t" for one in text), repr(text)
    assert not any(line.lstrip().startswith("::") for line in text.splitlines()), text
    assert "##[" not in text


def test_what_is_written_to_a_pipe_goes_through_it(tmp_path: Path) -> None:
    """Renaming a file over it would take it away, and `/dev/null` from every process of the
    machine.
    """
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    files.write_text(pipe, "a page")
    assert reader.communicate()[0] == "a page"
    assert pipe.is_fifo()


def test_hostile_text_is_made_harmless() -> None:
    harmless(printable(HOSTILE))
    assert printable("ä\tb\nc :: d") == "ä\tb\nc :: d"
    assert printable_bytes(b"\xff\x9b1m\x1b[1mok") == b"\xff1mok"
    assert json.loads(escaped(json.dumps([HOSTILE], ensure_ascii=False))) == [HOSTILE]


def test_no_command_prints_it(run: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = json.loads((run / "run.json").read_text())
    told |= {"stage": HOSTILE, "output": HOSTILE, "tracked": True}
    (run / "run.json").write_text(json.dumps(told))
    (run / "console.log").write_text(
        f"{HOSTILE}\nView run at https://a.b/{HOSTILE}\nRuntimeError: {HOSTILE}\n"
    )
    (run / "exit.json").write_text(json.dumps({"returncode": 1}))
    stage = tmp_path / "stage\x1b[31m\n::error::.yaml"
    escapes = "\\e]0;x\\a\\e[31m\\n::error::pwned"
    stage.write_text(
        HEAD + f'  run_name: "{escapes}"\n  "{escapes}": 1\n  learning_rate: "{escapes}"\n'
    )
    for words in (["runs"], ["check", str(run)], ["logs", str(run)], ["report", str(run)], ["runs", escapes],
                  ["validate-config", str(stage)], ["sft", str(stage), "--dry-run", "--gpus", "0"],
                  ["check", HOSTILE], ["explain", HOSTILE]):  # fmt: skip
        main.main(words)
        out, err = capfd.readouterr()
        harmless(out)
        harmless(err)
        assert out + err


def test_a_command_to_paste_keeps_its_values() -> None:
    from launcher.runs.attempt import Command

    word = "a\x1b[31m'\\ #\n::error::"
    shown = Command(argv=("printf", "%s", word), env={}, cwd=Path()).shell()
    harmless(shown)
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout == word


def test_the_bug_reporter_takes_any_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise RuntimeError("no \udcff UTF-8 \x1b[31m\n::error::")

    monkeypatch.setattr(rundir, "known_runs", fails)
    assert main.main(["runs", "--format", "json"]) == 70
    told = capsys.readouterr().err
    harmless(told)
    assert "bug in launch: RuntimeError" in told
    name = os.fsdecode(b"/nowhere/\xff.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "validate-config", name], capture_output=True
    )
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "Applying Liger kernels for model type: qwen2 with kwargs: {'rope': True}",
        "Attempting to apply liger-kernel. fused_linear_cross_entropy=True",
    ],
)
@pytest.mark.parametrize(
    "row",
    [
        "2026-11-20 15:52:52 - INFO - finetune.py:700 - Sample 1 of the training set: {{'text': '{0}'}}",
        'a question was "how is it when it says {0}"',
    ],
)
def test_a_row_that_speaks_of_liger_changes_no_verdict(
    tmp_path: Path, row: str, words: str
) -> None:
    corpus = Path(__file__).parent / "corpus" / "dpo_without_probe.log"
    before = check.judge_log(corpus)
    lines = corpus.read_text(errors="replace").splitlines(keepends=True)
    # ahead of all else, where nothing has been announced yet, and at the end
    (log := tmp_path / "train.log").write_text(
        "".join([*lines[:1], row.format(words) + "\n", *lines[1:]])
    )
    after = check.judge_log(log)
    assert (after.point("liger").state, after.status) == (
        before.point("liger").state,
        before.status,
    )
