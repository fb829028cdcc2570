"""Evidence -> what can be said about each point: a `Seen`, with the lines it rests on.

Each function takes the evidence and what is wanted (None: nothing), because what proves a point
depends on it: an announcement can disprove `off`, and never prove `engaged`.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.backends.open_instruct_log import ATTENTION
from launcher.ending import HELP, ending, fatal
from launcher.evidence import Event, Evidence, Planned, Probe, ProbeStep, RankRecord
from launcher.logs import Log, Signal, StepLine
from launcher.measures import losses, memory_phases, peak_allocated_gib, whole_losses
from launcher.options import TREND_LOSSES

OPERATIONS = ("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy", "preference_loss")
FUSED = ("fused_linear_cross_entropy", "cross_entropy")
FIRST_LOSS = 0.01  # more than rounding moves DPO's first loss by
TREND_BINS = 64
TREND_CHANGE = 0.01  # of the loss, from the first step to the last
TREND_Z = 2.33  # one-sided 1 %

NORMS = 4  # gradient norms at least, to tell what is usual
WILD_NORM = 1e4  # beside a loss that does not fall
JUMP = 10.0
_COMPARED = ("engine", "checks", "last_step", "parameters", "elements", "largest_error", "allowed")
_DIFFERENCE = ("parameter", "true_norm", "used_norm", "error", "broken", "corrupt_checks")
CORRUPT_HELP = (
    "the optimizer did not get the gradients of the batch: what was trained since is worthless. "
    "DeepSpeed 0.18.5 to 0.18.9 does this under ZeRO 1 and 2 with `overlap_comm: true`: install a later "
    "release or set `overlap_comm: false`; docs/gradients.md has other causes"
)
_NOISE_HELP = (
    "train a few steps with the probe, which compares the optimizer's gradients with those of autograd; "
    "`expect: {gradients: any}` accepts them as they are"
)

_OOM_HELP = (
    "lower the micro-batch and keep the global batch (`batch: {per_device: N}`), switch activation "
    "checkpointing on (SFT `gradient_checkpointing: true`, DPO `activation_memory_budget` < 1), "
    "or lower `max_seq_length`; with packing a micro-batch holds every token of its rows at once, "
    "so fewer rows (or `packing: false`) shrink it"
)


_LEAKING_HELP = (
    "packed samples see each other: take an attention that keeps them apart (flash-attn), or "
    "`packing: false`; TRL's `packing_strategy: wrapped` never does. open-instruct's DPO on SDPA: "
    "transformers keeps no samples apart beside a cache, which "
    "`additional_model_arguments: {use_cache: false}` switches off"
)
_STALE_HELP = (
    "the cached log-probs are not those of the model that training starts from, or were computed "
    "under another attention mask: remove the file, or give a fresh REFERENCE_LOGPROBS_CACHE_PATH"
)


_MEAN_HELP = (
    "`train_loss` is the mean over all steps, so the loss of a step was not finite: `logging_steps: 1` "
    "shows which, `logging_nan_inf_filter: false` shows it as it was"
)
_BEFORE = "was not finite in an earlier attempt, and this one went on from weights that had been through it"
_EVALUATED_HELP = (
    "a row of the evaluation without any label (all of it cut off or masked) makes its mean nan, and "
    "so do weights that are broken: evaluate the saved model on its own"
)


# What the probe says of a broken contract, in a log that came without its records.
_NOT_FINITE = re.compile(
    r"(?:loss|gradient) is -?(?:nan|inf)\w* \((?:step (?P<step>\d+)|[^,]*), rank (?P<rank>\d+)\)"
)
_STALE = re.compile(r"reference_cache expected .*, seen stale: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cite:
    """One line that a point rests on; `line` is 1-based."""

    source: Literal["probe", "log", "exit"]
    file: str
    line: int | None
    text: str

    def as_json(self) -> dict[str, object]:
        """As the JSON contract spells it."""
        return {"source": self.source, "file": self.file, "line": self.line, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A point's state; `proved` is False where the evidence settles nothing for what is wanted.

    `doubt` says that the state must not pass even where nothing is expected.
    """

    state: str
    proved: bool = True
    doubt: bool = False
    cites: tuple[Cite, ...] = ()
    detail: Mapping[str, object] = field(default_factory=dict)


def _liger(evidence: Evidence, want: str | None) -> Seen:
    counted = _liger_counted(evidence, want)
    return counted or _liger_logged(evidence, want, _patches(evidence))


