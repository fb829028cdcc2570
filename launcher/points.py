"""Evidence -> what ran: a `Seen` for Liger, packing, attention, batch and caches, with the lines it rests on.

Each function takes the evidence and what is wanted (None: nothing), because what proves a point
depends on it: an announcement can disprove `off`, and never prove `engaged`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.backends.open_instruct_log import ATTENTION
from launcher.ending import fatal
from launcher.evidence import Event, Evidence, Planned, ProbeStep, RankRecord
from launcher.logs import Log, Signal, StepLine

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

    `doubt` says that the state must not pass even where nothing is expected; `why` holds `reason` and
    `help`, which are only said of a point that is not as expected.
    """

    state: str
    proved: bool = True
    doubt: bool = False
    cites: tuple[Cite, ...] = ()
    detail: Mapping[str, object] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)


UNKNOWN = Seen(state="unknown", proved=False)


def of_events(found: Iterable[tuple[RankRecord, Event]]) -> tuple[Cite, ...]:
    """Where events stand."""
    return tuple(
        Cite(source="probe", file=str(record.path), line=event.line, text=event.shown())
        for record, event in found
    )


def of_step(record: RankRecord, step: ProbeStep) -> Cite:
    """Where a step of a rank stands."""
    text = f"step {step.step}, loss {step.loss}, finite {step.finite}"
    return Cite(source="probe", file=str(record.path), line=step.line, text=text)


def of_line(log: Log | None, line: Signal | StepLine) -> Cite:
    """Where a signal or a step of the log stands."""
    return Cite(source="log", file=str(log.path) if log else "", line=line.line, text=line.text)


def of_log(log: Log | None, lines: Iterable[Signal | StepLine]) -> tuple[Cite, ...]:
    """Where signals or steps of the log stand."""
    return tuple(of_line(log, line) for line in lines)


def of_asked(log: Log | None, key: str) -> tuple[Cite, ...]:
    """The line of the arguments dump that shows this value."""
    if log is None or key not in log.asked:
        return ()
    text = f"{key}={log.asked[key]}"
    return (Cite(source="log", file=str(log.path), line=log.asked_at[key], text=text),)


def of_losses(evidence: Evidence) -> tuple[Cite, ...]:
    """Where the first and the last loss stand: in the log, or where nothing is logged in a record."""
    if lines := evidence.lines:
        return of_log(evidence.log, (lines[0], lines[-1]))
    for record in evidence.records:
        if record.steps:
            return of_step(record, record.steps[0]), of_step(record, record.steps[-1])
    return ()


def missing_ranks(evidence: Evidence, present: Container[int]) -> dict[str, object]:
    """The ranks that should be there and are not among those given, as a detail of a point."""
    absent = evidence.probe.without(present) if evidence.probe else ()
    return {"missing_ranks": list(absent)} if absent else {}


def probe_lines(evidence: Evidence, start: str | re.Pattern[str] = "") -> tuple[Signal, ...]:
    """What the probe said on the console, where it starts so."""
    said = (*fatal(evidence, "violation"), *evidence.signals("warned"))
    return tuple(s for s in said if re.match(start, s.fields["message"]))


# -- Liger


def _liger(evidence: Evidence, want: str | None) -> Seen:
    calls = {record.rank: record.liger_calls for record in evidence.records if record.steps}
    return _liger_counted(evidence, want, calls) if calls else _liger_logged(evidence, want)


def _liger_counted(
    evidence: Evidence, want: str | None, calls: Mapping[int, Mapping[str, int]]
) -> Seen:
    """From the calls counted in every rank that came as far as a step."""
    names = dict.fromkeys((*OPERATIONS, *(op for counts in calls.values() for op in counts)))
    detail: dict[str, object] = {
        op: {str(rank): counts.get(op, 0) for rank, counts in calls.items()} for op in names
    }
    missing = missing_ranks(evidence, calls)
    detail |= missing
    patches, steps = of_events(evidence.events("liger_patch")), evidence.last_step
    cites = of_events(evidence.last_events("liger"))
    idle = [rank for rank, counts in calls.items() if not any(counts.values())]
    if not idle and want == "engaged" and (uncalled := _uncalled(evidence, calls)):
        why = {
            "reason": f"`{', '.join(uncalled)}` was patched in and never called in {steps} steps: "
            "the logits are whole",
            "help": "the model does not take its loss from Liger's forward: see whether Liger knows the "
            "model type, and who computes the loss; `expect: {liger: any}` takes it so",
        }
        detail["uncalled"] = uncalled
        return Seen(state="not_engaged", cites=(*cites, *patches), detail=detail, why=why)
    if not idle:
        called = (op for op in names if any(counts.get(op) for counts in calls.values()))
        why = {"reason": f"Liger's kernels were called: {', '.join(called)}"}
        proved = not missing or want == "off"
        why = why if want == "off" else {}
        return Seen(state="engaged", proved=proved, cites=cites, detail=detail, why=why)
    some = len(idle) < len(calls)
    if some:
        detail["idle_ranks"] = idle
    cites += tuple(
        of_step(record, record.steps[-1]) for record in evidence.records if record.rank in idle
    )
    if not (some or want == "engaged" or evidence.asked.get("use_liger_kernel") == "True"):
        # of a rank without steps it is not known, unless another one shows that it is not as wanted
        return Seen(state="off", proved=not missing, cites=cites, detail=detail)
    where = f" on rank {', '.join(map(str, idle))}" if some else ""
    patched = "though its patches were applied" if patches else "and no patch was applied"
    why = {
        "reason": f"no kernel of Liger's was called{where} in {steps} steps, {patched}",
        "help": "the class that trains is another than the patched one" if patches
        else "see whether liger-kernel is installed (`launch doctor`) and knows the model type",
    }  # fmt: skip
    return Seen(state="not_engaged", cites=cites, detail=detail, why=why)


