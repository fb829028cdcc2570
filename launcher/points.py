"""Evidence -> what ran: a `Seen` for Liger, packing, attention, batch and caches, with the lines it rests on.

Each function takes the evidence and what is wanted (None: nothing), because what proves a point
depends on it: an announcement can disprove `off`, and never prove `engaged`. The `_why` functions say of a
point that is not as expected what was seen in its place, and what to do next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.backends.open_instruct_log import ATTENTION
from launcher.ending import fatal
from launcher.evidence import Event, Evidence, Planned, Probe, ProbeStep, RankRecord
from launcher.logs import Log, Signal, StepLine

Why = Mapping[str, str]
"""`reason` and, where there is something to do, `help` of a point that is not as expected."""

OPERATIONS = ("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy", "preference_loss")
FUSED = ("fused_linear_cross_entropy", "cross_entropy")
FIRST_LOSS = 0.01  # more than rounding moves DPO's first loss by
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
_STALE = re.compile(r"reference_cache expected .*, seen stale: ")
_NOT_PACKED = (
    "open-instruct's SFT packs the rows of one micro-batch, so that one row has none beside it; in rows made "
    "beforehand one that is as long as the limit leaves no room: look at the batch, and at the row lengths; "
    "`launch explain packing CONFIG` says who reads it"
)
_PACKED = "write `packing: false`, or `expect: {packing: isolated}`"
_OTHER_BATCH = (
    "see what started the processes (an accelerate config, a scheduler's task count, the GPUs that could be "
    "seen) and what set the batch anew (a DeepSpeed file, `auto_find_batch_size`); `expect: {batch: any}` "
    "takes it so"
)


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


def of_event(record: RankRecord, event: Event) -> Cite:
    """Where an event stands."""
    return Cite(source="probe", file=str(record.path), line=event.line, text=event.shown())


def of_step(record: RankRecord, step: ProbeStep) -> Cite:
    """Where a step of a rank stands."""
    text = f"step {step.step}, loss {step.loss}, finite {step.finite}"
    return Cite(source="probe", file=str(record.path), line=step.line, text=text)


def of_signals(log: Log | None, signals: Sequence[Signal]) -> tuple[Cite, ...]:
    """Where signals of the log stand."""
    file = str(log.path) if log else ""
    return tuple(Cite(source="log", file=file, line=s.line, text=s.text) for s in signals)


def of_asked(log: Log | None, key: str) -> tuple[Cite, ...]:
    """The line of the arguments dump that shows this value."""
    if log is None or key not in log.asked:
        return ()
    text = f"{key}={log.asked[key]}"
    return (Cite(source="log", file=str(log.path), line=log.asked_at[key], text=text),)


def of_line(log: Log | None, line: StepLine) -> Cite:
    """Where a line of a step stands."""
    file = str(log.path) if log else ""
    return Cite(source="log", file=file, line=line.line, text=line.text)


def of_losses(evidence: Evidence) -> tuple[Cite, ...]:
    """Where the first and the last loss stand: in the log, or where nothing is logged in a record."""
    log = evidence.log
    if log is not None and log.steps:
        return tuple(of_line(log, line) for line in (log.steps[0], log.steps[-1]))
    for _, record in sorted(evidence.probe.ranks.items()) if evidence.probe else ():
        if record.steps:
            return tuple(of_step(record, step) for step in (record.steps[0], record.steps[-1]))
    return ()


def probe_lines(evidence: Evidence) -> tuple[Signal, ...]:
    """What the probe said on the console."""
    warned = evidence.log.all("warned") if evidence.log else ()
    return (*fatal(evidence, "violation"), *warned)


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
        of_step(r, r.steps[-1]) for r in probe.ranks.values() if r.rank in idle and r.steps
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
        cites = (*patches, *of_signals(log, applied))
        return Seen(state="applied", proved=want != "engaged", cites=cites, detail=detail)
    refused = spoken.all("liger_unsupported") if spoken else ()
    attempted = spoken.all("liger_attempted") if spoken else ()
    cites = of_signals(log, (*attempted, *refused))
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
    cites = of_asked(log, "use_liger_kernel") or of_signals(log, told)
    state = "off" if never or asked_off else "unknown"
    return Seen(state=state, proved=proved, cites=cites, detail=detail)


def _patches(evidence: Evidence) -> tuple[Cite, ...]:
    events = evidence.probe.events("liger_patch") if evidence.probe else ()
    return tuple(of_event(record, event) for record, event in events)


def _why_liger(want: str | None, seen: Seen, evidence: Evidence) -> Why:
    steps = evidence.last_step or 0
    calls = {op: n for op, n in seen.detail.items() if isinstance(n, Mapping) and any(n.values())}
    if isinstance(lacking := seen.detail.get("uncalled"), Mapping):
        named = ", ".join(map(str, lacking))
        return {
            "reason": f"`{named}` was patched in and never called in {steps} steps: the logits are whole",
            "help": "the model does not take its loss from Liger's forward: see whether Liger knows the "
            "model type, and who computes the loss; `expect: {liger: any}` takes it so",
        }
    if want == "off" and seen.state == "engaged":
        return {"reason": f"Liger's kernels were called: {', '.join(calls)}"}
    if seen.state == "not_engaged" and "reason" not in seen.detail and steps:
        ranks = seen.detail.get("idle_ranks")
        where = f" on rank {', '.join(map(str, ranks))}" if isinstance(ranks, list) else ""
        patched = any(evidence.probe.events("liger_patch")) if evidence.probe else False
        return {
            "reason": f"no kernel of Liger's was called{where} in {steps} steps, "
            + ("though its patches were applied" if patched else "and no patch was applied"),
            "help": "the class that trains is another than the patched one" if patched
            else "see whether liger-kernel is installed (`launch doctor`) and knows the model type",
        }  # fmt: skip
    if seen.state in ("applied", "attempted"):
        told = (
            "says that patches were applied"
            if seen.state == "applied"
            else "says only that it tries"
        )
        return {"reason": f"the log {told}: that its kernels run, only the probe can count"}
    return {}


def _packing(evidence: Evidence, want: str | None) -> Seen:
    seen = _packing_seen(evidence, want)
    if seen is not None:
        return seen
    log = evidence.log
    said = log.all("packing") if log else ()
    asked = log.asked.get("packing") if log else None
    if said or (asked == "True" and not evidence.packs_nothing):
        cites = (*of_signals(log, said), *of_asked(log, "packing"))
        return Seen(state="on", proved=want != "isolated", cites=cites)
    cites = of_asked(log, "packing")
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


def _why_packing(want: str | None, seen: Seen, evidence: Evidence) -> Why:
    if want in ("isolated", "on") and seen.state == "off":
        ranks = seen.detail.get("ranks")
        idle = [r for r, s in ranks.items() if s == "off"] if isinstance(ranks, Mapping) else []
        where = f" of rank {', '.join(idle)}" if idle else ""
        return {"reason": f"no batch{where} held two samples in one row", "help": _NOT_PACKED}
    if want == "off" and seen.state in ("on", "isolated"):
        return {"reason": "several samples stand in one row", "help": _PACKED}
    if want == "isolated" and seen.state == "on" and "missing_ranks" not in seen.detail:
        told = "was not tested" if evidence.probe else "cannot be shown by a log alone"
        return {"reason": f"whether packed samples see each other {told}"}
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
    cites = of_signals(log, (detected,) if detected else ())
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


def _why_attention(want: str | None, seen: Seen, _evidence: Evidence) -> Why:
    if want == seen.state or ("missing_ranks" in seen.detail and not seen.proved):
        return {}
    if "announced" in seen.detail:
        return {
            "reason": f"the log announces {seen.detail['announced']}, and a log alone proves no more"
        }
    ranks = seen.detail.get("ranks")
    where = (
        f" ({', '.join(f'rank {r} {s}' for r, s in ranks.items())})"
        if isinstance(ranks, Mapping)
        else ""
    )
    return {
        "reason": f"the loaded model has {seen.state}{where}",
        "help": f"see whether `{want}` can be had there (`launch doctor`), and what asks for it",
    }


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
            return Seen(state="different", cites=(of_step(record, step),), detail=detail)
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


def _why_batch(_want: str | None, seen: Seen, _evidence: Evidence) -> Why:
    return {"help": _OTHER_BATCH} if seen.state == "different" else {}


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
    told = [s for s in probe_lines(evidence) if _STALE.match(s.fields["message"])]
    if seen is None and told:
        seen = Seen(state="stale", cites=of_signals(evidence.log, told))
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
    cites = (*logged.cites, of_line(evidence.log, first))
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
    cites = of_signals(log, (*missed[:1], *missed[1:][-1:]) if missed else found)
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


def _why_cache(want: str | None, seen: Seen, _evidence: Evidence) -> Why:
    path = f": {seen.detail['path']}" if seen.detail.get("path") else ""
    if want == "hit" and seen.state == "miss":
        help = "`launch cache why RUN` says what differs from what is there"
        return {"reason": f"it was not there, and was made anew{path}", "help": help}
    if want == "miss" and seen.state == "hit":
        return {"reason": f"it was there already{path}"}
    return {}


POINTS: Mapping[str, Callable[[Evidence, str | None], Seen]] = {
    "liger": _liger,
    "packing": _packing,
    "attention": _attention,
    "batch": _batch,
    "dataset_cache": _dataset_cache,
    "reference_cache": _reference_cache,
}
WHY: Mapping[str, Callable[[str | None, Seen, Evidence], Why]] = {
    "liger": _why_liger,
    "packing": _why_packing,
    "attention": _why_attention,
    "batch": _why_batch,
    "dataset_cache": _why_cache,
    "reference_cache": _why_cache,
}
