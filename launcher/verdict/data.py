"""Evidence -> the point `data`: whether rows and steps are those that were planned, and can train what was meant."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config.keys import PAIRED
from launcher.runs.record import as_mapping
from launcher.verdict import schedule
from launcher.verdict.ending import ending
from launcher.verdict.evidence import Event, Evidence
from launcher.verdict.logs.scan import StepLine
from launcher.verdict.metrics import REWARDS
from launcher.verdict.points import FIRST_LOSS, UNKNOWN, Citable, Observation, first_plain_loss

LN2 = math.log(2)
FEW = 0.01  # of rows or steps: what is as good as planned
HALF = 0.5  # of rows or steps: what is certainly not what was planned
ODD_SHARE = 0.05  # of all pairs or micro-batches
MOST = 0.5  # of the rows that were read
LEAST_ROWS = 4  # that must have been read
FLAT_LINES = 3
FLAT = 1e-3  # from ln 2 and from 0
REWARD = 0.1  # DPO's, at the first step: more than bfloat16 explains of a thousand tokens at beta 0.1
ROUNDED_LOSS = 0.02  # the same of the loss, where the reference was computed in another pass
USUAL_BETA = 0.1
HALF_PRECISION = ("bfloat16", "float16")
# what losses log that have no reference
_REFERENCE_FREE = ("nll_loss", "sft_loss", "odds_ratio_loss", "log_odds_ratio", "log_odds_chosen")

_ACCEPT = "`expect: {data: any}` accepts it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """One thing that is not as planned; `certain` if it cannot be what was meant."""

    state: str = "suspect"
    certain: bool = False
    reason: str
    help: str
    cites: Sequence[Citable] = ()


def observe_data(evidence: Evidence, _expected: str | None) -> Observation:
    doubts = [
        *_rows(evidence),
        *_masked_rows(evidence),
        *_steps(evidence),
        *_batches(evidence),
        *_first_rows(evidence),
        *_reference(evidence),
        *_first_loss(evidence),
        *_flat(evidence),
        *_learning_rates(evidence),
    ]
    detail = _detail(evidence)
    if not doubts:
        known = evidence.last_events("data_rows") or evidence.last_events("data")
        return Observation("as_planned", cites=known[:1], detail=detail) if known else UNKNOWN
    doubts.sort(key=lambda doubt: not doubt.certain)
    gravest = doubts[0]
    cites: list[Citable] = []
    for doubt in doubts:
        cites += doubt.cites
    return Observation(
        gravest.state,
        proved=gravest.certain,
        unwanted=True,
        cites=cites,
        detail=detail,
        reason="; ".join(doubt.reason for doubt in doubts),
        help=gravest.help,
    )


def _first_event(evidence: Evidence, name: str) -> Event | None:
    """The last one of the first rank that wrote one."""
    events = evidence.last_events(name)
    return events[0] if events else None


def _count(event: Event | None, name: str) -> int:
    value = event.number(name) if event is not None else None
    return int(value or 0)


def _detail(evidence: Evidence) -> dict[str, object]:
    detail: dict[str, object] = {}
    rows = _first_event(evidence, "data_rows")
    planned_rows = evidence.manifest.plan.rows
    if rows is not None:
        detail |= {"given": rows.fields.get("given"), "kept": rows.fields.get("kept")}
    if planned_rows is not None:
        detail["planned_rows"] = planned_rows
    if evidence.manifest.steps is not None:
        detail |= {"planned_steps": evidence.manifest.steps, "steps": evidence.last_step}
    masked = len(evidence.signals("row_masked"))
    if masked:
        detail["masked_rows"] = masked
    counts = _sums(evidence)
    for name in ("pairs", "equal_pairs", "unlabelled", "full_rows", "rows"):
        if counts.get(name):
            detail["counted_rows" if name == "rows" else name] = counts[name]
    return detail


def _share(part: float, whole: float) -> str:
    return f"{part:,.0f} of {whole:,.0f}"


# -- rows and steps beside the plan


def _masked_rows(evidence: Evidence) -> Iterator[Doubt]:
    """Conversations of which open-instruct cannot tell what the answers are: each is masked whole, and dropped."""
    lines = evidence.signals("row_masked")
    planned = evidence.manifest.plan.rows
    if not planned or len(lines) <= FEW * planned:
        # a few are usual
        return
    yield Doubt(
        state="fewer",
        certain=len(lines) >= HALF * planned,
        reason=f"the answers of {_share(len(lines), planned)} conversations could not be found in the text that "
        "the chat template makes of them, so that they are dropped",
        help=f"see what the template makes of a row (`launch preview FILE`), or choose another one; {_ACCEPT}",
        cites=lines[:3],
    )


def _rows(evidence: Evidence) -> Iterator[Doubt]:
    event = _first_event(evidence, "data_rows")
    if event is None:
        return
    given, kept = _count(event, "given"), _count(event, "kept")
    dropped = given - kept
    if dropped > FEW * given:
        limit = event.number("max_length")
        length = f" (max_length {limit:.0f})" if limit else ""
        yield Doubt(
            state="fewer",
            certain=dropped >= HALF * given,
            reason=f"the trainer dropped {_share(dropped, given)} rows{length}: {_why_dropped(event)}",
            help=f"raise the maximal length, shorten the prompts, or drop those rows yourself; {_ACCEPT}",
            cites=(event,),
        )
    planned = evidence.manifest.plan.rows
    if not planned or not given:
        return
    if given > planned * (1 + FEW):
        yield Doubt(
            state="more",
            reason=f"the trainer read {given:,} rows, {planned:,} were planned",
            help=f"check which files, splits and copies the data set has; {_ACCEPT}",
            cites=(event,),
        )
    elif given < planned * (1 - FEW):
        yield Doubt(
            state="fewer",
            certain=given <= HALF * planned,
            reason=f"the trainer read {_share(given, planned)} planned rows",
            help=f"check which files and splits the data set has; {_ACCEPT}",
            cites=(event,),
        )


def _why_dropped(event: Event) -> str:
    entries = event.fields.get("dropped")
    parts = entries if isinstance(entries, list) else []
    texts = {str(as_mapping(part).get("while", "")) for part in parts}
    if any("fully truncated" in text for text in texts):
        return "their prompt alone fills the maximal length"
    if any("fully masked" in text for text in texts):
        return "behind the cut no token of theirs has a label"
    return "its filters took them out, as rows without any label within the maximal length"


def _steps(evidence: Evidence) -> Iterator[Doubt]:
    planned, made = evidence.manifest.steps, evidence.last_step
    end = ending(evidence)
    if not planned or made is None or (end.state != "completed" and end.reason != "fewer_steps"):
        return
    difference = made - planned
    if abs(difference) <= max(1, FEW * planned):
        return
    state = "more" if difference > 0 else "fewer"
    yield Doubt(
        state=state,
        certain=made <= HALF * planned,
        reason=f"{made:,} steps were made, {planned:,} were planned",
        help=f"rows that are dropped, filtered or repeated change the number of steps; {_ACCEPT}",
        cites=evidence.lines[-1:],
    )


# -- what the probe saw of the batches


def _sums(evidence: Evidence) -> Mapping[str, int]:
    """Over all ranks and micro-batches."""
    names = ("micro_batches", "pairs", "rows", "unlabelled", "equal_pairs", "full_rows")
    sums = dict.fromkeys(names, 0)
    for event in evidence.last_events("data"):
        for name in names:
            sums[name] += _count(event, name)
    return sums


def _batches(evidence: Evidence) -> Iterator[Doubt]:
    sums, events = _sums(evidence), evidence.last_events("data")
    batches, unlabelled = sums["micro_batches"], sums["unlabelled"]
    if batches and unlabelled > ODD_SHARE * batches:
        yield Doubt(
            certain=unlabelled == batches,
            reason=f"no token had a label in {_share(unlabelled, batches)} micro-batches",
            help="check the chat template and its assistant mask, and the maximal length, which may cut every answer",
            cites=events,
        )
    pairs, equal = sums["pairs"], sums["equal_pairs"]
    if pairs and equal > ODD_SHARE * pairs:
        yield Doubt(
            certain=equal >= HALF * pairs,
            reason=f"chosen and rejected are equal in {_share(equal, pairs)} pairs",
            help="such a pair teaches nothing: check which columns the answers come from, and remove equal pairs",
            cites=events,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What is odd where it is so of most rows (`of`) that were read."""

    name: str
    of: str
    text: str
    help: str
    share: float = MOST


