"""The point `data`: whether rows and steps are as planned, and can train what was meant."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from launcher.config.keys import PAIRED
from launcher.lazy_dataclass import dataclass
from launcher.runs.record import as_list, as_mapping
from launcher.verdict import schedule
from launcher.verdict.ending import find_ending
from launcher.verdict.evidence import Event, Evidence, ProbeStep
from launcher.verdict.logs.scan import StepLine
from launcher.verdict.metrics import read_reward
from launcher.verdict.points import FIRST_LOSS, UNKNOWN, Citable, Observation, find_first_plain_loss

LN2 = math.log(2)
FEW = 0.01
"""A difference of rows or steps, as a share, that is as good as planned."""
HALF = 0.5
"""A difference that is certainly not what was planned."""
ODD_SHARE = 0.05
"""Of all pairs or micro-batches."""
MOST = 0.5
"""Of the rows that were read."""
LEAST_ROWS = 4
"""Rows that must have been read."""
FLAT_LINES = 3
FLAT = 1e-3
"""A distance from ln 2 and from 0."""
REWARD = 0.1
"""Of DPO's first step: more than bfloat16 explains of a thousand tokens at beta 0.1."""
ROUNDED_LOSS = 0.02
"""The same of the loss, if the reference was computed in another pass."""
USUAL_BETA = 0.1
HALF_PRECISION_BITS = {"bfloat16": 8, "float16": 11}
"""The bits that a number keeps."""
_REFERENCE_FREE = ("nll_loss", "sft_loss", "odds_ratio_loss", "log_odds_ratio", "log_odds_chosen")
"""What losses without a reference log."""

_ACCEPT = "`expect: {data: any}` accepts it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Something that is not as planned; `certain` if it cannot be what was meant."""

    state: str = "suspect"
    certain: bool = False
    reason: str
    help: str
    cites: Sequence[Citable] = ()


def observe_data(evidence: Evidence, _expected: str | None) -> Observation:
    """All doubts about the data as one observation; the gravest gives the state and the help."""
    doubts = [
        *_doubt_dropped_rows(evidence),
        *_doubt_number_of_rows(evidence),
        *_doubt_masked_rows(evidence),
        *_doubt_steps(evidence),
        *_doubt_batches(evidence),
        *_doubt_first_rows(evidence),
        *_doubt_reference(evidence),
        *_doubt_first_loss(evidence),
        *_doubt_flat_rewards(evidence),
        *_doubt_learning_rates(evidence),
    ]
    detail = _collect_detail(evidence)
    if not doubts:
        events = evidence.last_events("data_rows") or evidence.last_events("data")
        if not events:
            return UNKNOWN
        return Observation("as_planned", cites=events[:1], detail=detail)
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


def _find_first_event(evidence: Evidence, name: str) -> Event | None:
    """The last event of this name of the first rank that wrote one."""
    for event in evidence.last_events(name):
        return event
    return None


def _read_count(event: Event | None, name: str) -> int:
    if event is None:
        return 0
    return int(event.number(name) or 0)


def _collect_detail(evidence: Evidence) -> dict[str, object]:
    detail: dict[str, object] = {}
    rows = _find_first_event(evidence, "data_rows")
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
    counts = _sum_counts(evidence)
    for name in ("pairs", "equal_pairs", "unlabelled", "full_rows"):
        if counts[name]:
            detail[name] = counts[name]
    if counts["rows"]:
        detail["counted_rows"] = counts["rows"]
    return detail


def _format_share(part: float, whole: float) -> str:
    return f"{part:,.0f} of {whole:,.0f}"


# -- rows and steps beside the plan


def _doubt_masked_rows(evidence: Evidence) -> Iterator[Doubt]:
    """Conversations whose answers open-instruct cannot find: each is masked whole, and dropped."""
    lines = evidence.signals("row_masked")
    planned = evidence.manifest.plan.rows
    if not planned or len(lines) <= FEW * planned:
        # a few are usual
        return
    yield Doubt(
        state="fewer",
        certain=len(lines) >= HALF * planned,
        reason=f"the answers of {_format_share(len(lines), planned)} conversations could not be "
        "found in the text that the chat template makes of them, so that they are dropped",
        help="see what the template makes of a row (`launch preview FILE`), or choose another one; "
        f"{_ACCEPT}",
        cites=lines[:3],
    )


