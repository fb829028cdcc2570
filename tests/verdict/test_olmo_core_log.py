"""The verdict of a bare log of OLMo-core's trainer, which has its losses in blocks of lines."""

from pathlib import Path

import pytest
from conftest import DATA

from launcher.verdict.check import judge_log
from launcher.verdict.evidence import PATTERNS
from launcher.verdict.logs.scan import scan

REAL_LOG = (DATA / "run_sft_olmo_core" / "console.log").read_text()


def block(step: int, total: int, loss: str) -> str:
    """The lines of one step, as OLMo-core's console logger writes them."""
    marker = f"olmo_core.train.callbacks.console_logger:68\tINFO\t[step={step}/{total},epoch=1]"
    return (
        f"2026-11-26 12:08:02.185\tmachine:0\t{marker}\n"
        "    optim/LR (group 0)=6.00E-05\n"
        "    optim/total grad norm=1.250\n"
        "    throughput/device/TPS=3,293\n"
        f"    train/CE loss={loss}\n"
        "    train/PPL=4,357\n"
    )


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "console.log"


def test_the_numbers_of_a_step_are_those_of_its_block(log_path: Path) -> None:
    log_path.write_text(block(1, 2, "8.380") + block(2, 2, "1.5B"))

    log = scan(log_path, PATTERNS)

    first, second = log.steps
    assert (first.step, first.line, first.loss) == (1, 5, 8.38)
    assert first.learning_rate == 6e-5
    assert first.tokens_per_second == 3293
    assert first.extra == {"grad_norm": 1.25}
    assert second.loss == 1.5e9


def test_a_finished_run_is_complete(log_path: Path) -> None:
    log_path.write_text(REAL_LOG)

    verdict = judge_log(log_path)

    assert verdict.point("finish").state == "completed"
    assert verdict.point("loss").state == "finite"
    assert verdict.metrics["last_loss"] == 8.379


def test_a_run_without_its_last_steps_is_not_complete(log_path: Path) -> None:
    third_step = REAL_LOG.index("[step=4/4")
    log_path.write_text(REAL_LOG[:third_step])

    verdict = judge_log(log_path)

    assert verdict.point("finish").state == "running"


def test_a_save_that_has_only_begun_is_no_final_model(log_path: Path) -> None:
    begun = REAL_LOG.index("Saving checkpoint for step 4 to")
    end_of_line = REAL_LOG.index("\n", begun) + 1
    log_path.write_text(REAL_LOG[:end_of_line])

    assert judge_log(log_path).point("finish").state == "running"


def test_a_loss_that_is_not_finite_fails_in_a_log_of_any_size(log_path: Path) -> None:
    total = 150_000
    blocks = [block(step, total, "2.5") for step in range(1, total + 1)]
    blocks[70_002] = block(70_003, total, "nan")
    log_path.write_text("".join(blocks))

    verdict = judge_log(log_path)

    assert verdict.status == "fail"
    assert verdict.point("loss").detail["first_step"] == 70_003


def test_steps_after_a_checkpoint_are_those_of_the_run_that_continued(log_path: Path) -> None:
    before = block(1, 3, "4.0") + block(2, 3, "3.0") + block(3, 3, "9.0")
    continued = block(2, 3, "3.5") + block(3, 3, "2.5")
    log_path.write_text(before + continued)

    log = scan(log_path, PATTERNS)

    assert [(step.step, step.loss) for step in log.steps] == [(1, 4.0), (2, 3.5), (3, 2.5)]