_LOOKS = (
    _Look(
        name="begun_twice",
        of="rows",
        text="begin with two BOS tokens",
        help="the template writes a BOS and the tokenizer adds another: take one away (`add_bos_token`)",
    ),
    _Look(
        name="endless",
        of="whole_rows",
        text="that were not cut train no end token: the model does not learn to stop",
        help="end each answer with the end-of-turn or EOS token of the template, with a label of its own",
    ),
    _Look(
        name="cut",
        of="rows",
        text="are cut at the maximal length, within the answer",
        help="raise the maximal length, or leave such rows out",
    ),
    _Look(
        name="empty",
        of="pairs",
        text="have an empty answer",
        help="check which columns chosen and rejected come from",
        share=ODD_SHARE,
    ),
    _Look(
        name="promptless",
        of="pairs",
        text="have no prompt",
        help="TRL takes it from `prompt`, or from what two conversations have in common: "
        "write `prompt`, or chosen and rejected as messages that begin with it",
    ),
    _Look(
        name="prompt_twice",
        of="searched",
        text="hold their prompt twice: before the answers and within them",
        help="`prompt` stands beside whole conversations: leave it out, or leave only the answers in the others",
    ),
)


def _first_rows(evidence: Evidence) -> Iterator[Doubt]:
    events = evidence.last_events("data")
    counts: dict[str, int] = {}
    for event in events:
        for name, value in as_mapping(event.fields.get("first")).items():
            if isinstance(value, int):
                counts[name] = counts.get(name, 0) + value
    counts["whole_rows"] = counts.get("ended", 0) + counts.get("endless", 0)
    for look in _LOOKS:
        found, total = counts.get(look.name, 0), counts.get(look.of, 0)
        if total >= LEAST_ROWS and found > look.share * total:
            what = "pairs" if look.of in ("pairs", "searched") else "rows"
            reason = f"{_share(found, total)} {what} that were read {look.text}"
            yield Doubt(reason=reason, help=f"{look.help}; {_ACCEPT}", cites=events)