def _liger_counted(evidence: Evidence, want: str | None) -> Seen | None:
    """From the calls counted in every rank; None where no rank came as far as a step."""
    probe, log = evidence.probe, evidence.log
    if probe is None or probe.last_step is None:
        return None
    calls = {rank: r.liger_calls for rank, r in sorted(probe.ranks.items()) if r.steps}
    unknown = sorted({*probe.missing, *probe.ranks} - {*calls})
    names = dict.fromkeys((*OPERATIONS, *(op for counts in calls.values() for op in counts)))
    detail: dict[str, object] = {
        op: {str(rank): counts.get(op, 0) for rank, counts in calls.items()} for op in names
    }
    if unknown:
        detail["missing_ranks"] = unknown
    cites = tuple(of_event(r, e) for r in probe.ranks.values() if (e := r.last("liger")))
    if all(any(counts.values()) for counts in calls.values()):
        if want == "engaged" and (lacking := _uncalled(probe, calls)):
            detail["uncalled"] = lacking
            return Seen(state="not_engaged", cites=(*cites, *_patches(evidence)), detail=detail)
        proved = not unknown or want == "off"
        return Seen(state="engaged", proved=proved, cites=cites, detail=detail)
    idle = [rank for rank, counts in calls.items() if not any(counts.values())]
    if len(idle) < len(calls):
        detail["idle_ranks"] = idle
    asked = want == "engaged" or (log is not None and log.asked.get("use_liger_kernel") == "True")
    state = "not_engaged" if asked or len(idle) < len(calls) else "off"
    cites += tuple(
        _of_step(r, r.steps[-1]) for r in probe.ranks.values() if r.rank in idle and r.steps
    )
    # of a rank without steps it is not known, unless another one shows that it is not as wanted
    proved = not unknown or state != "off"
    return Seen(state=state, proved=proved, cites=cites, detail=detail)


