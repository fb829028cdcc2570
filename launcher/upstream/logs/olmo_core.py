"""What OLMo-core's trainer prints (OLMo-core 2.6.0), whichever script has started it."""

import re

from launcher.upstream.logs.common import Pattern, Table, make_pattern, make_patterns

BLOCK_BEGIN = b"[step="
"""The begin of a progress marker, below which the metrics of the step stand, one a line
(olmo_core/train/callbacks/console_logger.py::ConsoleLoggerCallback.log_metrics).
"""

MARKER = re.compile(rb"\[step=(?P<step>\d{1,12})/[^\]\n]*\]")
METRIC = re.compile(rb"^ +(?P<name>[^\n=]{1,80})=(?P<value>\S{1,30})$", re.MULTILINE)
LEARNING_RATE = "optim/LR (group 0)"
GRADIENT_NORM = "optim/total grad norm"
TOKENS_PER_SECOND = "throughput/device/TPS"

SUFFIXES = {"B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
"""How large numbers are shortened (olmo_core/utils.py::format_float)."""

_LINES: tuple[Pattern, ...] = (
    # the only loss on the console: those of DPO reach trackers alone
    make_pattern(
        "block_loss",
        r"^ +train/CE loss=(?P<loss>\S{1,30})$",
        "    train/CE loss=",
        always=(r"train/CE loss=-?[ni]",),
    ),
)

_TABLE: Table = {
    # olmo_core/train/callbacks/console_logger.py::ConsoleLoggerCallback._get_progress_marker[eta=]
    "progress": (("[step=", r"\[step=(?P<step>\d{1,12})/(?P<total>\d{1,12}),epoch="),),
    # olmo_core/train/trainer.py::Trainer.fit[Training complete]
    "training_completed": (r"\btrainer(?:\.py)?:\d+\b.{1,12}\bTraining complete$",),
    # olmo_core/train/trainer.py::Trainer.save_checkpoint[Saving checkpoint for step], and the
    # words for a save in the background
    "step_saving": (r"\bSaving checkpoint for step (?P<step>\d{1,12}) to '(?P<path>[^']+)'",),
    # olmo_core/train/trainer.py cancel_run
    "stop_asked": (
        (
            r"Run canceled from (?:rank \d+|all ranks)\. Reason: (?P<name>SIG(?:TERM|INT)) "
            r"received"
        ),
    ),
}

PATTERNS: tuple[Pattern, ...] = (*_LINES, *make_patterns(_TABLE))
