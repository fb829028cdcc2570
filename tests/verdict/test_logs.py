"""Lines -> signals, steps and arguments, on real logs and on what logs do to a reader."""

import itertools
import math
from pathlib import Path

import pytest
from conftest import DATA, REPOSITORY
from judged_runs import STAMP, dump, total

from launcher.upstream.logs.common import Pattern
from launcher.verdict.evidence import PATTERNS
from launcher.verdict.logs import segments, survey
from launcher.verdict.logs.scan import Log, scan

LOGS = DATA / "logs"
READ_SPECIALLY = ("arguments", "step", "block_loss", "metrics", "mean_nonfinite")


def known_lines() -> dict[str, list[str]]:
    """Real lines that mean a signal, by its name; `none`: nothing."""
    table = (DATA / "log_lines.tsv").read_text(encoding="utf-8")
    lines: dict[str, list[str]] = {}
    for row in table.removesuffix("\n").split("\n"):
        signal, _, escaped = row.partition("\t")
        text = escaped.replace("\\n", "\n").replace("\\\\", "\\")
        lines.setdefault(signal, []).append(text)
    return lines


LINES = known_lines()


def log_of(folder: Path, content: str | bytes) -> Log:
    path = folder / "console.log"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return scan(path, PATTERNS)


def step_numbers(log: Log) -> list[int]:
    return [step.step for step in log.steps]


def messages(log: Log) -> list[str]:
    """Of the exceptions."""
    return [signal.fields["message"] for signal in log.all("exception")]


def sft_step(step: int, loss: float | str = 2.5) -> str:
    return f"{STAMP}finetune.py:956 - [RANK 0]   Step: {step}, LR: 1e-05, Loss: {loss}, TPS: 12.5\n"


def dpo_step(step: int, loss: float | str = 0.6931471824645996) -> str:
    return f"{STAMP}dpo_tune_cache.py:682 -   Step: {step}, LR: 5e-07, Loss: {loss}\n"


def test_a_real_log() -> None:
    log = scan(LOGS / "sft_liger_pack_miss.log", PATTERNS)
    assert step_numbers(log) == list(range(1, 31))
    first = log.steps[0]
    assert (first.loss, first.learning_rate) == (12.101487159729004, 4.833333333333333e-06)
    # as `sed -n 297p` shows it: a bar redraws on the same line
    assert (first.tokens_per_second, first.line) == (395.7507386232391, 297)
    assert first.text.startswith("2026-11-20 15:41:37 - INFO - finetune.py:956")
    assert (log.lines, log.last_bar) == (336, (30, 336))
    assert (log.total_steps, log.last_step) == (30, 30)
    assert (log.arguments["packing"], log.argument_lines["packing"]) == ("True", 81)
    assert log.arguments["dataset_transform_fn"] == (
        "['sft_tulu_tokenize_and_truncate_v1', 'sft_tulu_filter_v1']"
    )
    (applied,) = log.all("liger_applied")
    assert applied.line == 262
    assert applied.fields == {
        "model_type": "qwen2",
        "kwargs": "{'fused_linear_cross_entropy': True}",
    }


@pytest.mark.parametrize(
    ("line", "aux_loss", "tokens_per_second"),
    [
        ("finetune.py:951 - [RANK 0]   Step: 1, LR: 1, Loss: 2.5, Aux Loss: 0.25, TPS: 9", 0.25, 9),
        ("dpo_tune_cache.py:682 -   Step: 2, LR: 1e-05, Loss: 2.5 Aux Loss: 0.5", 0.5, None),
    ],
)
def test_reads_aux_loss_in_both_spellings(
    tmp_path: Path, line: str, aux_loss: float, tokens_per_second: float | None
) -> None:
    (step,) = log_of(tmp_path, f"{STAMP}{line}\n").steps
    assert step.extra == {"aux_loss": aux_loss}
    assert step.tokens_per_second == tokens_per_second


def test_colours_carriage_returns_and_bad_bytes(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        b"\xff\xfe\x00 garbage\r\n"
        b"\xe2\x94\x82   \x1b[1;35mFlatArguments\x1b[0m\x1b[1m(\x1b[0m\n"
        b"\xe2\x94\x82   \xe2\x94\x82   \x1b[33mpacking\x1b[0m=\x1b[3;92mTrue\x1b[0m,\n"
        b"\r 50%|x| 1/2 [00:01<00:01, 1it/s]\x1b[A" + sft_step(1).encode() + b"\x1b[31m"
        + sft_step(2).replace("Step", "\x1b[1mStep\x1b[0m").encode(),
    )  # fmt: skip
    assert log.arguments == {"packing": "True"}
    assert [(s.step, s.line) for s in log.steps] == [(1, 4), (2, 5)]
    assert "\x1b" not in log.steps[1].text