def _uncalled(probe: Probe, calls: Mapping[int, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """The losses that Liger was told to put in and that some rank never called, with the calls of each.

    It is they that save the logits' memory, and the other kernels run without them. Which of those a
    model has is for Liger to know.
    """
    told = [event.fields.get("kwargs") for _, event in probe.events("liger_patch")]
    asked = [op for op in FUSED if any(isinstance(k, dict) and k.get(op) is True for k in told)]
    lacking = {op: {str(r): c.get(op, 0) for r, c in calls.items()} for op in asked}
    return {op: counts for op, counts in lacking.items() if not all(counts.values())}


def _liger_logged(evidence: Evidence, want: str | None, patches: tuple[Cite, ...]) -> Seen:
    """From announcements, which can rule Liger out but never prove that it runs."""
    log = evidence.log
    asked_off = log is not None and log.asked.get("use_liger_kernel") == "False"
    # upstream asks Liger for nothing then: whatever speaks of it is a row of the data
    spoken = None if asked_off else log
    applied = spoken.all("liger_applied") if spoken else ()
    if applied or patches:
        kwargs = applied[0].fields.get("kwargs") if applied else None
        detail = {} if kwargs is None else {"kwargs": kwargs}
        cites = (*patches, *_of_signals(log, applied))
        return Seen(state="applied", proved=want != "engaged", cites=cites, detail=detail)
    refused = spoken.all("liger_unsupported") if spoken else ()
    attempted = spoken.all("liger_attempted") if spoken else ()
    cites = _of_signals(log, (*attempted, *refused))
    if refused:
        return Seen(state="not_engaged", cites=cites, detail={"reason": refused[0].text})
    if attempted:
        return Seen(state="attempted", proved=want == "off", cites=cites)
    # Training began and the attempt, logged right before it, is not there. That it was never made is
    # proved where the arguments or the script rule it out (use_qlora wins over use_liger_kernel, and
    # dpo.py does not read it), or where the source is known to announce it in these words.
    began = log is not None and bool(log.asked) and bool(log.first("total_steps", "progress"))
    ruled_out = log is not None and (
        log.asked.get("use_qlora") == "True" or bool(log.first("progress"))
    )
    announced = evidence.reworded is not None and not evidence.rewords("liger_attempted")
    told = log.all("liger_asked") if log else ()
    detail = {"reason": "the log shows no attempt to apply it"} if want == "engaged" else {}
    never = began and (ruled_out or announced)
    proved = never or (asked_off and want == "off")
    cites = _of_asked(log, "use_liger_kernel") or _of_signals(log, told)
    state = "off" if never or asked_off else "unknown"
    return Seen(state=state, proved=proved, cites=cites, detail=detail)


def _patches(evidence: Evidence) -> tuple[Cite, ...]:
    events = evidence.probe.events("liger_patch") if evidence.probe else ()
    return tuple(of_event(record, event) for record, event in events)


def _packing(evidence: Evidence, want: str | None) -> Seen:
    seen = _packing_seen(evidence, want)
    if seen is not None:
        return seen
    log = evidence.log
    said = log.all("packing") if log else ()
    asked = log.asked.get("packing") if log else None
    if said or (asked == "True" and not evidence.packs_nothing):
        cites = (*_of_signals(log, said), *_of_asked(log, "packing"))
        return Seen(state="on", proved=want != "isolated", cites=cites)
    cites = _of_asked(log, "packing")
    return Seen(state="off" if cites else "unknown", proved=bool(cites), cites=cites)


def _packing_seen(evidence: Evidence, want: str | None) -> Seen | None:
    """As the ranks saw it, the gravest of them; None where none looked at a batch."""
    probe = evidence.probe
    told: dict[int, tuple[RankRecord, Event]] = {}
    for record in probe.ranks.values() if probe else ():
        looks = record.all("packing_isolation", "packing")
        states = {event.text("state") or "": event for event in looks}
        for known in ("off", "on", "isolated", "leaking"):
            if known in states:
                told[record.rank] = record, states[known]
    if probe is None or not told:
        return None
    by_rank = {rank: str(event.text("state")) for rank, (_, event) in sorted(told.items())}
    packed = want in ("isolated", "on")
    order = ("leaking", "off", "on", "isolated") if packed else ("leaking", "on", "isolated", "off")
    state = next(s for s in order if s in by_rank.values())
    shown = [one for one in told.values() if one[1].text("state") == state]
    detail = {k: v for k, v in shown[0][1].fields.items() if k not in ("t", "state")}
    if len({*by_rank.values()}) > 1:
        detail["ranks"] = {str(rank): one for rank, one in by_rank.items()}
    if state == "leaking":
        detail["help"] = _LEAKING_HELP
    if state == "on":
        detail |= _untested(evidence)
    if absent := probe.without(told):
        detail["missing_ranks"] = list(absent)
    # a single rank can disprove what was asked for; to prove it takes all. `on` is neither for isolation
    disproved = state == "leaking" or (state == "off") == packed
    proved = disproved or not (absent or (state == "on" and want == "isolated"))
    cites = tuple(of_event(*one) for one in shown)
    return Seen(state=state, proved=proved, cites=cites, detail=detail | _half_wasted(evidence))


def _half_wasted(evidence: Evidence) -> dict[str, object]:
    """That packed rows are mostly empty, and which batch would fill them, as the probe saw it."""
    found = next(
        (event for _, event in (evidence.probe.events("half_wasted") if evidence.probe else ())),
        None,
    )
    return {} if found is None else {"wasted": found.text("message")}


def _untested(evidence: Evidence) -> dict[str, object]:
    """Why isolation was not measured, where the probe says so."""
    for _, event in evidence.probe.events("packing_isolation") if evidence.probe else ():
        if (reason := event.text("reason")) is not None:
            return {"reason": f"isolation was not tested: {reason}"}
    return {}


def _attention(evidence: Evidence, want: str | None) -> Seen:
    seen = _attention_seen(evidence, want)
    if seen is not None:
        return seen
    log = evidence.log
    detected = log.last("attention") if log else None
    chosen = log.asked.get("attn_implementation") if log else None  # DPO's own argument wins
    word = (chosen or "").strip("'") or (detected.fields["value"] if detected else "")
    if word in ("", "None"):
        return Seen(state="unknown", proved=False)
    state = ATTENTION.get(word, word)
    cites = _of_signals(log, (detected,) if detected else ())
    other = want is not None and ATTENTION.get(want, want) != state
    return Seen(state=state, proved=other, cites=cites, detail={"announced": word})


def _attention_seen(evidence: Evidence, want: str | None) -> Seen | None:
    """That of the models which the ranks hold, one that is not wanted first; None where none is known."""
    probe = evidence.probe
    told = [(r, e) for r, e in probe.events("model") if e.text("attention")] if probe else []
    if probe is None or not told:
        return None
    meant = (want, ATTENTION.get(want or "", want))
    other = [one for one in told if want is not None and one[1].text("attention") not in meant]
    state = str((other or told)[0][1].text("attention"))
    by_rank = {str(record.rank): event.text("attention") for record, event in told}
    detail: dict[str, object] = {}
    if len({event.text("attention") for _, event in told}) > 1:
        detail["ranks"] = by_rank
    if absent := probe.without({record.rank for record, _ in told}):
        detail["missing_ranks"] = list(absent)
    cites = tuple(of_event(*one) for one in told if one[1].text("attention") == state)
    return Seen(state=state, proved=bool(other) or not absent, cites=cites, detail=detail)


def _batch(evidence: Evidence, _want: str | None) -> Seen:
    """Whether as many processes trained as were planned, and a step of each took as many rows."""
    probe, planned = evidence.probe, evidence.planned
    if probe is None or planned.world is None:
        return Seen(state="unknown", proved=False)
    started = [(r, e) for _, r in sorted(probe.ranks.items()) if (e := r.last("start"))]
    other = [one for one in started if one[1].number("world") not in (None, planned.world)]
    detail: dict[str, object] = {"world": probe.world, "planned_world": planned.world}
    if other:
        detail["reason"] = f"the world size was {probe.world}, {planned.world} was planned"
        return Seen(state="different", cites=tuple(of_event(*one) for one in other), detail=detail)
    told = []
    for record, start in started:
        odd = [_other_size(step, planned) for step in record.steps]
        # an epoch's last step may be smaller, and then none beside it
        twice = [i for i in range(1, len(odd)) if odd[i - 1] and odd[i]]
        if twice:
            step = record.steps[twice[0]]
            detail["reason"] = _size(step, planned, record.rank)
            return Seen(state="different", cites=(_of_step(record, step),), detail=detail)
        if start.number("world") and (planned.steps == 0 or not all(odd)):
            told.append(record.rank)
    if absent := [rank for rank in range(planned.world) if rank not in told]:
        detail["missing_ranks"] = absent
    cites = tuple(of_event(*one) for one in started)
    state = "planned" if told else "unknown"
    return Seen(state=state, proved=not absent, cites=cites, detail=detail)


def _other_size(step: ProbeStep, planned: Planned) -> bool:
    """Whether a rank's step was not as large as planned; what its record does not tell is no difference."""
    each, rows = planned.micro_batches, planned.per_device
    taken = [(step.micro_batches, each), (step.rows, each and rows and each * rows)]
    over = [seen - want for seen, want in taken if seen and want]
    # of data that have not the rows of one step, every step is an epoch's last
    few = planned.data is not None and planned.batch is not None and planned.data < planned.batch
    return any(more > 0 or (more < 0 and not few) for more in over)


def _size(step: ProbeStep, planned: Planned, rank: int) -> str:
    """What a rank's step took, and what it was to take."""
    each, rows = planned.micro_batches or 0, planned.per_device
    took = (("micro-batches", step.micro_batches), ("rows", step.rows))
    plan = (("micro-batches", each), ("rows", each * rows if rows else None))
    seen, wanted = (
        ", ".join(f"{name} {number:.0f}" for name, number in told if number)
        for told in (took, plan)
    )
    return f"step {step.step} of rank {rank}: {seen}; planned: {wanted}"


def _dataset_cache(evidence: Evidence, _want: str | None) -> Seen:
    seen = _probe_state(evidence, "dataset_cache", ("stale", "miss", "hit"))
    missed = evidence.log.all("dataset_missed", "dataset_saved") if evidence.log else ()
    found = evidence.log.all("dataset_found") if evidence.log else ()
    lines = ("dataset_missed", "dataset_saved", "dataset_found")
    sure = not evidence.rewords(*lines) and not (evidence.log and evidence.log.headless)
    return seen or _cache_logged(evidence.log, missed, found, sure=sure)


def _reference_cache(evidence: Evidence, _want: str | None) -> Seen:
    seen = _probe_state(evidence, "reference_cache", ("stale", "miss", "hit"))
    missed = evidence.log.all("reference_missed") if evidence.log else ()
    found = evidence.log.all("reference_hit") if evidence.log else ()
    lines = ("reference_missed", "reference_hit")
    told = [s for s in _said(evidence) if _STALE.match(s.fields["message"])]
    if seen is None and told:
        seen = Seen(state="stale", cites=_of_signals(evidence.log, told))
    if seen is not None and seen.state == "stale":
        seen = replace(seen, detail={**seen.detail, "help": _STALE_HELP})
    if seen is not None:
        return seen
    logged = _cache_logged(evidence.log, missed, found, sure=not evidence.rewords(*lines))
    first = _first_loss(evidence.log) if logged.state == "hit" else None
    if first is None or abs(first.loss - math.log(2)) <= FIRST_LOSS:
        return logged
    # dropout moves the first loss too: what the log shows is a doubt, and no proof
    detail = {**logged.detail, "first_loss": first.loss, "help": _STALE_HELP}
    cites = (*logged.cites, _of_line(evidence.log, first))
    return Seen(state="stale", proved=False, cites=cites, detail=detail)


def _first_loss(log: Log | None) -> StepLine | None:
    """The first step of a DPO whose loss must be ln 2, if the policy still is its own reference."""
    if log is None or not log.steps or log.first("resumed"):
        return None
    plain = re.search(r"\bdpo(?:_norm)?\b", log.asked.get("loss_type", ""))
    added = log.asked.get("load_balancing_loss") != "False"
    return log.steps[0] if log.steps[0].step == 1 and plain and not added else None


def _cache_logged(
    log: Log | None, missed: Sequence[Signal], found: Sequence[Signal], *, sure: bool
) -> Seen:
    """One rank fills a cache and the others then find it, so a single miss outweighs all finds.

    `sure` is False where the source may say a miss in other words, or what was said before the find is
    not there: then a find proves nothing.
    """
    if not missed and (not found or not sure):
        return Seen(state="unknown", proved=False)
    cites = _of_signals(log, (*missed[:1], *missed[1:][-1:]) if missed else found)
    paths = [s.fields["path"] for s in (*found, *missed) if "path" in s.fields]
    detail = {"path": paths[0]} if paths else {}
    return Seen(state="miss" if missed else "hit", cites=cites, detail=detail)


def _probe_state(evidence: Evidence, name: str, order: Sequence[str]) -> Seen | None:
    """The gravest state that an event of this name has on any rank, in the order given."""
    events = list(evidence.probe.events(name)) if evidence.probe else []
    for state in order:
        told = [(r, e) for r, e in events if e.text("state") == state]
        if told:
            detail = {k: v for k, v in told[0][1].fields.items() if k not in ("t", "state")}
            # whoever left no record may be the one that filled the cache
            absent = evidence.probe.missing if evidence.probe and state == "hit" else ()
            detail |= {"missing_ranks": list(absent)} if absent else {}
            cites = tuple(of_event(*t) for t in told)
            return Seen(state=state, proved=not absent, cites=cites, detail=detail)
    return None


def _loss(evidence: Evidence, _want: str | None) -> Seen:
    log, ranks = evidence.log, evidence.probe.ranks.values() if evidence.probe else ()
    bad: list[tuple[int, int | None, Cite]] = []
    detail: dict[str, object] = {}
    for line in log.steps if log else ():
        if _nonfinite(line):
            bad.append((line.step, None, _of_line(log, line)))
    for record in ranks:
        bad += [
            (step.step, record.rank, _of_step(record, step))
            for step in record.steps
            if not step.finite
        ]
    if not bad and evidence.bad_before:
        # in weights that this attempt went on from
        before = evidence.bad_before
        detail = {
            "first_step": before[0],
            "nonfinite": len(before),
            "rank": None,
            "reason": f"step {before[0]} {_BEFORE}",
        }
        return Seen(state="nonfinite", detail=detail)
    for said in _said(evidence) if log and not ranks else ():
        if found := _NOT_FINITE.match(said.fields["message"]):
            rank = int(found["rank"])
            bad.append((int(found["step"] or 0), rank, _of_signals(log, (said,))[0]))
    logged = len(log.steps) if log else 0
    counted = sum(len(record.steps) for record in ranks)
    detail |= {"logged": logged, "counted": counted}
    if bad:
        # a rank that is known tells more than a logged mean of the same step
        first = min(bad, key=lambda b: (b[0], b[1] is None, b[1] or 0))
        told = first[0] if counted or not log or log.numbered else None
        detail |= {"first_step": told, "rank": first[1], "nonfinite": len(bad)}
        detail |= _last_finite(evidence, first[0], first[1])
        # before training is announced, such a line may be a word of the data that upstream shows
        begun = not log or not log.blocks or log.first("total_steps", "progress") or ranks
        cites = tuple(b[2] for b in bad)
        return Seen(state="nonfinite", proved=bool(begun), cites=cites, detail=detail)
    means = _nonfinite_means(log)
    if means:
        named = ", ".join(f"{s.fields['what']} is {s.fields['value']}" for s in means)
        cites, detail["reason"] = _of_signals(log, means), f"the log says that {named}"
        if any(s.fields["what"] == "train_loss" for s in means):
            # a sum over all steps: one of them made it so, and nothing tells which
            detail |= {"first_step": None, "rank": None, "help": _MEAN_HELP}
            return Seen(state="nonfinite", cites=cites, detail=detail)
        detail["help"] = _EVALUATED_HELP
    if not losses(evidence):
        return Seen(state="none_logged", proved=False, detail=detail)
    if means:
        # an evaluation proves nothing of the training, and is no good news of it
        return Seen(state="finite", proved=False, cites=cites, detail=detail)
    unseen = _unseen(evidence)
    if log and log.steps and (unseen or not ranks) and (doubt := _doubt(log.steps)) is not None:
        detail["reason"] = doubt[1]
        return Seen(state="finite", proved=False, cites=(_of_line(log, doubt[0]),), detail=detail)
    shown = log.steps[-1].step if log and log.steps else 0
    if alone := _unseen(evidence, shown):
        named = ", ".join(map(str, alone[:3])) + (", …" if alone[3:] else "")
        detail["reason"] = f"no loss of step {named} was seen on every rank, and none is logged"
        return Seen(state="finite", proved=False, cites=_of_losses(evidence), detail=detail)
    every = [step.loss for record in ranks for step in record.steps]
    if not every and log is not None:
        every = [_exact(line) for line in log.steps]
    state = "zero" if every and not any(loss is None or loss for loss in every) else "finite"
    return Seen(state=state, cites=_of_losses(evidence), detail=detail)


def _unseen(evidence: Evidence, after: int = 0) -> list[int]:
    """The first steps of a run that came to its end which some rank's record does not tell of.

    Of any other run the last ones may still have been on their way.
    """
    probe, last = evidence.probe, evidence.last_step
    if probe is None or last is None or ending(evidence).state != "completed":
        return []
    begun = max((e.number("step") or 0 for _, e in probe.events("resumed")), default=0)
    first = min((r.steps[0].step for r in probe.ranks.values() if r.steps), default=last + 1)
    seen = [{step.step for step in record.steps} for record in probe.ranks.values()]
    seen += [set()] * len(probe.missing)
    whole = set.intersection(*seen)
    steps = range(max(min(first, int(begun) + 1), after + 1), last + 1)
    return list(itertools.islice((step for step in steps if step not in whole), 4))


def _nonfinite_means(log: Log | None) -> tuple[Signal, ...]:
    """The first word for each mean of losses that HF Trainer says is not finite."""
    # in a log of open-instruct's it is a word of the training data
    said = log.all("mean_nonfinite") if log is not None and not log.blocks else ()
    return tuple({s.fields["what"]: s for s in reversed(said)}.values())[::-1]


def _said(evidence: Evidence) -> tuple[Signal, ...]:
    """What the probe said on the console."""
    warned = evidence.log.all("warned") if evidence.log else ()
    return (*fatal(evidence, "violation"), *warned)


def _last_finite(evidence: Evidence, step: int, rank: int | None) -> dict[str, object]:
    """What it was that was not finite, and the last values before, as that rank saw them."""
    told: dict[str, object] = {}
    for record, event in evidence.probe.events("nonfinite") if evidence.probe else ():
        if record.rank == rank and event.number("step") == step:
            told = {"what": event.text("what"), "value": event.text("value")}
    records = evidence.probe.ranks.values() if evidence.probe else ()
    before = [s for r in records if r.rank == rank for s in r.steps if s.step < step and s.finite]
    if before:
        last = before[-1]
        told["last_finite"] = {"step": last.step, "loss": last.loss, "grad_norm": last.grad_norm}
    return told


def _nonfinite(line: StepLine) -> bool:
    """HF Trainer prints 0 for a loss that is NaN; what stands beside it tells."""
    hidden = line.loss == 0 and not all(map(math.isfinite, line.extra.values()))
    return hidden or not math.isfinite(line.loss)


def _exact(line: StepLine) -> float:
    """HF Trainer rounds a loss, and prints no 0 for the gradient of a small one."""
    return line.loss or (line.extra.get("grad_norm", 0.0) if "epoch" in line.extra else 0.0)


def _doubt(steps: Sequence[StepLine]) -> tuple[StepLine, str] | None:
    """The line of HF Trainer's that leaves open whether the loss was finite, and why."""
    for line in steps:
        if line.loss == 0 and "epoch" in line.extra and "grad_norm" not in line.extra:
            return line, "a loss of 0 may have been NaN, and no gradient norm is logged"
    norm = steps[-1].extra.get("grad_norm", 0.0)
    if not math.isfinite(norm):
        # what such a step left shows in the loss after it, and there is none
        return steps[-1], f"the last gradient norm is {norm}"
    return None


def _gradients(evidence: Evidence, _want: str | None) -> Seen:
    """What each rank's comparison came to; without one, whether the norms look like noise."""
    probe = evidence.probe
    reports = [(r, e) for r in probe.ranks.values() if (e := r.last("gradients"))] if probe else []
    corrupt = [one for one in reports if one[1].text("state") == "corrupt"]
    if corrupt:
        first = min(corrupt, key=lambda one: one[1].number("first_corrupt") or 0)
        record, event = first
        detail: dict[str, object] = {
            "first_step": event.fields.get("first_corrupt"), "rank": record.rank,
            **{key: event.fields.get(key) for key in (*_COMPARED, *_DIFFERENCE)},
            "help": CORRUPT_HELP,
        }  # fmt: skip
        return Seen(state="corrupt", cites=tuple(of_event(*one) for one in corrupt), detail=detail)
    said = [s for s in _said(evidence) if s.fields["message"].startswith("gradients are corrupt")]
    if said:
        cites = _of_signals(evidence.log, said)
        return Seen(state="corrupt", cites=cites, detail={"help": CORRUPT_HELP})
    true = [one for one in reports if one[1].text("state") == "true"]
    absent = probe.without({record.rank for record, _ in true}) if probe else ()
    noise = _noise(evidence)
    detail = {} if noise is None else {"norms": noise[0]}
    if true:
        # the comparison that is off most
        event = max(true, key=lambda one: one[1].number("largest_error") or 0.0)[1]
        detail |= {key: event.fields.get(key) for key in _COMPARED}
        detail |= {"missing_ranks": list(absent)} if absent else {}
        cites = tuple(of_event(*one) for one in true)
        return Seen(state="true", proved=not absent, cites=cites, detail=detail)
    told = next((e.text("reason") for _, e in reports if e.text("reason")), None)
    if told is not None:
        detail["reason"] = told
    if noise is not None:
        detail |= {"reason": noise[0], "help": _NOISE_HELP}
    cites = (*(of_event(*one) for one in reports), *((noise[1],) if noise else ()))
    return Seen(state="unknown", proved=False, doubt=noise is not None, cites=cites, detail=detail)


def _noise(evidence: Evidence) -> tuple[str, Cite] | None:
    """Gradient norms that no batch gives, in words, with the place of the largest."""
    norms: list[tuple[float, int, Cite]] = []
    log = evidence.log
    for record in evidence.probe.ranks.values() if evidence.probe else ():
        norms = norms or [
            (s.grad_norm, s.step, _of_step(record, s))
            for s in record.steps
            if s.grad_norm is not None
        ]
    if not norms and log is not None:
        norms = [
            (norm, line.step, _of_line(log, line))
            for line in log.steps
            if math.isfinite(norm := line.extra.get("grad_norm", math.nan))
        ]
    if len(norms) < NORMS:
        return None
    largest, step, cite = max(norms, key=lambda one: one[0])
    usual = statistics.median(norm for norm, *_ in norms)
    if largest >= WILD_NORM and not _falls([x for x in whole_losses(evidence) if math.isfinite(x)]):
        return f"gradient norms up to {largest:.3g} (step {step}), and the loss does not fall", cite
    # the first steps of a run may well be far from the others
    jumps = [
        one
        for before, one, after in zip(norms[1:], norms[2:], norms[3:], strict=False)
        if one[0] > JUMP * max(before[0], after[0], usual) > 0
    ]
    if jumps:
        largest, step, cite = max(jumps, key=lambda one: one[0])
        return (
            f"the gradient norm jumps to {largest:.3g} at step {step}; {usual:.3g} is usual",
            cite,
        )
    return None


def _falls(series: Sequence[float]) -> bool:
    if len(series) < 2:
        return False
    if len(series) < TREND_LOSSES:
        return series[-1] < series[0] * (1 - TREND_CHANGE)
    change, z = trend(series)
    return change <= -TREND_CHANGE and z <= -TREND_Z


def _trend(evidence: Evidence, _want: str | None) -> Seen:
    if (still := _still(evidence)) is not None:
        seen = _of_losses(replace(evidence, log=None)) or _of_losses(evidence)
        return Seen(state="still", cites=seen, detail={"reason": still})
    # a run that was resumed is one run
    whole = whole_losses(evidence)
    finite = [loss for loss in whole if math.isfinite(loss)]
    detail: dict[str, object] = {"losses": len(finite)}
    if len(finite) < TREND_LOSSES:
        return Seen(state="too_short", proved=False, detail=detail)
    change, z = trend(finite)
    detail |= {"change": round(change, 4), "z": round(z, 2)}
    sure = abs(z) >= TREND_Z and abs(change) >= TREND_CHANGE
    state = "flat" if not sure else "falling" if change < 0 else "rising"
    return Seen(state=state, cites=_of_losses(evidence), detail=detail)


def _still(evidence: Evidence) -> str | None:
    """Why no weight can have moved, as every rank saw it in every one of two steps or more, or the log."""
    log = evidence.log
    steps: list[tuple[int, float | None, float | None]] = [
        (one.step, one.grad_norm, one.learning_rate)
        for record in (evidence.probe.ranks.values() if evidence.probe else ())
        for one in record.steps
    ]
    if not steps and log is not None and _from_the_first(log.steps):
        steps = [(one.step, one.extra.get("grad_norm"), one.learning_rate) for one in log.steps]
    if len({step for step, *_ in steps}) < 2:
        return None
    for place, words in ((1, "gradient norm"), (2, "learning rate")):
        if all(one[place] == 0 for one in steps):
            return f"the {words} was 0 in every step: nothing was learned"
    return None


def _from_the_first(steps: Sequence[StepLine]) -> bool:
    """Whether the first line is there: at the end of a schedule the learning rate may well be 0."""
    return len(steps) > 1 and steps[0].step <= max(1, steps[1].step - steps[0].step)


def trend(series: Sequence[float]) -> tuple[float, float]:
    """Relative change from first to last by the Theil-Sen slope, and Mann-Kendall's z.

    Both go by pairs of losses, so that a few spikes move neither. Needs two losses or more.
    """
    size = math.ceil(len(series) / TREND_BINS)
    bins = [statistics.median(series[i : i + size]) for i in range(0, len(series), size)]
    n = len(bins)
    pairs = [(j - i, bins[j] - bins[i]) for i in range(n) for j in range(i + 1, n)]
    slope = statistics.median(rise / run for run, rise in pairs)
    score = sum((rise > 0) - (rise < 0) for _, rise in pairs)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    level = statistics.median(map(abs, bins)) or 1.0
    return slope * (n - 1) / level, (score - math.copysign(min(1, abs(score)), score)) / deviation


def _memory(evidence: Evidence, _want: str | None) -> Seen:
    log, peak = evidence.log, peak_allocated_gib(evidence)
    detail: dict[str, object] = {"peak_allocated_gib": peak}
    if phases := memory_phases(evidence):
        detail["phases"] = phases
    end = ending(evidence)
    error = end.error or {}
    told, host = fatal(evidence, "oom"), fatal(evidence, "oom_host")
    if log and end.state == "completed":  # what is only said behind a good end is something else's
        raised = {s.line for s in log.all("exception")}
        told = tuple(s for s in told if s.line in raised)
        host = tuple(s for s in host if s.line in raised)
    if log and not told and host:
        detail["help"] = HELP["oom_host"]
        return Seen(state="oom", cites=_of_signals(log, host), detail=detail)
    if not told and not re.search(r"OutOfMemory|out of memory", " ".join(error.values())):
        return Seen(state="ok", proved=bool(log or evidence.probe), detail=detail)
    asked = log.asked if log else {}
    keys = ("per_device_train_batch_size", "gradient_checkpointing", "packing", "max_seq_length")
    detail |= {"help": _OOM_HELP, "asked": {k: asked[k] for k in keys if k in asked}}
    if told and told[0].fields:
        detail |= told[0].fields
    return Seen(state="oom", cites=_of_signals(log, told), detail=detail)


def _finish(evidence: Evidence, _want: str | None) -> Seen:
    end, log, saved = ending(evidence), evidence.log, evidence.final_save
    detail: dict[str, object] = {
        "last_step": evidence.last_step,
        "total_steps": evidence.total_steps,
        "saved": saved is not None,
    }
    if evidence.left_out_save:
        detail["left_out"] = "the final save: of a trial nobody wants the model"
    told = {"reason": end.reason, "signal": end.signal, "error": end.error}
    detail |= {k: v for k, v in told.items() if v is not None}
    if end.reason is not None:
        detail["help"] = HELP[end.reason]
    cites = [of_event(*evidence.stopped)] if evidence.stopped else []
    cites += _of_signals(log, end.lines)
    if log and log.steps:
        cites.append(_of_line(log, log.steps[-1]))
    if saved is not None:
        cites.append(
            of_event(*saved) if isinstance(saved, tuple) else _of_signals(log, (saved,))[0]
        )
    if evidence.exit is not None:
        detail["returncode"] = evidence.exit.returncode
        text = f"returncode {evidence.exit.returncode}, signal {evidence.exit.signal}"
        cites.append(Cite(source="exit", file=str(evidence.exit.path), line=1, text=text))
    return Seen(state=end.state, proved=end.proved, cites=tuple(cites), detail=detail)


def _of_signals(log: Log | None, signals: Sequence[Signal]) -> tuple[Cite, ...]:
    file = str(log.path) if log else ""
    return tuple(Cite(source="log", file=file, line=s.line, text=s.text) for s in signals)


def _of_asked(log: Log | None, key: str) -> tuple[Cite, ...]:
    """The line of the arguments dump that shows this value."""
    if log is None or key not in log.asked:
        return ()
    text = f"{key}={log.asked[key]}"
    return (Cite(source="log", file=str(log.path), line=log.asked_at[key], text=text),)


def _of_line(log: Log | None, line: StepLine) -> Cite:
    file = str(log.path) if log else ""
    return Cite(source="log", file=file, line=line.line, text=line.text)


def _of_losses(evidence: Evidence) -> tuple[Cite, ...]:
    """Where the first and the last loss stand: in the log, or where nothing is logged in a record."""
    log = evidence.log
    if log is not None and log.steps:
        return tuple(_of_line(log, line) for line in (log.steps[0], log.steps[-1]))
    for _, record in sorted(evidence.probe.ranks.items()) if evidence.probe else ():
        if record.steps:
            return tuple(_of_step(record, step) for step in (record.steps[0], record.steps[-1]))
    return ()


def of_event(record: RankRecord, event: Event) -> Cite:
    """Where an event stands."""
    return Cite(source="probe", file=str(record.path), line=event.line, text=event.shown())


def _of_step(record: RankRecord, step: ProbeStep) -> Cite:
    text = f"step {step.step}, loss {step.loss}, finite {step.finite}"
    return Cite(source="probe", file=str(record.path), line=step.line, text=text)


POINTS: Mapping[str, Callable[[Evidence, str | None], Seen]] = {
    "liger": _liger,
    "packing": _packing,
    "attention": _attention,
    "batch": _batch,
    "dataset_cache": _dataset_cache,
    "reference_cache": _reference_cache,
    "loss": _loss,
    "gradients": _gradients,
    "trend": _trend,
    "memory": _memory,
    "finish": _finish,
}