def _uncalled(
    evidence: Evidence, calls: Mapping[int, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """The losses that Liger was told to put in and that some rank never called, with the calls of each.

    It is they that save the logits' memory, and the other kernels run without them. Which of those a
    model has is for Liger to know.
    """
    patched = [event.fields.get("kwargs") for _, event in evidence.events("liger_patch")]
    asked = [op for op in FUSED if any(isinstance(k, dict) and k.get(op) is True for k in patched)]
    lacking = {op: {str(r): c.get(op, 0) for r, c in calls.items()} for op in asked}
    return {op: counts for op, counts in lacking.items() if not all(counts.values())}


def _liger_logged(evidence: Evidence, want: str | None) -> Seen:
    """From announcements, which can rule Liger out but never prove that it runs."""
    log, asked = evidence.log, evidence.asked
    patches = of_events(evidence.events("liger_patch"))
    asked_off = asked.get("use_liger_kernel") == "False"
    # upstream asks Liger for nothing then: whatever speaks of it is a row of the data
    applied, attempted, refused = (
        () if asked_off else evidence.signals(f"liger_{name}")
        for name in ("applied", "attempted", "unsupported")
    )
    only = "the log says {}: that its kernels run, only the probe can count"
    if applied or patches:
        kwargs = applied[0].fields.get("kwargs") if applied else None
        return Seen(
            state="applied",
            proved=want != "engaged",
            cites=(*patches, *of_log(log, applied)),
            detail={} if kwargs is None else {"kwargs": kwargs},
            why={"reason": only.format("that patches were applied")},
        )
    cites = of_log(log, (*attempted, *refused))
    if refused:
        return Seen(state="not_engaged", cites=cites, detail={"reason": refused[0].text})
    if attempted:
        why = {"reason": only.format("only that it tries")}
        return Seen(state="attempted", proved=want == "off", cites=cites, why=why)
    # Training began and the attempt, logged right before it, is not there. That it was never made is
    # proved where the arguments or the script rule it out (use_qlora wins over use_liger_kernel, and
    # dpo.py does not read it), or where the source is known to announce it in these words.
    began = bool(asked and evidence.signals("total_steps", "progress"))
    ruled_out = asked.get("use_qlora") == "True" or bool(evidence.signals("progress"))
    announced = evidence.reworded is not None and not evidence.rewords("liger_attempted")
    never = began and (ruled_out or announced)
    return Seen(
        state="off" if never or asked_off else "unknown",
        proved=never or (asked_off and want == "off"),
        cites=of_asked(log, "use_liger_kernel") or of_log(log, evidence.signals("liger_asked")),
        detail={"reason": "the log shows no attempt to apply it"} if want == "engaged" else {},
    )


# -- packing


def _packing(evidence: Evidence, want: str | None) -> Seen:
    seen = _packing_by_rank(evidence, want) or _packing_logged(evidence, want)
    return replace(seen, why=_why_packing(want, seen, evidence))


def _packing_logged(evidence: Evidence, want: str | None) -> Seen:
    said, cites = evidence.signals("packing"), of_asked(evidence.log, "packing")
    if said or (evidence.asked.get("packing") == "True" and not evidence.packs_nothing):
        cites = (*of_log(evidence.log, said), *cites)
        return Seen(state="on", proved=want != "isolated", cites=cites)
    return Seen(state="off" if cites else "unknown", proved=bool(cites), cites=cites)


def _packing_by_rank(evidence: Evidence, want: str | None) -> Seen | None:
    """As the ranks saw it, the gravest of them; None where none looked at a batch."""
    by_rank: dict[int, tuple[RankRecord, Event]] = {}
    for record in evidence.records:
        looks = record.all("packing_isolation", "packing")
        states = {event.text("state"): event for event in looks}
        for known in ("off", "on", "isolated", "leaking"):
            if known in states:
                by_rank[record.rank] = record, states[known]
    if not by_rank:
        return None
    states_by_rank = {str(rank): str(event.text("state")) for rank, (_, event) in by_rank.items()}
    packed = want in ("isolated", "on")
    order = ("leaking", "off", "on", "isolated") if packed else ("leaking", "on", "isolated", "off")
    state = next(s for s in order if s in states_by_rank.values())
    shown = [one for one in by_rank.values() if one[1].text("state") == state]
    detail = _fields(shown[0][1])
    if len({*states_by_rank.values()}) > 1:
        detail["ranks"] = states_by_rank
    if state == "leaking":
        detail["help"] = _LEAKING_HELP
    untested = [e for _, e in evidence.events("packing_isolation") if e.text("reason") is not None]
    if state == "on" and untested:
        detail["reason"] = f"isolation was not tested: {untested[0].text('reason')}"
    missing = missing_ranks(evidence, by_rank)
    detail |= missing
    for _, event in evidence.events("half_wasted")[:1]:
        # packed rows are mostly empty, and another batch would fill them
        detail["wasted"] = event.text("message")
    # a single rank can disprove what was asked for; to prove it takes all. `on` is neither for isolation
    disproved = state == "leaking" or (state == "off") == packed
    proved = disproved or not (missing or (state == "on" and want == "isolated"))
    return Seen(state=state, proved=proved, cites=of_events(shown), detail=detail)


def _why_packing(want: str | None, seen: Seen, evidence: Evidence) -> Mapping[str, str]:
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


# -- attention


def _attention(evidence: Evidence, want: str | None) -> Seen:
    events = [one for one in evidence.events("model") if one[1].text("attention")]
    if not events:
        return _attention_logged(evidence, want)
    meant = (want, ATTENTION.get(want or "", want))
    other = [one for one in events if want is not None and one[1].text("attention") not in meant]
    state = str((other or events)[0][1].text("attention"))
    by_rank = {str(record.rank): event.text("attention") for record, event in events}
    detail = missing_ranks(evidence, {record.rank for record, _ in events})
    proved = bool(other) or not detail
    why, where = {}, ""
    if len({event.text("attention") for _, event in events}) > 1:
        detail["ranks"] = by_rank
        where = f" ({', '.join(f'rank {rank} {name}' for rank, name in by_rank.items())})"
    if want != state and proved:
        why = {
            "reason": f"the loaded model has {state}{where}",
            "help": f"see whether `{want}` can be had there (`launch doctor`), and what asks for it",
        }
    cites = of_events(one for one in events if one[1].text("attention") == state)
    return Seen(state=state, proved=proved, cites=cites, detail=detail, why=why)


def _attention_logged(evidence: Evidence, want: str | None) -> Seen:
    detected = evidence.signals("attention")[-1:]
    # DPO's own argument wins
    word = evidence.asked.get("attn_implementation", "").strip("'")
    word = word or "".join(s.fields["value"] for s in detected)
    if word in ("", "None"):
        return UNKNOWN
    state = ATTENTION.get(word, word)
    told = f"the log announces {word}, and a log alone proves no more"
    return Seen(
        state=state,
        proved=want is not None and ATTENTION.get(want, want) != state,
        cites=of_log(evidence.log, detected),
        detail={"announced": word},
        why={} if want == state else {"reason": told},
    )


# -- the batch


def _batch(evidence: Evidence, _want: str | None) -> Seen:
    """Whether as many processes trained as were planned, and a step of each took as many rows."""
    probe, planned = evidence.probe, evidence.planned
    if probe is None or planned.world is None:
        return UNKNOWN
    started = evidence.last_events("start")
    other = [one for one in started if one[1].number("world") not in (None, planned.world)]
    detail: dict[str, object] = {"world": probe.world, "planned_world": planned.world}

    def different(reason: str, cites: tuple[Cite, ...]) -> Seen:
        told, why = {**detail, "reason": reason}, {"help": _OTHER_BATCH}
        return Seen(state="different", cites=cites, detail=told, why=why)

    if other:
        reason = f"the world size was {probe.world}, {planned.world} was planned"
        return different(reason, of_events(other))
    as_planned = []
    for record, start in started:
        odd = [_other_size(step, planned) for step in record.steps]
        # an epoch's last step may be smaller, and then none beside it
        for step, before, now in zip(record.steps[1:], odd, odd[1:], strict=False):
            if before and now:
                return different(_size(step, planned, record.rank), (of_step(record, step),))
        if start.number("world") and (planned.steps == 0 or not all(odd)):
            as_planned.append(record.rank)
    if absent := [rank for rank in range(planned.world) if rank not in as_planned]:
        detail["missing_ranks"] = absent
    state = "planned" if as_planned else "unknown"
    return Seen(state=state, proved=not absent, cites=of_events(started), detail=detail)


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


# -- caches


def _dataset_cache(evidence: Evidence, want: str | None) -> Seen:
    seen = _cache_by_rank(evidence, "dataset_cache")
    if seen is None:
        missed = ("dataset_missed", "dataset_saved")
        whole = not (evidence.log and evidence.log.headless)
        seen = _cache_logged(evidence, missed, "dataset_found", whole=whole)
    return _with_why(seen, want)


def _reference_cache(evidence: Evidence, want: str | None) -> Seen:
    seen = _cache_by_rank(evidence, "reference_cache")
    stale = probe_lines(evidence, _STALE)
    if seen is None and stale:
        seen = Seen(state="stale", cites=of_log(evidence.log, stale))
    if seen is not None and seen.state == "stale":
        seen = replace(seen, detail={**seen.detail, "help": _STALE_HELP})
    if seen is None:
        seen = _cache_logged(evidence, ("reference_missed",), "reference_hit")
        first = _first_loss(evidence.log) if seen.state == "hit" else None
        if first is not None and abs(first.loss - math.log(2)) > FIRST_LOSS:
            # dropout moves the first loss too: what the log shows is a doubt, and no proof
            detail = {**seen.detail, "first_loss": first.loss, "help": _STALE_HELP}
            cites = (*seen.cites, *of_log(evidence.log, (first,)))
            seen = Seen(state="stale", proved=False, cites=cites, detail=detail)
    return _with_why(seen, want)


def _first_loss(log: Log | None) -> StepLine | None:
    """The first step of a DPO whose loss must be ln 2, if the policy still is its own reference."""
    if log is None or not log.steps or log.first("resumed"):
        return None
    plain = re.search(r"\bdpo(?:_norm)?\b", log.asked.get("loss_type", ""))
    added = log.asked.get("load_balancing_loss") != "False"
    return log.steps[0] if log.steps[0].step == 1 and plain and not added else None


def _cache_logged(
    evidence: Evidence, misses: Sequence[str], hit: str, *, whole: bool = True
) -> Seen:
    """One rank fills a cache and the others then find it, so a single miss outweighs all finds.

    Where the source may say a miss in other words, or the log is not `whole` and what was said before the
    find is not there, a find proves nothing.
    """
    missed, found = evidence.signals(*misses), evidence.signals(hit)
    if not missed and (not found or not whole or evidence.rewords(*misses, hit)):
        return UNKNOWN
    cites = of_log(evidence.log, (*missed[:1], *missed[1:][-1:]) if missed else found)
    paths = [s.fields["path"] for s in (*found, *missed) if "path" in s.fields]
    detail = {"path": paths[0]} if paths else {}
    return Seen(state="miss" if missed else "hit", cites=cites, detail=detail)


def _cache_by_rank(evidence: Evidence, name: str) -> Seen | None:
    """The gravest state that an event of this name has on any rank."""
    for state in ("stale", "miss", "hit"):
        found = [(r, e) for r, e in evidence.events(name) if e.text("state") == state]
        if found:
            # whoever left no record may be the one that filled the cache
            ranks = evidence.probe.ranks if evidence.probe else {}
            missing = missing_ranks(evidence, ranks) if state == "hit" else {}
            detail = _fields(found[0][1]) | missing
            return Seen(state=state, proved=not missing, cites=of_events(found), detail=detail)
    return None


def _fields(event: Event) -> dict[str, object]:
    return {key: value for key, value in event.fields.items() if key not in ("t", "state")}


def _with_why(seen: Seen, want: str | None) -> Seen:
    path = f": {seen.detail['path']}" if seen.detail.get("path") else ""
    if want == "hit" and seen.state == "miss":
        help = "`launch cache why RUN` says what differs from what is there"
        return replace(
            seen, why={"reason": f"it was not there, and was made anew{path}", "help": help}
        )
    if want == "miss" and seen.state == "hit":
        return replace(seen, why={"reason": f"it was there already{path}"})
    return seen


POINTS: Mapping[str, Callable[[Evidence, str | None], Seen]] = {
    "liger": _liger,
    "packing": _packing,
    "attention": _attention,
    "batch": _batch,
    "dataset_cache": _dataset_cache,
    "reference_cache": _reference_cache,
}