# -- DPO's reference, and what it shows at the first step


def _reference(evidence: Evidence) -> Iterator[Doubt]:
    event = _first_event(evidence, "reference_precision")
    if event is None or event.text("dtype") not in HALF_PRECISION:
        return
    size = event.number("mean") or 0.0
    rounding = _rounding(size, str(event.text("dtype")))
    beta = evidence.manifest.argument("beta")
    scale = beta if isinstance(beta, int | float) else USUAL_BETA
    if scale * rounding < ROUNDED_LOSS:
        return
    yield Doubt(
        certain=scale * rounding >= REWARD,
        reason=f"the reference log-probs reached the loss rounded to {event.text('dtype')}: of {size:,.0f} nats "
        f"each is off by up to {rounding:g}, times beta {scale:g}",
        help="DeepSpeed in bf16 or fp16 makes transformers' Trainer cast them: set `precompute_ref_log_probs: false`, "
        "or train without DeepSpeed (`deepspeed: none`, or FSDP)",
        cites=(event,),
    )


def _rounding(size: float, dtype: str) -> float:
    """The largest error of a number of this size, in its own unit: bfloat16 keeps 8 bits of it, float16 11."""
    if size < 1:
        return 0.0
    digits = 8 if dtype == "bfloat16" else 11
    return 2.0 ** (math.floor(math.log2(size)) - digits)


def _first_loss(evidence: Evidence) -> Iterator[Doubt]:
    """A policy that has not moved is its own reference: every reward is 0 then, and the sigmoid's loss ln 2."""
    shown = _first_line(evidence)
    rewards = [shown.extra[name] for name in ("rewards/chosen", "rewards/rejected") if shown and name in shown.extra]
    largest = max(map(abs, rewards), default=0.0)
    help = (
        "the reference is another model than the one that training starts from, or its log-probs are stale or "
        "rounded (`precompute_ref_log_probs`); a loss without a reference (SimPO, CPO) shows the same; "
        f"{_ACCEPT}"
    )
    if shown is not None and math.isfinite(largest) and largest > REWARD:
        numbers = " and ".join(f"{value:g}" for value in rewards)
        yield Doubt(
            reason=f"DPO's rewards were {numbers} at the first step, where policy and reference are one model: "
            f"they must be 0, and the loss was {shown.loss:g}",
            help=help,
            cites=(shown,),
        )
        return
    loss, cite = _sigmoid_loss(evidence)
    allowed = _allowed(evidence)
    if loss is None or cite is None or abs(loss - LN2) <= allowed:
        return
    yield Doubt(
        reason=f"DPO's first loss was {loss:.4f}, not ln 2 = {LN2:.4f} (within {allowed:.2g})",
        help=help,
        cites=(cite,),
    )


