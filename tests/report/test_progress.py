"""The live view: what it reads out of growing files, and what it says."""

import json
import sys
from pathlib import Path

import pytest

from launcher.report import live
from launcher.report.live import View, panel, sparkline
from launcher.report.progress import Progress, Tail


def step(number: int, elapsed: float, **more: object) -> dict[str, object]:
    return {"event": "step", "step": number, "loss": 2.0 / number, "elapsed": elapsed,
            "seconds": 1.0, "tokens": 100, **more}  # fmt: skip


def test_what_is_read_of_a_log_that_grows(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert tail.read() == []
    tail.path.write_bytes(b"one\ntw")
    assert tail.read() == [b"one"]
    assert tail.read() == []
    with tail.path.open("ab") as stream:
        stream.write(b"o\r 50%|bar\rthree\n")
    assert tail.read() == [b"two", b" 50%|bar", b"three"]

    # a truncated file is begun anew
    tail = Tail(tmp_path / "other")
    tail.path.write_bytes(b"one\ntwo\nunfinish")
    assert tail.read() == [b"one", b"two"]
    tail.path.write_bytes(b"")
    assert tail.read() == []
    tail.path.write_bytes(b"three\n")
    assert tail.read() == [b"three"]


def test_it_does_not_fall_behind_for_ever(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    tail.path.write_bytes(b"line\n" * 100_000 + b"the end\n")
    tail.skip(backlog=100)
    assert tail.read()[-1] == b"the end"
    tail.skip(backlog=100)
    assert tail.read() == []
    Tail(tmp_path / "none").skip(1)


def test_speed_and_time_left() -> None:
    progress = Progress(total=10)
    assert progress.describe() == "starting"
    progress.add_event({"event": "start", "world": 2})
    assert progress.describe() == "importing"
    progress.add_event(step(1, 30.0))
    assert progress.tokens_per_second is None
    assert progress.describe() == "step 1/10   loss 2.0000"
    progress.add_event(step(2, 31.0, allocated_gib=12.34))
    progress.add_event(step(3, 32.0, allocated_gib=12.34))
    assert progress.tokens_per_second == 200.0
    assert progress.left_s == 7.0
    assert progress.describe() == "step 3/10   loss 0.6667   200 tokens/s   0:07 left   12.3 GiB"


def test_evaluations_and_saves_take_no_part_in_the_speed() -> None:
    progress = Progress(total=12)
    for number in range(1, 9):
        # 40 s of evaluation after every second step count into the one that follows
        more = {"seconds": 41.0, "interrupted": True} if number % 2 else {"interrupted": False}
        progress.add_event(step(number, number + 40.0 * ((number - 1) // 2), **more))
    assert progress.tokens_per_second == 100.0
    # and into the time that is left
    assert progress.left_s is not None and progress.left_s > 60


def watching(folder: Path, total: int | None = None, *, terminal: bool = False) -> View:
    (folder / "probe").mkdir(exist_ok=True)
    console, probe = folder / "console.log", folder / "probe"
    return View("sft demo", console, probe, Progress(total=total, attempt=2), terminal)


def write(folder: Path, *events: dict[str, object]) -> None:
    with (folder / "probe" / "rank-0.jsonl").open("a") as stream:
        stream.writelines(json.dumps(event) + "\n" for event in events)


def log(folder: Path, text: str) -> None:
    with (folder / "console.log").open("a") as stream:
        stream.write(text)


def test_plain_lines_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = watching(tmp_path, 3)
    with shown.showing():
        shown.tick()
        write(tmp_path, {"event": "start"}, step(1, 1.0))
        shown.tick()
        # not so often
        write(tmp_path, step(2, 2.0))
        shown.tick()
        monkeypatch.setattr(live, "PLAIN_EVERY_S", 0.0)
        shown.tick()
        shown.tick()
        write(tmp_path, step(3, 3.0))
        log(tmp_path, "wandb: View run a at: https://wandb.ai/e/p/runs/r\n")
    assert capsys.readouterr().err.splitlines() == [
        "sft demo   starting",
        "sft demo   step 2/3   loss 1.0000   100 tokens/s   0:01 left",
        "sft demo   https://wandb.ai/e/p/runs/r",
        "sft demo   step 3/3   loss 0.6667   100 tokens/s   0:00 left",
    ]


def test_a_further_attempt_does_not_show_the_steps_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    write(tmp_path, {"event": "start", "attempt": 1}, step(9, 9.0))
    shown = watching(tmp_path)
    shown.read_new()
    assert shown.progress.step == 0
    write(tmp_path, {"event": "start", "attempt": 2}, step(1, 1.0))
    shown.read_new()
    assert shown.progress.step == 1


SAID = "2026 - finetune.py"


@pytest.mark.parametrize(
    ("planned", "text", "total"),
    [
        (None, "2026 - finetune.py:745 - Total optimization steps = 48\n", 48),
        (50, "2026 - finetune.py:745 - Total optimization steps = 48\n", 48),
        (50, f"{SAID}:700 - Sample 1: {{'text': 'a.py:1 - Total optimization steps = 7'}}\n", 50),
        (50, f"a.py:1 - Total optimization steps = 7\n{SAID}:745 - Total optimization steps = 48\n", 48),
        (None, "{'text': '10%|#  | 1/60 [00:01<00:20,  2.8it/s]'}\n", None),
        (None, " 10%|#  | 30/60 [00:01<00:20,  2.8it/s]\n", None),
        (None, " 10%|#  | 1/60 [00:01<00:20,  2.8it/s]\n", 60),
        (50, " 10%|#  | 1/60 [00:01<00:20,  2.8it/s]\n", 50),
        (None, "Tokenizing: 10%|#  | 1/60 [00:01<00:20, 99 examples/s]\n", None),
    ],
)  # fmt: skip
def test_how_many_steps_there_will_be(
    tmp_path: Path, planned: int | None, text: str, total: int | None
) -> None:
    shown = watching(tmp_path, planned)
    write(tmp_path, step(3, 1.0))
    log(tmp_path, "an early line\n" + text)
    shown.read_new()
    assert shown.progress.total == total


def test_a_terminal_that_has_gone_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        """A stream whose terminal was closed."""

        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    shown = watching(tmp_path)
    with shown.showing():
        monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.undo()


def test_a_terminal_gets_a_panel_that_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = watching(tmp_path, 3, terminal=True)
    with shown.showing():
        write(tmp_path, step(1, 1.0), step(2, 2.0))
        shown.tick()
    last = capsys.readouterr().err.rpartition("step 2/3")[2]
    # of a run that has ended nothing is left
    assert "ended" in last and "left" not in last


def shown_on(columns: int, progress: Progress, tracker: str | None = None) -> list[str]:
    """The panel as a terminal of so many columns shows it."""
    from rich.console import Console, Group

    console = Console(width=columns, force_terminal=True, color_system=None, _environ={})
    with console.capture() as captured:
        console.print(Group(*panel("sft demo", progress, console, tracker)))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= columns
    return lines


def trained(steps: int) -> Progress:
    """A run that has come so far, with everything that a record can hold."""
    progress = Progress(total=100)
    progress.add_event({"event": "start", "t": 1000.0, "world": 1})
    progress.add_event({"event": "dataset_cache", "state": "hit"})
    progress.add_event({"event": "model", "attention": "sdpa"})
    progress.add_event({"event": "device", "total_gib": 79.6})
    progress.add_event({"event": "packing", "state": "on"})
    progress.add_event({"event": "packing_isolation", "state": "isolated"})
    progress.add_event({"event": "liger", "calls": {"rms_norm": 12}})
    for number in range(1, steps + 1):
        more = {
            "grad_norm": 0.5, "learning_rate": 1e-5, "allocated_gib": 61.25, "t": 1000.0 + number,
        }  # fmt: skip
        progress.add_event(step(number, float(number), **more))
        if number == 20:
            progress.add_event({"event": "saved", "t": 1020.0, "path": "out/step_20"})
    return progress


@pytest.mark.parametrize("columns", [80, 120])
def test_the_panel_fits_and_shows_what_is_known(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.time, "time", lambda: 1030.0)
    head, figures, machine, proofs, tracked = shown_on(
        columns, trained(25), "https://wandb.ai/a/b/runs/c"
    )
    assert head.startswith("sft demo   █") and head.endswith(
        "step 25/100   0:30 elapsed   1:15 left"
    )
    assert figures.startswith("loss 0.0800 █") and "learning rate 1.00e-05" in figures
    assert machine == "100 tokens/s   61.2 of 80 GiB   checkpoint of step 20, 10s ago"
    assert proofs == ("so far: data cache hit, attention sdpa, packing isolated, liger engaged")
    assert tracked == "https://wandb.ai/a/b/runs/c"
    # the bar gives way to the words
    assert (
        shown_on(56, trained(25))[0] == "sft demo   █░░░   step 25/100   0:30 elapsed   1:15 left"
    )


def test_before_the_first_step_the_phase_is_shown_with_its_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    progress = Progress(total=10)
    assert shown_on(80, progress) == ["sft demo   starting"]
    progress.add_event({"event": "start", "t": 1000.0})
    now = 1004.0
    assert shown_on(80, progress) == ["sft demo   importing (usually 15 to 60 s)   0:04 elapsed"]
    bar = b"Tokenizing train dataset (num_proc=2):  38%|###   | 150/400 [00:00<00:00, 1477.32 examples/s]"
    progress.read_phase(bar)
    now = 1006.0
    assert shown_on(80, progress) == [
        "sft demo   Tokenizing train dataset 150/400   0:02   0:06 elapsed"
    ]
    progress.read_phase(b"model.safetensors:  45%|####      | 445M/988M [00:02<00:02, 400MB/s]")
    assert progress.describe() == "model.safetensors 445M/988M"
    progress.read_phase(b"Caching reference logprobs:  20%|##    | 3/15 [00:02<00:02, 1.2it/s]")
    assert progress.describe() == "Caching reference logprobs 3/15"
    progress.read_phase(b"Building extension module cpu_adam...")
    assert progress.describe() == "building cpu_adam"
    progress.add_event({"event": "model", "t": 1007.0, "attention": "sdpa"})
    assert progress.describe() == "waiting for the first step"
    progress.add_event(step(10, 12.0))
    assert progress.phase == "saving the model"
    # while it trains, bars of evaluations are not the phase
    progress = trained(3)
    before = progress.phase
    progress.read_phase(b"Evaluating:  20%|##    | 3/15 [00:02<00:02, 1.2it/s]")
    assert progress.phase == before


def test_a_curve_spans_all_values() -> None:
    assert sparkline([]) == sparkline([1.0]) == ""
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁" or sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert len(sparkline([float(n) for n in range(1000)])) == 20
    assert sparkline([1.0, 1.0]) == "▁▁"


def test_the_loss_is_the_mean_over_ranks(tmp_path: Path) -> None:
    """TRL divides the loss of each rank by the tokens of all: that of a rank with longer rows is larger."""
    view = watching(tmp_path)
    write(
        tmp_path, {"event": "start", "world": 2}, step(1, 1.0, loss=13.0), step(2, 2.0, loss=14.0)
    )
    other = tmp_path / "probe" / "rank-1.jsonl"
    other.write_text(json.dumps(step(1, 1.0, loss=11.0)) + "\n")
    view.read_new()
    # the other rank is still at its second step
    assert (view.progress.step, view.progress.loss) == (2, 12.0)
    with other.open("a") as stream:
        stream.write(json.dumps(step(2, 2.0, loss=8.0)) + "\n")
    view.read_new()
    assert (view.progress.loss, view.progress.losses) == (11.0, [12.0, 11.0])
    with other.open("a") as stream:
        stream.write(json.dumps(step(3, 3.0, loss=None)) + "\n")
    write(tmp_path, step(3, 3.0, loss=9.0))
    view.read_new()
    assert (view.progress.loss, view.progress.losses) == (None, [12.0, 11.0])


def test_what_was_proved_at_the_beginning_is_shown_to_whoever_comes_late(tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    write(
        tmp_path, {"event": "start", "attempt": 2, "t": 1.0}, {"event": "packing", "state": "off"}
    )
    write(tmp_path, *(step(number, float(number), pad="x" * 900) for number in range(1, 300)))
    shown = watching(tmp_path)
    shown.read_new()
    assert shown.progress.shown == {"packing": "off"} and shown.progress.step == 299


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("{'loss': '0.6938', 'grad_norm': '2.238', 'epoch': '0.25'}", "epoch 0.25"),
        (" 3%|#| 2/75 [00:01<00:59]  {'loss': 0.69, 'learning_rate': 1e-05, 'epoch': 1.5}", "epoch 1.50"),
        ("{'loss': '0.69', 'rewards/margins': '-3.11e-03', 'rewards/accuracies': '0.625', 'epoch': '2'}",
         "epoch 2.00, margin -0.00311, accuracy 62%"),
        # a row of the data, and what is no step's
        ("{'text': \"{'epoch': '3'}\"}", ""),
        ("{'eval_loss': '0.7', 'epoch': '3'}", ""),
        ("{'loss': '0.69', 'epoch': 'nan', 'rewards/margins': 'nan'}", ""),
    ],
)  # fmt: skip
def test_epoch_and_preferences_out_of_the_log(tmp_path: Path, line: str, shown: str) -> None:
    view = watching(tmp_path, 75)
    write(tmp_path, step(3, 1.0))
    log(tmp_path, "an early line\n" + line + "\n")
    view.read_new()
    parts = view.progress.describe().split("   ")
    assert (
        ", ".join(part for part in parts if part.split()[0] in ("epoch", "margin", "accuracy"))
        == shown
    )


def test_epoch_by_the_rows_where_no_log_says_it() -> None:
    progress = Progress(total=100, rows=400, rows_per_step=16)
    progress.add_event({"event": "start"})
    assert progress.epoch is None
    progress.add_event(step(5, 1.0))
    assert progress.epoch == 0.2
    # the trainer dropped some, and trains on fewer
    progress.add_event({"event": "data_rows", "given": 400, "kept": 320})
    assert progress.epoch == 0.25
    unknown = Progress(total=100)
    unknown.add_event({"event": "data_rows", "given": 400, "kept": 320})
    unknown.add_event(step(5, 1.0))
    assert unknown.epoch is None and "epoch" not in unknown.describe()


def test_the_panel_shows_what_dpo_is_looked_at_for() -> None:
    progress = trained(20)
    progress.rows, progress.rows_per_step = 400, 16
    progress.add_event(step(21, 21.0, margin=0.125, accuracy=0.75))
    # a step without them changes nothing
    progress.add_event(step(22, 22.0))
    for columns in (80, 120):
        lines = shown_on(columns, progress)
        assert "step 22/100   epoch 0.88" in lines[0]
        assert "margin 0.125   accuracy 75%" in lines[1]
    # of a further attempt nothing is left
    progress.add_event({"event": "start"})
    progress.add_event(step(1, 1.0))
    assert progress.margin is None