def _doubt_dropped_rows(evidence: Evidence) -> Iterator[Doubt]:
    event = _find_first_event(evidence, "data_rows")
    if event is None:
        return
    rows = _read_count(event, "given")
    dropped = rows - _read_count(event, "kept")
    if dropped <= FEW * rows:
        return
    limit = event.number("max_length")
    length = ""
    if limit:
        length = f" (max_length {limit:.0f})"
    yield Doubt(
        state="fewer",
        certain=dropped >= HALF * rows,
        reason=f"the trainer dropped {_format_share(dropped, rows)} rows{length}: "
        f"{_explain_dropped_rows(event)}",
        help="raise the maximal length, shorten the prompts, or drop those rows yourself; "
        f"{_ACCEPT}",
        cites=(event,),
    )


def _doubt_number_of_rows(evidence: Evidence) -> Iterator[Doubt]:
    event = _find_first_event(evidence, "data_rows")
    rows = _read_count(event, "given")
    planned = evidence.manifest.plan.rows
    if event is None or not planned or not rows:
        return
    if rows > planned * (1 + FEW):
        yield Doubt(
            state="more",
            reason=f"the trainer read {rows:,} rows, {planned:,} were planned",
            help=f"check which files, splits and copies the data set has; {_ACCEPT}",
            cites=(event,),
        )
    elif rows < planned * (1 - FEW):
        yield Doubt(
            state="fewer",
            certain=rows <= HALF * planned,
            reason=f"the trainer read {_format_share(rows, planned)} planned rows",
            help=f"check which files and splits the data set has; {_ACCEPT}",
            cites=(event,),
        )


def _explain_dropped_rows(event: Event) -> str:
    steps = ""
    for part in as_list(event.fields.get("dropped")):
        steps += f"{as_mapping(part).get('while', '')}\n"
    if "fully truncated" in steps:
        return "their prompt alone fills the maximal length"
    if "fully masked" in steps:
        return "behind the cut no token of theirs has a label"
    return "its filters took them out, as rows without any label within the maximal length"


def _doubt_steps(evidence: Evidence) -> Iterator[Doubt]:
    planned = evidence.manifest.steps
    steps = evidence.last_step
    end = find_ending(evidence)
    has_ended = end.state == "completed" or end.reason == "fewer_steps"
    if not planned or steps is None or not has_ended:
        return
    if abs(steps - planned) <= max(1, FEW * planned):
        return
    state = "fewer"
    if steps > planned:
        state = "more"
    yield Doubt(
        state=state,
        certain=steps <= HALF * planned,
        reason=f"{steps:,} steps were made, {planned:,} were planned",
        help=f"rows that are dropped, filtered or repeated change the number of steps; {_ACCEPT}",
        cites=evidence.lines[-1:],
    )


# -- what the probe saw of the batches


def _sum_counts(evidence: Evidence) -> Mapping[str, int]:
    """Over all ranks and micro-batches."""
    names = ("micro_batches", "pairs", "rows", "unlabelled", "equal_pairs", "full_rows")
    sums = dict.fromkeys(names, 0)
    for event in evidence.last_events("data"):
        for name in names:
            sums[name] += _read_count(event, name)
    return sums


