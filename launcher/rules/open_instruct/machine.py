"""Rules for open-instruct's own loops about the packages in the trainer's Python."""

from collections.abc import Iterator, Mapping

from launcher.errors import Finding, shorten
from launcher.rules.context import Context, StageRule
from launcher.rules.rule import cites, needs, say

# Distributions that each tracker needs one of (accelerate/utils/dataclasses.py::LoggerType[ALL =]).
_TRACKERS: Mapping[str, tuple[str, ...]] = {
    "aim": ("aim",),
    "clearml": ("clearml",),
    "comet_ml": ("comet-ml",),
    "dvclive": ("dvclive",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardx"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


@cites(
    "finetune.py::main[from bitsandbytes.optim]",
    "dpo_tune_cache.py::main[from bitsandbytes.optim]",
    reviewed=("e6c3044aa620",),
)
@needs("packages")
def optimizer_package(context: Context) -> Iterator[Finding]:
    for key in ("use_qlora", "dpo_use_paged_optimizer"):
        if context.values.get(key) and context.lacks("bitsandbytes"):
            message = f"`{key}`: the trainer's Python has no bitsandbytes"
            yield say(
                "error",
                "optim-missing",
                key,
                message,
                f"pip install bitsandbytes, or delete `{key}`",
            )


@cites(
    "finetune.py::main[log_with]",
    "accelerate/tracking.py::filter_trackers[Unsupported logging]",
    reviewed=("e6c3044aa620",),
)
def trackers(context: Context) -> Iterator[Finding]:
    """An unknown one is refused, one that is not installed left out."""
    values = context.values
    reports = values["report_to"]
    if not values["with_tracking"] or reports is None:
        return
    if not isinstance(reports, list):
        reports = [reports]
    if "all" in reports:
        return
    for name in map(str, reports):
        if name not in _TRACKERS:
            message = f"`report_to: {shorten(name)}` is no tracker that accelerate knows"
            yield say(
                "error", "report-unknown", "report_to", message, f"one of {', '.join(_TRACKERS)}"
            )
        elif context.lacks(*_TRACKERS[name]):
            package = _TRACKERS[name][0]
            message = (
                f"`report_to: {name}` is left out without a word: the trainer's Python has no "
                f"{package}"
            )
            yield say("warning", "report-missing", "report_to", message, f"pip install {package}")


RULES: Mapping[str, tuple[StageRule, ...]] = {
    "sft": (optimizer_package, trackers),
    "dpo": (optimizer_package,),
}