def test_a_loss_that_was_cut_off_is_not_taken_for_a_number(tmp_path: Path) -> None:
    whole = dpo_step(1) + dpo_step(2, 11.853009)
    cut = whole.rindex("1.853009") + 1
    assert log_of(tmp_path, whole[:cut]).last_step == 1
    assert log_of(tmp_path, whole.rstrip("\n")).last_step == 2


def appended(attention: str, packing: bool, *steps: int) -> str:
    """The log of one run, which a file may hold several of."""
    detected = f"{STAMP}model_utils.py:93 - Auto-detected attention implementation: {attention}\n"
    lines = "".join(sft_step(step) for step in steps)
    return detected + dump(packing=packing) + total(9) + lines


def test_the_last_run_of_an_appended_log_counts(tmp_path: Path) -> None:
    crash = "Traceback (most recent call last):\nRuntimeError: first run\n"
    log = log_of(tmp_path, appended("flash_2", True, 1, 5) + crash + appended("torch", False, 3))
    assert log.arguments["packing"] == "False"
    assert step_numbers(log) == [3]
    (attention,) = log.all("attention")
    assert attention.fields["value"] == "torch"
    assert not log.all("exception")


def test_follows_tracebacks_of_interleaved_ranks(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        "\r 10%|█ | 1/9 [00:01<00:09]\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/x/finetune.py", line 12, in <module>\n'
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/x/a.py", line 1, in main\n'
        "2026-11-20 15:41:37 - INFO - something else: here\n"
        '[rank1]:   File "/x/b.py", line 34, in main\n'
        "[rank1]: KeyError: 'x'\n"
        "[rank0]: torch.distributed.DistBackendError: NCCL error\n"
        "\n[rank1]: During handling of the above exception, another exception occurred:\n\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/x/c.py", line 5, in main\n'
        "[rank1]: ValueError: no such column: x\n",
    )
    raised = []
    for signal in log.all("exception"):
        raised.append((signal.fields["rank"], signal.fields["type"], signal.fields["at"]))
    assert raised == [
        ("1", "KeyError", "/x/b.py:34"),
        ("0", "torch.distributed.DistBackendError", "/x/a.py:1"),
        ("1", "ValueError", "/x/c.py:5"),
    ]
    assert log.all("exception")[-1].fields["chained"] == "yes"
    assert log.all("exception")[-1].fields["message"] == "no such column: x"


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_every_pattern_has_a_line(pattern: Pattern) -> None:
    if pattern.name in READ_SPECIALLY:
        return
    segments = "\n".join(LINES[pattern.name]).encode().split(b"\n")
    candidates = [segment for segment in segments if pattern.needle in segment]
    assert any(map(pattern.regex.search, candidates))


