"""Files and values that others may have written: read in bounds, in time, with an exit code."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import made_runs
import pytest

from launcher import files
from launcher.cli import main
from launcher.printable import escape_controls, make_printable, make_printable_bytes
from launcher.runs import rundir
from launcher.runs.attempt import Command
from launcher.verdict import check, evidence

NAME = "20260101T000000Z-dpo-a"
LIMIT_S = 60.0
"""What hangs is ended after it: nothing here takes a tenth of that on a machine that has time."""


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    def time_out(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, time_out)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run() -> Path:
    return made_runs.write_run(rundir.find_runs_root() / NAME)


def make_odd_file(path: Path, kind: str) -> None:
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "sparse":
            path.touch()
            os.truncate(path, 2**40)


@pytest.mark.parametrize("kind", ["fifo", "endless", "folder", "sparse"])
def test_what_is_no_file_of_a_usual_size_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.json"
    make_odd_file(path, kind)
    with pytest.raises(OSError, match=r"regular|levels of symbolic|No such device|too large"):
        files.read_bytes(path)
    assert files.read_json(path) == {}


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"event": ' + b"[" * 200_000, id="depth"),
        pytest.param(b'{"a":' * 70 + b"1" + b"}" * 70, id="nested"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(b"[1, 2]", id="list"),
        pytest.param(b'{"event": "' + b"x" * 2**21 + b'"}', id="huge"),
    ],
)
def test_a_bad_line_costs_itself(run: Path, line: bytes) -> None:
    record = run / "probe" / "rank-0.jsonl"
    first, *rest = record.read_bytes().splitlines()
    record.write_bytes(b"\n".join([first, line, *rest, line]))
    assert files.parse_line(line) == {}
    probe = evidence.read_run(run).probe
    assert probe is not None
    assert probe.last_step == 40
    assert main.main(["check", NAME]) == 0


@pytest.mark.parametrize("digits", ["9" * 25, "-" + "9" * 400])
def test_a_number_that_is_too_large_is_infinite(digits: str) -> None:
    value = files.parse_line(f'{{"step": {digits}}}'.encode())["step"]
    assert abs(value) == float("inf")


def test_a_number_of_64_bits_is_read_exactly() -> None:
    assert files.parse_line(b'{"inode": 18446744073709551615}') == {"inode": 2**64 - 1}


@pytest.mark.parametrize(
    "event",
    [
        '{"event": "step", "step": 999999999999, "loss": 1}',
        '{"event": "start", "world": 1000000000, "attempt": 1}',
        '{"event": "step", "step": 1e300, "tokens": 1e308, "seconds": -1}',
        '{"event": "liger", "calls": {"rope": 1e400}}',
    ],
)
def test_a_huge_number_takes_neither_memory_nor_the_command(run: Path, event: str) -> None:
    with (run / "probe" / "rank-0.jsonl").open("a") as record:
        record.write(f"{event}\n")
    assert main.main(["runs"]) == 0
    assert main.main(["check", NAME]) in {0, 1}
    assert main.main(["report", NAME]) == 0


RUN_FILES = """
run.json process.json exit.json verdict.json metrics.jsonl console.log probe/rank-0.jsonl lock
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_FILES.split())
def test_no_command_waits_for_a_file_of_a_run(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert main.main(["runs"]) == 0
    assert main.main(["cache", "list"]) == 0
    for verb in ("check", "report", "attach", "logs", "stop"):
        assert main.main([verb, str(run)]) in {0, 1, 2, 4, 5, 130}, verb


def test_a_run_of_another_user_is_not_ready(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "open_regular", refuse)
    assert main.main(["check", str(run)]) == 5
    assert "rank-0.jsonl" in capsys.readouterr().err


# -- stage files that expand to too much

HEAD = """\
stage: sft
backend: trl
deepspeed: none
args:
  model_name_or_path: a/b
  dataset_name: a/b
"""
UNKNOWN_KEYS = "".join(f"  unknown_key_{number}: 1\n" for number in range(30_000))


def doubling(template: str, last: str) -> str:
    """Each of 40 values names the next one twice."""
    text = HEAD
    for number in range(40):
        value = template.replace("NEXT", f"args.x{number + 1}")
        text += f"  x{number}: {value}\n"
    return f"{text}  x40: {last}\n"


def exploding_aliases() -> str:
    text = "a: &a [x,x,x,x,x,x,x,x,x]\n"
    for above, name in zip("abcdefghi", "bcdefghij", strict=True):
        aliases = ",".join([f"*{above}"] * 9)
        text += f"{name}: &{name} [{aliases}]\n"
    return text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(doubling("${NEXT}${NEXT}", "word"), id="text"),
        pytest.param(doubling("['${NEXT}', '${NEXT}']", "[1]"), id="list"),
        pytest.param(f"{HEAD}  run_name: '{'${' * 5000}'\n", id="unclosed"),
        pytest.param(f"{HEAD}  run_name: '{'${args.dataset_name}' * 50_000}'\n", id="many"),
        pytest.param(f"{HEAD}  run_name: ${{args}}\n", id="itself"),
        pytest.param(f"{HEAD}  run_name: ${{oc.decode:'${{args}}'}}\n", id="decoded"),
        pytest.param(f"{HEAD}{UNKNOWN_KEYS}", id="keys"),
        pytest.param(f"{HEAD}expect:\n{UNKNOWN_KEYS}", id="expected"),
        pytest.param(f"{HEAD}expect: {{batch: [null]}}\n", id="expect"),
        pytest.param(f"{HEAD}  learning_rate: 1e999\n", id="exponent"),
        pytest.param(f"{HEAD}  seed: {'9' * 390}\n", id="digits"),
        pytest.param(f"{HEAD}  seed: {'9' * 5000}\n", id="more digits"),
        pytest.param(exploding_aliases(), id="aliases"),
        pytest.param(f"a: {'[' * 100_000}", id="depth"),
        pytest.param(f"extends: fifo.yaml\n{HEAD}", id="fifo"),
    ],
)
def test_a_bomb_is_an_ordinary_error(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(text)
    os.mkfifo(tmp_path / "fifo.yaml")
    assert main.main(["validate-config", str(path)]) == 3
    stderr = capsys.readouterr().err
    assert "error[" in stderr
    assert f"{path}:" in stderr or "fifo.yaml" in stderr


@pytest.mark.parametrize("value", ["1e+308", "-1e+308"])
def test_a_huge_number_is_planned_or_refused(tmp_path: Path, value: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 10)
    path = tmp_path / "stage.yaml"
    path.write_text(f"""\
stage: sft
deepspeed: none
args:
  model_name_or_path: a/b
  num_train_epochs: {value}
  dataset_mixer_list: [{rows}, 1.0]
  output_dir: {tmp_path}/out
""")
    for words in (
        ["validate-config", str(path)],
        ["plan", str(path), "--gpus", "1", "--row-tokens", "10:20"],
        ["sft", str(path), "--dry-run", "--gpus", "0"],
    ):
        assert main.main(words) in {0, 3, 5}


# -- texts that would command a terminal or a CI system

HOSTILE = (
    "\x1b]0;owned\x07a\x1b[31mb\x9b2Jc\x08\x7f\r\n::error::pwned\r ::warning::x\n##[error]y\u202e"
)


def require_harmless(text: str) -> None:
    visible = text.replace("\n", "").replace("\t", "")
    assert visible.isprintable(), repr(text)
    assert "##[" not in text
    for line in text.splitlines():
        assert not line.lstrip().startswith("::"), text


def test_hostile_text_is_made_harmless() -> None:
    require_harmless(make_printable(HOSTILE))
    assert make_printable("ä\tb\nc :: d") == "ä\tb\nc :: d"
    assert make_printable_bytes(b"\xff\x9b1m\x1b[1mok") == b"\xff1mok"
    assert json.loads(escape_controls(json.dumps([HOSTILE], ensure_ascii=False))) == [HOSTILE]


@pytest.fixture
def hostile_run(run: Path) -> str:
    manifest = json.loads((run / "run.json").read_text())
    manifest |= {"stage": HOSTILE, "output": HOSTILE, "tracked": True}
    (run / "run.json").write_text(json.dumps(manifest))
    log = f"{HOSTILE}\nView run at https://a.b/{HOSTILE}\nRuntimeError: {HOSTILE}\n"
    (run / "console.log").write_text(log)
    (run / "exit.json").write_text(json.dumps({"returncode": 1}))
    return str(run)


def test_no_command_prints_hostile_text(
    hostile_run: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stage = tmp_path / "stage\x1b[31m\n::error::.yaml"
    escapes = "\\e]0;x\\a\\e[31m\\n::error::pwned"
    args = f'  run_name: "{escapes}"\n  "{escapes}": 1\n  learning_rate: "{escapes}"\n'
    stage.write_text(f"{HEAD}{args}")
    for words in (
        ["runs"],
        ["check", hostile_run],
        ["logs", hostile_run],
        ["report", hostile_run],
        ["runs", escapes],
        ["validate-config", str(stage)],
        ["sft", str(stage), "--dry-run", "--gpus", "0"],
        ["check", HOSTILE],
        ["explain", HOSTILE],
    ):
        main.main(words)
        out, err = capfd.readouterr()
        require_harmless(out)
        require_harmless(err)
        assert out + err


def test_a_command_to_paste_keeps_its_values() -> None:
    word = "a\x1b[31m'\\ #\n::error::"
    command = Command(argv=("printf", "%s", word), env={}, cwd=Path()).shell()
    require_harmless(command)
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert process.stdout == word


def test_a_bug_with_hostile_text_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("no \udcff UTF-8 \x1b[31m\n::error::")

    monkeypatch.setattr(rundir, "list_known_runs", fail)
    assert main.main(["runs", "--format", "json"]) == 70
    stderr = capsys.readouterr().err
    require_harmless(stderr)
    assert "bug in launch: RuntimeError" in stderr


def test_a_file_name_need_not_be_utf_8() -> None:
    name = os.fsdecode(b"/nowhere/\xff.yaml")
    command = [sys.executable, "-m", "launcher", "validate-config", name]
    assert subprocess.run(command, capture_output=True).returncode == 3


@pytest.mark.parametrize(
    "words",
    [
        "Applying Liger kernels for model type: qwen2 with kwargs: {'rope': True}",
        "Attempting to apply liger-kernel. fused_linear_cross_entropy=True",
    ],
    ids=["applying", "attempting"],
)
@pytest.mark.parametrize(
    "row",
    [
        "2026-11-20 15:52:52 - INFO - finetune.py:700 - Sample 1 of the training set: "
        "{{'text': '{0}'}}",
        'a question was "how is it when it says {0}"',
    ],
    ids=["sample", "question"],
)
def test_a_row_that_speaks_of_liger_changes_no_verdict(
    tmp_path: Path, row: str, words: str
) -> None:
    corpus = Path(__file__).parent / "corpus" / "dpo_without_probe.log"
    before = check.judge_log(corpus)
    # ahead of all else, where nothing has been announced yet
    first, *rest = corpus.read_text(errors="replace").splitlines(keepends=True)
    log = tmp_path / "train.log"
    log.write_text("".join([first, f"{row.format(words)}\n", *rest]))
    after = check.judge_log(log)
    assert after.point("liger").state == before.point("liger").state
    assert after.status == before.status


def test_a_pipe_that_nobody_reads_holds_nobody_up(tmp_path: Path) -> None:
    pipe = tmp_path / "verdict.json"
    os.mkfifo(pipe)
    with pytest.raises(OSError):
        files.write_bytes(pipe, b"{}")


def test_a_pipe_that_is_read_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_bytes(pipe, b"{}")
    assert os.read(reader, 10) == b"{}"
    os.close(reader)
    # renaming a file over `/dev/null` would take it from every process of the machine
    assert pipe.is_fifo()