def _first_line(evidence: Evidence) -> StepLine | None:
    """The logged line of step 1 of a fresh DPO under HF Trainer; None where the first line is a mean of several."""
    log = evidence.log
    if log is None or not log.numbered or not log.steps or evidence.stage not in PAIRED:
        return None
    first = log.steps[0]
    fresh = not evidence.signals("resumed") and not evidence.events("resumed")
    plain = not any(name in first.extra for name in _REFERENCE_FREE)
    return first if first.step == 1 and fresh and plain else None


def _sigmoid_loss(evidence: Evidence) -> tuple[float | None, Citable | None]:
    """The loss of step 1, where it must be ln 2."""
    manifest = evidence.manifest
    if manifest.stage in PAIRED:
        if evidence.events("resumed") or manifest.resumed_step or not _is_plain_sigmoid(evidence):
            return None, None
        for record in evidence.records:
            if record.steps and record.steps[0].step == 1:
                return record.steps[0].loss, record.steps[0]
        shown = _first_line(evidence)
        return (shown.loss, shown) if shown is not None else (None, None)
    # of a run of launch's the probe compared it, with the point `reference_cache`
    line = first_plain_loss(evidence.log) if not manifest and not evidence.records else None
    if line is None or evidence.arguments.get("packing") == "True":
        return None, None
    return line.loss, line


def _is_plain_sigmoid(evidence: Evidence) -> bool:
    argument = evidence.manifest.argument
    loss_type = argument("loss_type")
    names = loss_type if isinstance(loss_type, list) else [loss_type]
    experts = any(event.number("experts") for event in evidence.events("model"))
    return (
        names == ["sigmoid"]
        and not argument("label_smoothing")
        and not argument("use_weighting")
        and argument("loss_weights") in (None, [1.0])
        and argument("disable_dropout") is not False
        and not argument("neftune_noise_alpha")
        and not experts
    )


def _allowed(evidence: Evidence) -> float:
    """How far rounding moves the first loss: not at all where one batch gives both log-probs."""
    if not evidence.manifest.argument("precompute_ref_log_probs"):
        return FIRST_LOSS
    beta = evidence.manifest.argument("beta")
    scale = beta if isinstance(beta, int | float) else USUAL_BETA
    return ROUNDED_LOSS * max(1.0, scale / USUAL_BETA)


def _flat(evidence: Evidence) -> Iterator[Doubt]:
    """DPO whose margins and accuracies stay 0, with a loss that stays ln 2."""
    lines = [line for line in evidence.lines if _reward(line, "rewards_margin") is not None]
    if len(lines) < FLAT_LINES or len(lines) < len(evidence.lines):
        return
    for line in lines:
        accuracy, margin = _reward(line, "rewards_accuracy"), _reward(line, "rewards_margin")
        if accuracy != 0 or abs(margin or 0.0) > FLAT or abs(line.loss - LN2) > FLAT:
            return
    yield Doubt(
        certain=True,
        reason=f"DPO's accuracies and margins are 0 and its loss is ln 2 in all {len(lines)} logged steps",
        help="chosen and rejected are the same text, or nothing is trained: compare some pairs",
        cites=(lines[0], lines[-1]),
    )


def _reward(line: StepLine, name: str) -> float | None:
    for key in REWARDS[name]:
        if key in line.extra:
            return line.extra[key]
    return None


# -- the learning rate


def _learning_rates(evidence: Evidence) -> Iterator[Doubt]:
    if evidence.left_out_save:
        return  # a trial that ends in the midst of its schedule
    steps: Sequence[Any] = evidence.lines
    recorded = [record.steps for record in evidence.records if record.steps]
    if recorded:
        steps = recorded[0]
    rates = [step.learning_rate for step in steps if step.learning_rate is not None]
    rates = [rate for rate in rates if math.isfinite(rate)]
    for reason, help in schedule.oddities(
        rates,
        schedule=_text(evidence, "lr_scheduler_type"),
        requested=_requested(evidence),
        whole=ending(evidence).state == "completed",
    ):
        yield Doubt(reason=reason, help=f"{help}; {_ACCEPT}", cites=(steps[0], steps[-1]))


def _text(evidence: Evidence, name: str) -> str | None:
    value = evidence.manifest.argument(name)
    if value is None:
        value = evidence.arguments.get(name, "").strip("'") or None
    return None if value is None else str(value)


def _requested(evidence: Evidence) -> float | None:
    shown = _text(evidence, "learning_rate")
    try:
        return None if shown is None else float(shown)
    except ValueError:
        return None