def single_spaced(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", [name for name in LINES if name != "none"])
def test_a_line_is_known_for_what_it_means(tmp_path: Path, name: str) -> None:
    for text in LINES[name]:
        lines = ["one\r\x1b[31m two\x1b[0m", *text.split("\n"), "end", ""]
        signal = log_of(tmp_path, "\n".join(lines)).all(name)[0]
        line = single_spaced(lines[signal.line - 1])
        assert line[:300].endswith(single_spaced(signal.text))


@pytest.mark.parametrize("line", LINES["none"])
def test_a_line_that_means_nothing_is_no_signal(tmp_path: Path, line: str) -> None:
    assert log_of(tmp_path, f"one\n{line}\nend\n").signals == ()


def test_the_line_of_the_source_that_refuses_is_not_what_was_refused(tmp_path: Path) -> None:
    unused = "Some specified arguments are not used by the HfArgumentParser: "
    source = f'    raise ValueError(f"{unused}{{remaining_args}}")\n'
    (signal,) = log_of(tmp_path, f"{source}ValueError: {unused}['--x']\n").all("refused")
    assert signal.fields["message"] == f"{unused}['--x']"


def test_only_the_traceback_right_behind_a_harmless_word_is_harmless(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        "[rank1]: Exception ignored in: <function tqdm.__del__ at 0x7f>\n"
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "t.py", line 1\n'
        '[rank0]: Traceback (most recent call last):\n[rank0]:   File "main.py", line 7\n'
        "[rank1]: TypeError: ignored\n[rank0]: ValueError: fatal\n"
        '--- Logging error ---\nTraceback (most recent call last):\n  File "l.py", line 1\n'
        'TypeError: logged\nTraceback (most recent call last):\n  File "m.py", line 2\n'
        "RuntimeError: real\n",
    )
    assert messages(log) == ["fatal", "real"]


def test_the_first_error_after_the_last_step_is_kept_among_many(tmp_path: Path) -> None:
    handled = 'Traceback (most recent call last):\n  File "a.py", line 1\nOSError: retry\n'
    content = [handled * 200]
    content += [sft_step(number) for number in range(1, 40)]
    for rank in range(512):
        prefix = f"[rank{rank}]: "
        content.append(f"{prefix}Traceback (most recent call last):\n")
        content.append(f'{prefix}  File "b.py", line {rank}\n{prefix}ValueError: {rank}\n')

    log = log_of(tmp_path, "".join(content))

    exceptions = log.all("exception")
    assert len(exceptions) <= 150
    later = [signal for signal in exceptions if signal.line > log.steps[-1].line]
    assert (later[0].fields["rank"], later[-1].fields["rank"]) == ("0", "511")


@pytest.mark.parametrize(
    "name", ["sft_rank_dies", "dpo_nan", "trl_dpo_terminal", "sft_attempts_in_one_log"]
)
def test_it_does_not_matter_where_a_log_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    content = (REPOSITORY / "tests" / "corpus" / f"{name}.log").read_bytes() + dpo_step(1).encode()
    whole = log_of(tmp_path, content)
    assert whole.lines == content.count(b"\n")
    monkeypatch.setattr(survey, "_EDGE_PIECES", 1 << 30)
    for size in (64, 333, 5_000):
        monkeypatch.setattr(segments, "PIECE_BYTES", size)
        # a NaN is not equal to itself
        assert repr(log_of(tmp_path, content)) == repr(whole)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("launch: warning: slow", "warned"),
        ("{'eval_loss': '0.5', 'epoch': '1'}", "evaluated"),
        ("{'train_runtime': '9', 'train_loss': nan}", "mean_nonfinite"),
        ("x.py:1 - Total optimization steps = 9", "total_steps"),
        ('Traceback (most recent call last):\n  File "a.py", line 1\nOSError: no', "exception"),
    ],
)
def test_what_stands_once_in_the_middle_of_a_large_log_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, name: str
) -> None:
    monkeypatch.setattr(segments, "PIECE_BYTES", 1_000)
    steps = "".join(map(sft_step, range(100)))
    log = log_of(tmp_path, f"{steps}{content}\n{steps}")
    assert [signal.text for signal in log.all(name)] == content.splitlines()[-1:]


