"""Every point of a verdict, as one table: what may be expected of it, and how it is read,
enforced and shown.

What a stage file may expect, what the probe enforces, what the live panel calls a point and the
sentence of the page are all read from here. A point's row names the module that holds its
`observe_NAME`. `keys.register_point` adds a point.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from launcher.lazy_dataclass import dataclass

Detail = Mapping[str, Any]
Sentence = Callable[[str, Detail], str | None]
"""State and detail of a point -> what is known about it; None where the state says it all. May
raise KeyError, TypeError or ValueError for a damaged verdict.
"""

ANY = "any"  # switches a point off
ATTENTIONS = (
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
DURING = {
    "evaluation": " in the evaluation",
    "saving": " while saving",
    "reference": " in the reference pass",
    "loading": " while loading the model",
}
"""The phases of a training, as a sentence about its end names them."""


def _no_sentence(_state: str, _detail: Detail) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PointType:
    """One point of a verdict.

    `states` are those that `expect:` takes, in the order of its messages. `default` is what is
    expected where the stage file is silent. `meets` are the states that meet an expectation,
    where that is not the same word alone.

    `from_arguments`: the trainer's arguments say what is expected, so nothing is known without a
    record of them. `enforced`: the probe ends a training that breaks it. `pairs_only`: only
    stages with pairs have it. `needs_plan`: it is compared with the plan, and left out where no
    plan is recorded. `whole_run`: it must be true of each attempt whose steps are in the weights.
    `optional`: it is left out where nothing is known of it and nothing expected, as in older
    records. `full_length`: a shortened run, as of `launch ladder`, shows nothing of it.

    `on_terminal`: `launch check` prints its sentence too. `label` is its name in the live panel,
    which shows the state of its `events`; `alarming` states are shown in red.
    """

    name: str
    states: tuple[str, ...]
    observed_in: str
    default: str | None = None
    meets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    from_arguments: bool = False
    enforced: bool = False
    pairs_only: bool = False
    needs_plan: bool = False
    whole_run: bool = False
    optional: bool = False
    full_length: bool = False
    label: str = ""
    events: tuple[str, ...] = ()
    alarming: tuple[str, ...] = ()
    sentence: Sentence = _no_sentence
    on_terminal: bool = False


def _liger(_state: str, detail: Detail) -> str | None:
    counted = False
    calls = []
    for operation, counts in detail.items():
        if operation in ("uncalled", "kwargs") or not isinstance(counts, Mapping) or not counts:
            continue
        counted = True
        count = sum(counts.values())
        if count:
            calls.append(f"{operation} {count:,}")
    if calls:
        return f"calls of its kernels: {', '.join(calls)}"
    if counted:
        return "no kernel of Liger was called"
    return None


def _packing(_state: str, detail: Detail) -> str | None:
    parts = []
    if detail.get("detail"):
        parts.append(str(detail["detail"]))
    if detail.get("stand_in"):
        parts.append(f"shown with a stand-in: {detail['stand_in']}")
    return "; ".join(parts) or None


def _model(_state: str, detail: Detail) -> str | None:
    export = detail.get("export")
    if not isinstance(export, Mapping) or not isinstance(export.get("error"), int | float):
        return None
    checkpoint = export.get("checkpoint")
    return f"its logits lie {export['error']:.2g} of their size from those of {checkpoint}"


def _attention(_state: str, detail: Detail) -> str | None:
    if "announced" not in detail:
        return None
    return f"the log announces {detail['announced']}"


def _positions(state: str, detail: Detail) -> str | None:
    if state != "restored":
        return None
    error = detail["largest_error"]
    text = f"loading had rounded the rotary frequencies by up to {error:.1%}"
    return f"{text}; the probe put them right"


def _batch(state: str, detail: Detail) -> str | None:
    if state != "planned":
        return None
    return (
        f"{detail['world']} of {detail['planned_world']} process(es) trained, each step as planned"
    )


def _data(state: str, detail: Detail) -> str | None:
    if state != "as_planned" or not detail.get("given"):
        return None
    text = f"{detail['given']:,} rows were read"
    dropped = detail["given"] - detail["kept"]
    if dropped:
        text += f", {dropped:,} dropped"
    planned = detail.get("planned_steps")
    if planned:
        text += f"; step {detail['steps']:,} of {planned:,} planned"
    return text


def _cache(state: str, detail: Detail) -> str | None:
    if state not in ("hit", "miss"):
        return None
    words = "found"
    if state == "miss":
        words = "not there, so it was made"
    if detail.get("path"):
        words += f": {detail['path']}"
    return words


def _loss(state: str, detail: Detail) -> str | None:
    if state not in ("finite", "zero"):
        return None
    counts = {"recorded by the probe": detail["counted"], "logged": detail["logged"]}
    parts = [f"{count:,} {source}" for source, count in counts.items() if count]
    if not parts:
        return None
    return f"losses: {', '.join(parts)}; all finite"


def _gradients(state: str, detail: Detail) -> str | None:
    if state != "true":
        return None
    return (
        f"{detail['checks']:,} comparisons with autograd over {detail['parameters']:,} parameters: "
        f"largest error {detail['largest_error']:.2g}, {detail['allowed']:.2g} is allowed"
    )


def _trend(_state: str, detail: Detail) -> str | None:
    if "change" not in detail:
        return None
    # by a robust slope over all losses, and relative to their median: it may be more than all of it
    trend = f"{detail['change']:+.1%} (z {detail['z']:.1f})"
    return f"over {detail['losses']:,} losses the trend is {trend}"


def _memory(state: str, detail: Detail) -> str | None:
    peak = detail.get("peak_allocated_gib")
    if peak:
        text = f"peak {peak:.2f} GiB on a GPU"
        planned = detail.get("planned_gib")
        if isinstance(planned, Mapping) and planned.get("peak"):
            text += f", planned {planned['peak']:.2f} GiB"
        return text
    if state == "ok":
        return "no error, and no GPU memory was measured"
    return None


def _finish(_state: str, detail: Detail) -> str | None:
    parts = []
    last = detail.get("last_step")
    total = detail.get("total_steps")
    if last is not None and total:
        parts.append(f"step {last:,} of {total:,} was the last")
    elif last is not None:
        parts.append(f"step {last:,} was the last")
    if detail.get("saved"):
        parts.append("the model was saved")
    else:
        parts.append("no final save was seen")
    during = DURING.get(str(detail.get("during")))
    if during:
        parts.append(f"it ended{during}")
    if detail.get("returncode") is not None:
        parts.append(f"exit code {detail['returncode']}")
    return "; ".join(parts)


def _weights(_state: str, detail: Detail) -> str | None:
    if "share" not in detail:
        return None
    return f"{detail['share']:.1%} of {detail['sampled']:,} sampled weights differ from the start"


def _resume(_state: str, detail: Detail) -> str | None:
    return f"loss {detail['before']} before the resume, {detail['after']} after it"


def _evaluation(_state: str, detail: Detail) -> str | None:
    measured = []
    for gate in detail["gates"]:
        if gate["value"] is not None:
            measured.append(f"{gate['metric']} {gate['value']:.4g}")
    if not measured:
        metrics = detail["metrics"]
        for task, name in detail["main"].items():
            if name in metrics:
                measured.append(f"{task} {metrics[name]:.4g}")
        measured = measured[:4]
    if not measured:
        return None
    return f"measured: {', '.join(measured)}"


POINTS: list[PointType] = [
    PointType(
        name="liger",
        states=("engaged", "off", ANY),
        observed_in="launcher.verdict.points",
        meets={"applied": ("engaged", "applied"), "attempted": ("engaged", "applied", "attempted")},
        from_arguments=True,
        enforced=True,
        whole_run=True,
        label="liger",
        alarming=("not engaged",),
        sentence=_liger,
    ),
    PointType(
        name="packing",
        states=("isolated", "on", "off", ANY),
        observed_in="launcher.verdict.points",
        meets={"on": ("on", "isolated")},
        from_arguments=True,
        enforced=True,
        whole_run=True,
        label="packing",
        events=("packing", "packing_isolation"),
        alarming=("leaking",),
        sentence=_packing,
    ),
    PointType(
        name="attention",
        states=(ANY, *ATTENTIONS),
        observed_in="launcher.verdict.points",
        enforced=True,
        whole_run=True,
        label="attention",
        sentence=_attention,
    ),
    PointType(
        name="positions",
        states=("exact", "restored", ANY),
        observed_in="launcher.verdict.points",
        whole_run=True,
        optional=True,
        sentence=_positions,
    ),
    PointType(
        name="batch",
        states=("planned", ANY),
        observed_in="launcher.verdict.points",
        needs_plan=True,
        whole_run=True,
        sentence=_batch,
    ),
    PointType(
        name="dataset_cache",
        states=("hit", "miss", ANY),
        observed_in="launcher.verdict.points",
        enforced=True,
        full_length=True,
        label="data cache",
        events=("dataset_cache",),
        sentence=_cache,
    ),
    PointType(
        name="reference_cache",
        states=("hit", "miss", ANY),
        observed_in="launcher.verdict.points",
        enforced=True,
        pairs_only=True,
        full_length=True,
        label="reference cache",
        events=("reference_cache",),
        alarming=("stale",),
        sentence=_cache,
    ),
    PointType(
        name="data",
        states=("as_planned", ANY),
        observed_in="launcher.verdict.data",
        whole_run=True,
        optional=True,
        sentence=_data,
    ),
    PointType(
        name="loss",
        states=("finite", ANY),
        observed_in="launcher.verdict.outcome",
        default="finite",
        enforced=True,
        sentence=_loss,
    ),
    PointType(
        name="gradients",
        states=("true", ANY),
        observed_in="launcher.verdict.outcome",
        enforced=True,
        whole_run=True,
        label="gradients",
        events=("gradients",),
        alarming=("corrupt",),
        sentence=_gradients,
    ),
    PointType(
        name="trend",
        states=("falling", ANY),
        observed_in="launcher.verdict.outcome",
        full_length=True,
        sentence=_trend,
    ),
    PointType(
        name="memory",
        states=("ok", ANY),
        observed_in="launcher.verdict.outcome",
        default="ok",
        sentence=_memory,
    ),
    PointType(
        name="finish",
        states=("completed", ANY),
        observed_in="launcher.verdict.outcome",
        default="completed",
        sentence=_finish,
    ),
    PointType(
        name="weights",
        states=("moved", ANY),
        observed_in="launcher.verdict.outcome",
        optional=True,
        sentence=_weights,
    ),
    PointType(
        name="model",
        states=("saved", ANY),
        observed_in="launcher.verdict.outcome",
        optional=True,
        sentence=_model,
    ),
    PointType(
        name="inputs",
        states=("same", ANY),
        observed_in="launcher.verdict.outcome",
        whole_run=True,
        optional=True,
    ),
    PointType(
        name="evaluation",
        states=(ANY,),
        observed_in="launcher.verdict.evaluation",
        optional=True,
        sentence=_evaluation,
        on_terminal=True,
    ),
    PointType(
        name="resume",
        states=("continuous", ANY),
        observed_in="launcher.verdict.outcome",
        optional=True,
        sentence=_resume,
    ),
]
"""In the order of a verdict."""

BY_NAME: dict[str, PointType] = {point.name: point for point in POINTS}
DEFAULTS: dict[str, str] = {
    point.name: point.default for point in POINTS if point.default is not None
}
"""What is expected of a point that the stage file does not name."""
