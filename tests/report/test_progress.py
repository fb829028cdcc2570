"""The live view: what it reads out of growing files, and what it says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group

from launcher import redaction
from launcher.report import live
from launcher.report.live import View, render_panel, render_sparkline
from launcher.report.progress import Progress, Tail

Capture = pytest.CaptureFixture[str]


def step(number: int, elapsed: float | None = None, **more: Any) -> dict[str, Any]:
    """A step of one second with 100 tokens."""
    return {
        "event": "step",
        "step": number,
        "loss": 2.0 / number,
        "elapsed": float(number) if elapsed is None else elapsed,
        "seconds": 1.0,
        "tokens": 100,
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "probe").mkdir()
    return tmp_path


def view_of(folder: Path, total: int | None = None, *, terminal: bool = False) -> View:
    progress = Progress(total=total, attempt=2)
    return View("sft demo", folder / "console.log", folder / "probe", progress, terminal)


def record(folder: Path, *events: dict[str, Any], rank: int = 0) -> None:
    with (folder / "probe" / f"rank-{rank}.jsonl").open("a") as stream:
        for event in events:
            stream.write(json.dumps(event) + "\n")


def log(folder: Path, text: str) -> None:
    with (folder / "console.log").open("a") as stream:
        stream.write(text)


# Logs that grow


def test_a_growing_log_is_read_in_whole_lines(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert tail.read() == []
    tail.path.write_bytes(b"one\ntw")
    assert tail.read() == [b"one"]
    assert tail.read() == []
    with tail.path.open("ab") as stream:
        stream.write(b"o\r 50%|bar\rthree\n")
    assert tail.read() == [b"two", b" 50%|bar", b"three"]


def test_a_truncated_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    tail.path.write_bytes(b"one\nunfinish")
    assert tail.read() == [b"one"]
    tail.path.write_bytes(b"")
    assert tail.read() == []
    tail.path.write_bytes(b"three\n")
    assert tail.read() == [b"three"]


def test_a_long_log_is_skipped_up_to_its_end(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    tail.skip(backlog=100)
    tail.path.write_bytes(b"line\n" * 100_000 + b"the end\n")
    tail.skip(backlog=100)
    assert tail.read()[-1] == b"the end"
    tail.skip(backlog=100)
    assert tail.read() == []


# Figures


def test_speed_and_time_left() -> None:
    progress = Progress(total=10)
    assert progress.describe() == "starting"
    progress.add_event({"event": "start", "world": 2})
    assert progress.describe() == "importing"
    progress.add_event(step(1, 30.0))
    assert progress.tokens_per_second is None
    assert progress.describe() == "step 1/10   loss 2.0000"
    for number in (2, 3):
        progress.add_event(step(number, 29.0 + number, allocated_gib=12.34))
    assert progress.describe() == "step 3/10   loss 0.6667   200 tokens/s   0:07 left   12.3 GiB"


def test_evaluations_count_into_the_time_left_and_not_into_the_speed() -> None:
    progress = Progress(total=12)
    for number in range(1, 9):
        # 40 s of evaluation after every second step count into the one that follows
        interrupted = number % 2 == 1
        elapsed = number + 40.0 * ((number - 1) // 2)
        seconds = 41.0 if interrupted else 1.0
        progress.add_event(step(number, elapsed, seconds=seconds, interrupted=interrupted))
    assert progress.tokens_per_second == 100.0
    assert progress.left_s is not None
    assert progress.left_s > 60


def test_the_loss_is_the_mean_over_ranks(folder: Path) -> None:
    """TRL divides the loss of each rank by the tokens of all: longer rows, larger loss."""
    view = view_of(folder)
    record(folder, {"event": "start", "world": 2}, step(1, loss=13.0), step(2, loss=14.0))
    record(folder, step(1, loss=11.0), rank=1)
    view.read_new()
    # the other rank is still at its second step
    assert view.progress.step == 2
    assert view.progress.loss == 12.0

    record(folder, step(2, loss=8.0), rank=1)
    view.read_new()
    assert view.progress.losses == [12.0, 11.0]

    record(folder, step(3, loss=None), rank=1)
    record(folder, step(3, loss=9.0))
    view.read_new()
    assert view.progress.loss is None
    assert view.progress.losses == [12.0, 11.0]


PLAIN_LINE = "2026 - finetune.py:745 - Total optimization steps = 48\n"
ROW = "2026 - finetune.py:700 - Sample 1: {'text': 'a.py:1 - Total optimization steps = 7'}\n"


@pytest.mark.parametrize(
    ("planned", "text", "total"),
    [
        (None, PLAIN_LINE, 48),
        (50, PLAIN_LINE, 48),
        (50, ROW, 50),
        (50, f"a.py:1 - Total optimization steps = 7\n{PLAIN_LINE}", 48),
        (None, "{'text': '10%|#  | 1/60 [00:01<00:20,  2.8it/s]'}\n", None),
        (None, " 10%|#  | 30/60 [00:01<00:20,  2.8it/s]\n", None),
        (None, " 10%|#  | 1/60 [00:01<00:20,  2.8it/s]\n", 60),
        (50, " 10%|#  | 1/60 [00:01<00:20,  2.8it/s]\n", 50),
        (None, "Tokenizing: 10%|#  | 1/60 [00:01<00:20, 99 examples/s]\n", None),
    ],
)
def test_how_many_steps_there_will_be(
    folder: Path, planned: int | None, text: str, total: int | None
) -> None:
    view = view_of(folder, planned)
    record(folder, step(3))
    log(folder, "an early line\n" + text)
    view.read_new()
    assert view.progress.total == total


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("{'loss': '0.6938', 'grad_norm': '2.238', 'epoch': '0.25'}", ["epoch 0.25"]),
        (" 3%|#| 2/75 [00:01<00:59]  {'loss': 0.69, 'epoch': 1.5}", ["epoch 1.50"]),
        (
            "{'loss': '0.69', 'rewards/margins': '-3.11e-03', 'rewards/accuracies': '0.625'}",
            ["margin -0.00311", "accuracy 62%"],
        ),
        # a row of the data, and an evaluation
        ("{'text': \"{'epoch': '3'}\"}", []),
        ("{'eval_loss': '0.7', 'epoch': '3'}", []),
        ("{'loss': '0.69', 'epoch': 'nan', 'rewards/margins': 'nan'}", []),
    ],
)
def test_epoch_and_preferences_come_from_the_log(folder: Path, line: str, shown: list[str]) -> None:
    view = view_of(folder, 75)
    record(folder, step(3))
    log(folder, f"an early line\n{line}\n")
    view.read_new()
    parts = view.progress.describe().split("   ")
    assert [part for part in parts if part.startswith(("epoch", "margin", "accuracy"))] == shown


def test_the_epoch_follows_from_the_rows_if_no_log_names_it() -> None:
    progress = Progress(total=100, rows=400, rows_per_step=16)
    progress.add_event({"event": "start"})
    assert progress.epoch is None
    progress.add_event(step(5))
    assert progress.epoch == 0.2
    # the trainer dropped some, and trains on fewer
    progress.add_event({"event": "data_rows", "given": 400, "kept": 320})
    assert progress.epoch == 0.25


def test_without_rows_a_step_there_is_no_epoch() -> None:
    progress = Progress(total=100)
    progress.add_event({"event": "data_rows", "given": 400, "kept": 320})
    progress.add_event(step(5))
    assert progress.epoch is None
    assert "epoch" not in progress.describe()


def test_a_curve_spans_all_values() -> None:
    assert render_sparkline([]) == ""
    assert render_sparkline([1.0]) == ""
    assert render_sparkline([3.0, 2.0, 1.0]) in ("█▅▁", "█▄▁")
    assert render_sparkline([1.0, 1.0]) == "▁▁"
    assert len(render_sparkline([float(number) for number in range(1000)])) == 20


# Views


def test_plain_lines_where_there_is_no_terminal(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(folder, 3)
    with view.showing():
        view.tick()
        record(folder, {"event": "start"}, step(1))
        view.tick()
        # not so often
        record(folder, step(2))
        view.tick()
        monkeypatch.setattr(live, "PLAIN_EVERY_S", 0.0)
        view.tick()
        view.tick()
        record(folder, step(3))
        log(folder, "wandb: View run a at: https://wandb.ai/e/p/runs/r\n")
    assert capsys.readouterr().err.splitlines() == [
        "sft demo   starting",
        "sft demo   step 2/3   loss 1.0000   100 tokens/s   0:01 left",
        "sft demo   https://wandb.ai/e/p/runs/r",
        "sft demo   step 3/3   loss 0.6667   100 tokens/s   0:00 left",
    ]


def test_a_further_attempt_does_not_show_the_steps_of_the_first(folder: Path) -> None:
    record(folder, {"event": "start", "attempt": 1}, step(9))
    view = view_of(folder)
    view.read_new()
    assert view.progress.step == 0
    record(folder, {"event": "start", "attempt": 2}, step(1))
    view.read_new()
    assert view.progress.step == 1


def test_a_late_viewer_sees_what_was_proved_at_the_beginning(folder: Path) -> None:
    record(folder, {"event": "start", "attempt": 2}, {"event": "packing", "state": "off"})
    record(folder, *[step(number, pad="x" * 900) for number in range(1, 300)])
    view = view_of(folder)
    view.read_new()
    assert view.progress.shown == {"packing": "off"}
    assert view.progress.step == 299


class ClosedTerminal:
    """A stream whose terminal was closed."""

    def write(self, _: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")


def test_a_closed_terminal_ends_no_view(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, view_of(folder).showing():
        patch.setattr(sys, "stderr", ClosedTerminal())


def test_of_a_run_that_has_ended_the_panel_shows_no_time_left(
    folder: Path, capsys: Capture
) -> None:
    view = view_of(folder, 3, terminal=True)
    with view.showing():
        record(folder, step(1), step(2))
        view.tick()
    last = capsys.readouterr().err.rpartition("step 2/3")[2]
    assert "ended" in last
    assert "left" not in last


def panel_lines(columns: int, progress: Progress, tracker: str | None = None) -> list[str]:
    """The panel as a terminal of so many columns shows it."""
    redactor = redaction.find_process_secrets()
    console = Console(width=columns, force_terminal=True, color_system=None, _environ={})
    with console.capture() as captured:
        console.print(Group(*render_panel("sft demo", progress, console, tracker, redactor)))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= columns
    return lines


@pytest.fixture
def rich() -> Progress:
    """A run of 25 steps with everything that a record can contain."""
    progress = Progress(total=100)
    for event in (
        {"event": "start", "t": 1000.0, "world": 1},
        {"event": "dataset_cache", "state": "hit"},
        {"event": "model", "attention": "sdpa"},
        {"event": "device", "total_gib": 79.6},
        {"event": "packing", "state": "on"},
        {"event": "packing_isolation", "state": "isolated"},
        {"event": "liger", "calls": {"rms_norm": 12}},
    ):
        progress.add_event(event)
    for number in range(1, 26):
        figures = {"grad_norm": 0.5, "learning_rate": 1e-5, "allocated_gib": 61.25}
        progress.add_event(step(number, t=1000.0 + number, **figures))
    progress.add_event({"event": "saved", "t": 1020.0, "path": "out/step_25"})
    return progress


@pytest.mark.parametrize("columns", [80, 120])
def test_the_panel_fits_and_shows_what_is_known(
    columns: int, rich: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.time, "time", lambda: 1030.0)
    link = "https://wandb.ai/a/b/runs/c"
    head, figures, machine, proofs, tracker = panel_lines(columns, rich, link)
    assert head.startswith("sft demo   █")
    assert head.endswith("step 25/100   0:30 elapsed   1:15 left")
    assert figures.startswith("loss 0.0800 █")
    assert "learning rate 1.00e-05" in figures
    assert machine == "100 tokens/s   61.2 of 80 GiB   checkpoint of step 25, 10s ago"
    assert proofs == "so far: data cache hit, attention sdpa, packing isolated, liger engaged"
    assert tracker == link


def test_in_a_narrow_panel_the_bar_gives_way(
    rich: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.time, "time", lambda: 1030.0)
    head = panel_lines(56, rich)[0]
    assert head == "sft demo   █░░░   step 25/100   0:30 elapsed   1:15 left"


def test_before_the_first_step_the_phase_is_shown_with_its_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    progress = Progress(total=10)
    assert panel_lines(80, progress) == ["sft demo   starting"]
    progress.add_event({"event": "start", "t": 1000.0})
    now = 1004.0
    head = "sft demo   importing (usually 15 to 60 s)   0:04 elapsed"
    assert panel_lines(80, progress) == [head]
    progress.read_phase(
        b"Tokenizing train dataset (num_proc=2):  38%|###   | 150/400 [00:00<00:00]"
    )
    now = 1006.0
    head = "sft demo   Tokenizing train dataset 150/400   0:02   0:06 elapsed"
    assert panel_lines(80, progress) == [head]


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        (
            b"model.safetensors:  45%|####      | 445M/988M [00:02<00:02]",
            "model.safetensors 445M/988M",
        ),
        (
            b"Caching reference logprobs:  20%|##  | 3/15 [00:02<00:02]",
            "Caching reference logprobs 3/15",
        ),
        (b"Building extension module cpu_adam...", "building cpu_adam"),
    ],
)
def test_phases_of_a_log(line: bytes, phase: str) -> None:
    progress = Progress(total=10)
    progress.add_event({"event": "start", "t": 1000.0})
    progress.read_phase(line)
    assert progress.describe() == phase


def test_phases_of_a_record(rich: Progress) -> None:
    progress = Progress(total=10)
    progress.add_event({"event": "model", "t": 1007.0, "attention": "sdpa"})
    assert progress.describe() == "waiting for the first step"
    progress.add_event(step(10))
    assert progress.phase == "saving the model"

    # while it trains, bars of evaluations are not the phase
    phase = rich.phase
    rich.read_phase(b"Evaluating:  20%|##    | 3/15 [00:02<00:02, 1.2it/s]")
    assert rich.phase == phase


def test_the_panel_of_dpo_shows_margin_and_accuracy(rich: Progress) -> None:
    rich.rows = 400
    rich.rows_per_step = 16
    rich.add_event(step(26, margin=0.125, accuracy=0.75))
    # a step without them changes nothing
    rich.add_event(step(27))
    for columns in (80, 120):
        head, figures, *_ = panel_lines(columns, rich)
        assert "step 27/100   epoch 1.08" in head
        assert "margin 0.125   accuracy 75%" in figures

    # a further attempt begins without them
    rich.add_event({"event": "start"})
    rich.add_event(step(1))
    assert rich.margin is None