def _doubt_batches(evidence: Evidence) -> Iterator[Doubt]:
    sums = _sum_counts(evidence)
    events = evidence.last_events("data")
    batches = sums["micro_batches"]
    unlabelled = sums["unlabelled"]
    if batches and unlabelled > ODD_SHARE * batches:
        yield Doubt(
            certain=unlabelled == batches,
            reason=f"no token had a label in {_format_share(unlabelled, batches)} micro-batches",
            help="check the chat template and its assistant mask, and the maximal length, which "
            "may cut every answer",
            cites=events,
        )
    pairs = sums["pairs"]
    equal = sums["equal_pairs"]
    if pairs and equal > ODD_SHARE * pairs:
        yield Doubt(
            certain=equal >= HALF * pairs,
            reason=f"chosen and rejected are equal in {_format_share(equal, pairs)} pairs",
            help="such a pair teaches nothing: check which columns the answers come from, and "
            "remove equal pairs",
            cites=events,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OddRows:
    """What is odd if most rows that were read are so; `of` counts the rows that could be."""

    name: str
    of: str
    text: str
    help: str
    share: float = MOST


_ODD_ROWS = (
    _OddRows(
        name="begun_twice",
        of="rows",
        text="begin with two BOS tokens",
        help="the template writes a BOS and the tokenizer adds another: take one away "
        "(`add_bos_token`)",
    ),
    _OddRows(
        name="endless",
        of="whole_rows",
        text="that were not cut train no end token: the model does not learn to stop",
        help="end each answer with the end-of-turn or EOS token of the template, with a label of "
        "its own",
    ),
    _OddRows(
        name="cut",
        of="rows",
        text="are cut at the maximal length, within the answer",
        help="raise the maximal length, or leave such rows out",
    ),
    _OddRows(
        name="empty",
        of="pairs",
        text="have an empty answer",
        help="check which columns chosen and rejected come from",
        share=ODD_SHARE,
    ),
    _OddRows(
        name="promptless",
        of="pairs",
        text="have no prompt",
        help="TRL takes it from `prompt`, or from what two conversations have in common: "
        "write `prompt`, or chosen and rejected as messages that begin with it",
    ),
    _OddRows(
        name="prompt_twice",
        of="searched",
        text="hold their prompt twice: before the answers and within them",
        help="`prompt` stands beside whole conversations: leave it out, or leave only the answers "
        "in the others",
    ),
)


def _doubt_first_rows(evidence: Evidence) -> Iterator[Doubt]:
    events = evidence.last_events("data")
    counts = _count_first_rows(events)
    for odd in _ODD_ROWS:
        count = counts[odd.name]
        total = counts[odd.of]
        if total < LEAST_ROWS or count <= odd.share * total:
            continue
        rows = "rows"
        if odd.of in ("pairs", "searched"):
            rows = "pairs"
        reason = f"{_format_share(count, total)} {rows} that were read {odd.text}"
        yield Doubt(reason=reason, help=f"{odd.help}; {_ACCEPT}", cites=events)


def _count_first_rows(events: Iterable[Event]) -> Counter[str]:
    """What all ranks counted in the first rows that they read."""
    counts = Counter[str]()
    for event in events:
        for name, value in as_mapping(event.fields.get("first")).items():
            if isinstance(value, int):
                counts[name] += value
    counts["whole_rows"] = counts["ended"] + counts["endless"]
    return counts


# -- DPO's reference, and what it shows at the first step


def _doubt_reference(evidence: Evidence) -> Iterator[Doubt]:
    event = _find_first_event(evidence, "reference_precision")
    if event is None:
        return
    dtype = event.text("dtype")
    if dtype not in HALF_PRECISION_BITS:
        return
    size = event.number("mean") or 0.0
    error = _compute_rounding_error(size, HALF_PRECISION_BITS[dtype])
    beta = _read_beta(evidence)
    if beta * error < ROUNDED_LOSS:
        return
    yield Doubt(
        certain=beta * error >= REWARD,
        reason=f"the reference log-probs reached the loss rounded to {dtype}: of {size:,.0f} nats "
        f"each is off by up to {error:g}, times beta {beta:g}",
        help="DeepSpeed in bf16 or fp16 makes transformers' Trainer cast them: set "
        "`precompute_ref_log_probs: false`, or train without DeepSpeed (`deepspeed: none`, or "
        "FSDP)",
        cites=(event,),
    )


def _compute_rounding_error(size: float, bits: int) -> float:
    """The largest error of a number of this size, in its own unit, if it keeps so many bits."""
    if size < 1:
        return 0.0
    return 2.0 ** (math.floor(math.log2(size)) - bits)


def _read_beta(evidence: Evidence) -> float:
    beta = evidence.manifest.argument("beta")
    if isinstance(beta, int | float):
        return beta
    return USUAL_BETA


_REFERENCE_HELP = (
    "the reference is another model than the one that training starts from, or its log-probs are "
    "stale or rounded (`precompute_ref_log_probs`); a loss without a reference (SimPO, CPO) shows "
    f"the same; {_ACCEPT}"
)


def _doubt_first_loss(evidence: Evidence) -> Iterator[Doubt]:
    """Doubts about the reference, by DPO's first step.

    A policy that has not moved is its own reference: its rewards are 0, and its loss is ln 2.
    """
    reward = _doubt_first_rewards(evidence)
    if reward is not None:
        yield reward
        return
    first = _find_sigmoid_step(evidence)
    if first is None or first.loss is None:
        return
    allowed = _compute_allowed_difference(evidence)
    if abs(first.loss - LN2) <= allowed:
        return
    yield Doubt(
        reason=f"DPO's first loss was {first.loss:.4f}, not ln 2 = {LN2:.4f} "
        f"(within {allowed:.2g})",
        help=_REFERENCE_HELP,
        cites=(first,),
    )


def _doubt_first_rewards(evidence: Evidence) -> Doubt | None:
    line = _find_first_line(evidence)
    if line is None:
        return None
    rewards = []
    for name in ("rewards/chosen", "rewards/rejected"):
        if name in line.extra:
            rewards.append(line.extra[name])
    largest = max(map(abs, rewards), default=0.0)
    if not math.isfinite(largest) or largest <= REWARD:
        return None
    numbers = " and ".join(f"{value:g}" for value in rewards)
    return Doubt(
        reason=f"DPO's rewards were {numbers} at the first step, where policy and reference are "
        f"one model: they must be 0, and the loss was {line.loss:g}",
        help=_REFERENCE_HELP,
        cites=(line,),
    )


def _find_first_line(evidence: Evidence) -> StepLine | None:
    """The logged step 1 of a fresh DPO under HF Trainer; None if it is a mean of several steps."""
    log = evidence.log
    if log is None or not log.numbered or not log.steps or evidence.stage not in PAIRED:
        return None
    if evidence.signals("resumed") or evidence.events("resumed"):
        return None
    first = log.steps[0]
    if first.step != 1 or any(name in first.extra for name in _REFERENCE_FREE):
        return None
    return first


def _find_sigmoid_step(evidence: Evidence) -> ProbeStep | StepLine | None:
    """Step 1, if its loss must be ln 2."""
    manifest = evidence.manifest
    if manifest.stage in PAIRED:
        if evidence.events("resumed") or manifest.resumed_step or not _is_plain_sigmoid(evidence):
            return None
        for record in evidence.records:
            if record.steps and record.steps[0].step == 1:
                return record.steps[0]
        return _find_first_line(evidence)
    if manifest or evidence.records or evidence.arguments.get("packing") == "True":
        # of a run of launch, the probe compared it, with the point `reference_cache`
        return None
    return find_first_plain_loss(evidence.log)


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


def _compute_allowed_difference(evidence: Evidence) -> float:
    """How far rounding moves the first loss: hardly if one batch gives both log-probs."""
    if not evidence.manifest.argument("precompute_ref_log_probs"):
        return FIRST_LOSS
    return ROUNDED_LOSS * max(1.0, _read_beta(evidence) / USUAL_BETA)


def _doubt_flat_rewards(evidence: Evidence) -> Iterator[Doubt]:
    """Doubts about a DPO whose margins and accuracies stay 0, with a loss that stays ln 2."""
    lines = evidence.lines
    if len(lines) < FLAT_LINES:
        return
    for line in lines:
        margin = read_reward(line, "rewards_margin")
        if margin is None or abs(margin) > FLAT:
            return
        if read_reward(line, "rewards_accuracy") != 0 or abs(line.loss - LN2) > FLAT:
            return
    yield Doubt(
        certain=True,
        reason="DPO's accuracies and margins are 0 and its loss is ln 2 in all "
        f"{len(lines)} logged steps",
        help="chosen and rejected are the same text, or nothing is trained: compare some pairs",
        cites=(lines[0], lines[-1]),
    )


# -- the learning rate


class _Rate(NamedTuple):
    """The learning rate of a step, with its evidence."""

    value: float | None
    cite: Citable


def _doubt_learning_rates(evidence: Evidence) -> Iterator[Doubt]:
    if evidence.left_out_save:
        # a trial ends in the midst of its schedule
        return
    steps = _collect_rates(evidence)
    rates = []
    for step in steps:
        if step.value is not None and math.isfinite(step.value):
            rates.append(step.value)
    oddities = schedule.find_oddities(
        rates,
        schedule=_read_argument(evidence, "lr_scheduler_type"),
        requested=_read_requested_rate(evidence),
        is_complete=find_ending(evidence).state == "completed",
    )
    for oddity in oddities:
        yield Doubt(
            reason=oddity.reason,
            help=f"{oddity.help}; {_ACCEPT}",
            cites=(steps[0].cite, steps[-1].cite),
        )


def _collect_rates(evidence: Evidence) -> list[_Rate]:
    """The rates that the first rank with any steps recorded, else those in the log."""
    for record in evidence.records:
        if record.steps:
            return [_Rate(step.learning_rate, step) for step in record.steps]
    return [_Rate(line.learning_rate, line) for line in evidence.lines]


def _read_argument(evidence: Evidence, name: str) -> str | None:
    value = evidence.manifest.argument(name)
    if value is not None:
        return str(value)
    return evidence.arguments.get(name, "").strip("'") or None


def _read_requested_rate(evidence: Evidence) -> float | None:
    rate = _read_argument(evidence, "learning_rate")
    if rate is None:
        return None
    try:
        return float(rate)
    except ValueError:
        return None