def test_a_log_that_is_still_written_to(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    begun = sft_step(1) + sft_step(2) + "2026-11-20 15:41:37 - INFO"
    path.write_text(begun)
    with segments.open_pieces(path) as pieces:
        with path.open("a") as file:
            file.write(" - more\n" + sft_step(3) * 9)
        assert pieces.read(0)[0] == begun.encode()
        path.write_text("rotated\n")
        assert pieces.read(0)[0] == b"rotated\n"
    assert scan(path, PATTERNS).lines == 1


def test_of_more_steps_an_even_sample_is_read_and_all_that_are_not_finite(tmp_path: Path) -> None:
    count = 200_000
    bad = {7, 70_000, 70_001, 133_333, 199_999}
    lines = []
    for number in range(1, count + 1):
        loss = math.nan if number in bad else 2.5
        lines.append(sft_step(number, loss))

    log = log_of(tmp_path, "".join(lines))

    numbers = step_numbers(log)
    assert (numbers[0], numbers[-1]) == (1, count)
    assert 5_000 < len(numbers) < 50_000
    gaps = [later - earlier for earlier, later in itertools.pairwise(numbers)]
    assert max(gaps) < 100
    assert {step.step for step in log.steps if not math.isfinite(step.loss)} == bad
    assert all(step.line == step.step for step in log.steps)


def test_a_sample_of_dicts_is_numbered_by_how_many_there_were(tmp_path: Path) -> None:
    count = 120_000
    bad = {5, 60_001, 119_998}
    lines = []
    for number in range(1, count + 1):
        norm = "nan" if number in bad else "1.5"
        lines.append(f"{{'loss': '0', 'grad_norm': '{norm}', 'epoch': '{number / 100}'}}\n")

    log = log_of(tmp_path, "".join(lines))

    assert all(step.line == step.step for step in log.steps)
    assert (log.steps[0].step, log.steps[-1].step) == (1, count)
    assert log.numbered is False and log.last_step is None
    assert {step.step for step in log.steps if math.isnan(step.extra["grad_norm"])} == bad


BOX = (
    "╭──────────────── Traceback (most recent call last) ─────────────────╮\n"
    "│ /x/finetune.py:272 in <module>                                     │\n"
    "│ ❱ 272 │   train()                                                  │\n"
    "│   273                                                              │\n"
    "│                                                                    │\n"
    "│ /x/transformers/trainer.py:22                                      │\n"
    "│ 03 in inner_training_loop                                          │\n"
    "╰────────────────────────────────────────────────────────────────────╯\n"
    "ValueError: no\n"
)
ASCII_BOX = BOX.translate({ord(a): b for a, b in zip("╭╮╰╯─│❱", "++++-|>", strict=True)})


@pytest.mark.parametrize("shown", [BOX, "\r 10%|█ | 4/40 [00:01<00:09, 1.00it/s]" + BOX, ASCII_BOX])
@pytest.mark.parametrize(("prefix", "rank"), [("", ""), ("[rank1]: ", "1")])
def test_a_traceback_as_rich_shows_it(tmp_path: Path, shown: str, prefix: str, rank: str) -> None:
    prefixed = "".join(f"{prefix}{line}\n" for line in shown.splitlines())
    (raised,) = log_of(tmp_path, prefixed + "ValueError: another\n").all("exception")
    assert (raised.fields["message"], raised.fields["rank"]) == ("no", rank)
    assert raised.fields["at"] == "/x/transformers/trainer.py:2203"


TRACEBACK = (
    '  File "/x/a.py", line 9, in main',
    "    train()",
    "    ~~~~~^^",
    '  File "/x/b.py", line 3, in f',
    "    raise ValueError(1)",
    "ValueError: 1",
)


@pytest.mark.parametrize("prefix", ["", "[rank2]: "])
@pytest.mark.parametrize("cut", [0, 3])
def test_a_log_may_begin_within_a_traceback(tmp_path: Path, prefix: str, cut: int) -> None:
    content = "".join(f"{prefix}{line}\n" for line in TRACEBACK[cut:])
    (raised,) = log_of(tmp_path, content).all("exception")
    assert (raised.fields["at"], raised.fields["message"]) == ("/x/b.py:3", "1")

    interrupted = content.replace("ValueError", "that was a stack\nValueError")
    assert log_of(tmp_path, interrupted).all("exception") == ()


EVALUATION = "\r  0%|  | 0/900 [00:00<?, ?it/s]\r  1%|  | 7/900 [00:00<?, ?it/s]"


def training_bars(*, with_losses: bool) -> str:
    """The bar of a training of 100 steps, at step 40."""
    bars = ["\r  0%|  | 0/100 [00:00<?, ?it/s]"]
    for number in (10, 20, 30):
        bars.append(f"\r {number}%|█ | {number}/100 [00:01<00:09, 1.00it/s]")
        if with_losses:
            bars.append(f"{{'loss': 2.0, 'epoch': {number / 100}}}\n")
    bars.append("\r 40%|██ | 40/100 [00:01<00:09, 1.00it/s]")
    return "".join(bars)


def test_the_bar_of_an_evaluation_is_no_step(tmp_path: Path) -> None:
    loss = "\r{'loss': 1.9, 'epoch': 0.4}\n"
    log = log_of(tmp_path, training_bars(with_losses=True) + EVALUATION + loss)
    assert step_numbers(log) == [10, 20, 30, 40]
    assert log.total_steps == 100


def test_without_losses_the_bar_of_a_trainer_counts(tmp_path: Path) -> None:
    trainer = "/site-packages/transformers/trainer.py:3: UserWarning: x\n"
    data = "\r  0%|  | 0/50 [00:00<?, ?it/s]\r100%|███| 50/50 [00:01<00:00, 9.0it/s]\n"
    bars = data + training_bars(with_losses=False) + EVALUATION
    log = log_of(tmp_path, trainer + bars)
    assert (log.last_step, log.total_steps) == (40, 100)
    # it may be of anything
    assert log_of(tmp_path, bars).total_steps is None
