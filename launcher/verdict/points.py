"""Evidence -> what ran: an `Observation` of Liger, packing, attention, batch and caches. Each function takes the
evidence and what is expected (None: nothing), because what proves a point depends on it: an announcement can disprove
`off`, and never prove `engaged`."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from launcher.config.keys import PAIRED
from launcher.runs.record import Manifest, as_mapping
from launcher.upstream.logs.open_instruct import ATTENTION
from launcher.upstream.trainers import BACKENDS
from launcher.verdict.ending import fatal
from launcher.verdict.evidence import Event, Evidence, ExitRecord, ProbeStep, finite
from launcher.verdict.logs.scan import Log, LogLine, Signal, StepLine

OPERATIONS = ("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy", "preference_loss")
FUSED = ("fused_linear_cross_entropy", "cross_entropy")
FIRST_LOSS = 0.01  # more than rounding moves DPO's first loss by
_LEAKING_HELP = (
    "packed samples attend to each other: use an attention that separates them (flash-attn) or set `packing: false`; "
    "TRL's `packing_strategy: wrapped` never separates them. In open-instruct's DPO on SDPA, transformers does not "
    "separate samples while it uses a cache: switch that off with `additional_model_arguments: {use_cache: false}`"
)
_STALE_HELP = (
    "the cached log-probabilities belong to another model than the one that training starts from, or to "
    "another attention mask: remove the file, or set REFERENCE_LOGPROBS_CACHE_PATH to a new folder"
)
_STALE = re.compile(r"reference_cache expected .*, seen stale: ")
_NOT_PACKED_HELP = (
    "open-instruct's SFT packs the rows of one micro-batch: a single row has nothing to be packed with. In "
    "data packed beforehand, a row of the maximal length leaves no room. Check the batch and row lengths; "
    "`launch explain packing CONFIG` says what reads the argument"
)
_BATCH_HELP = (
    "check what started the processes (an accelerate config, a scheduler's task count, the visible GPUs) and "
    "what changed the batch (a DeepSpeed file, `auto_find_batch_size`); `expect: {batch: any}` accepts it"
)
_LIGER_LOGGED = "the log only says {}; only the probe can count calls of the kernels"

Citable = Event | ProbeStep | ExitRecord | LogLine


@dataclass(frozen=True, slots=True)
class Observation:
    """A point's state; `proved` is False where the evidence settles nothing for what is expected. An `unwanted` state
    must not pass even where nothing is expected; `reason` and `help` are only for a point that is not as expected.
    `synonym` is the word of the stage file for the same state, where it has another one."""

    state: str = "unknown"
    _: KW_ONLY
    proved: bool = True
    unwanted: bool = False
    synonym: str | None = None
    cites: Sequence[Citable] = ()
    detail: Mapping[str, object] = field(default_factory=dict)
    reason: str | None = None
    help: str | None = None


UNKNOWN = Observation(proved=False)


def probe_lines(evidence: Evidence, start: str | re.Pattern[str] = "") -> tuple[Signal, ...]:
    lines = (*fatal(evidence, "violation"), *evidence.signals("warned"))
    return tuple(s for s in lines if re.match(start, s.fields["message"]))


def observe_liger(evidence: Evidence, expected: str | None) -> Observation:
    calls = {}
    for record in evidence.records:
        if record.steps:
            event = record.last("liger")
            counts = as_mapping(event.fields.get("calls")) if event else {}
            calls[record.rank] = {str(k): int(n) for k, v in counts.items() if (n := finite(v)) is not None and n > 0}
    return _liger_counted(evidence, expected, calls) if calls else _liger_logged(evidence, expected)


def _liger_counted(evidence: Evidence, expected: str | None, calls: Mapping[int, Mapping[str, int]]) -> Observation:
    """From the calls counted in every rank that came as far as a step."""
    names = dict.fromkeys((*OPERATIONS, *(op for counts in calls.values() for op in counts)))
    missing = evidence.missing_ranks(calls)
    detail: dict[str, object] = {op: _calls_of(op, calls) for op in names} | missing
    patches, cites = evidence.events("liger_patch"), evidence.last_events("liger")
    idle = [rank for rank, counts in calls.items() if not any(counts.values())]
    # the losses that Liger was to put in save the logits' memory, and the other kernels run without them. Which of
    # those a model has is for Liger to know
    kwargs = [as_mapping(event.fields.get("kwargs")) for event in patches]
    fused = [op for op in FUSED if any(one.get(op) is True for one in kwargs)]
    uncalled = {op: counts for op in fused if not all((counts := _calls_of(op, calls)).values())}
    if not idle and expected == "engaged" and uncalled:
        return Observation(
            "not_engaged",
            cites=(*cites, *patches),
            detail={**detail, "uncalled": uncalled},
            reason=f"`{', '.join(uncalled)}` was patched in but never called in {evidence.last_step} steps: "
            "the full logits are computed",
            help="the loss does not come from Liger's forward: check that Liger supports the model type, and what "
            "computes the loss; `expect: {liger: any}` accepts it",
        )
    if not idle:
        called = ", ".join(op for op in names if any(counts.get(op) for counts in calls.values()))
        reason = f"Liger's kernels were called: {called}" if expected == "off" else None
        proved = not missing or expected == "off"
        return Observation("engaged", proved=proved, cites=cites, detail=detail, reason=reason)
    some = len(idle) < len(calls)
    where = f" on rank {', '.join(map(str, idle))}" if some else ""
    detail |= {"idle_ranks": idle} if some else {}
    steps = [record.steps[-1] for record in evidence.records if record.rank in idle]
    if not (some or expected == "engaged" or evidence.arguments.get("use_liger_kernel") == "True"):
        # of a rank without steps it is not known, unless another one shows that it is not as expected
        return Observation("off", proved=not missing, cites=(*cites, *steps), detail=detail)
    patched = "though its patches were applied"
    help = "the model class that trains is not the one that was patched"
    if not patches:
        patched = "and no patch was applied"
        help = "check that liger-kernel is installed (`launch doctor`) and supports the model type"
    reason = f"no Liger kernel was called{where} in {evidence.last_step} steps, {patched}"
    return Observation("not_engaged", cites=(*cites, *steps), detail=detail, reason=reason, help=help)


def _calls_of(operation: str, calls: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    return {str(rank): counts.get(operation, 0) for rank, counts in calls.items()}


def _liger_logged(evidence: Evidence, expected: str | None) -> Observation:
    """From announcements, which can rule Liger out but never prove that it runs."""
    log, arguments = evidence.log, evidence.arguments
    patches, is_off = evidence.events("liger_patch"), arguments.get("use_liger_kernel") == "False"
    # upstream asks Liger for nothing then: whatever speaks of it is a row of the data
    applied, attempted, refused = (
        () if is_off else evidence.signals(f"liger_{name}") for name in ("applied", "attempted", "unsupported")
    )
    if applied or patches:
        kwargs = applied[0].fields.get("kwargs") if applied else None
        return Observation(
            "applied",
            proved=expected != "engaged",
            cites=(*patches, *applied),
            detail={} if kwargs is None else {"kwargs": kwargs},
            reason=_LIGER_LOGGED.format("that patches were applied"),
        )
    if refused:
        return Observation("not_engaged", cites=(*attempted, *refused), reason=refused[0].text)
    if attempted:
        reason = _LIGER_LOGGED.format("that it is tried")
        return Observation("attempted", proved=expected == "off", cites=attempted, reason=reason)
    # Training began and the attempt, logged right before it, is not there. That it was never made is proved where the
    # arguments or the script rule it out (use_qlora wins over use_liger_kernel, and dpo.py does not read it), or where
    # the source is known to announce it in these words.
    began = bool(arguments and evidence.signals("total_steps", "progress"))
    ruled_out = arguments.get("use_qlora") == "True" or bool(evidence.signals("progress"))
    never = began and (ruled_out or evidence.pinned is True)
    return Observation(
        "off" if never or is_off else "unknown",
        proved=never or (is_off and expected == "off"),
        cites=(log.argument("use_liger_kernel") if log else ()) or evidence.signals("liger_asked"),
        reason="the log shows no attempt to apply it" if expected == "engaged" else None,
    )


def observe_packing(evidence: Evidence, expected: str | None) -> Observation:
    observed = _packing_by_rank(evidence, expected)
    if observed is None:
        announced = evidence.signals("packing")
        argument = evidence.log.argument("packing") if evidence.log else ()
        if announced or (evidence.arguments.get("packing") == "True" and not evidence.packs_nothing):
            observed = Observation("on", proved=expected != "isolated", cites=(*announced, *argument))
        else:
            observed = Observation("off" if argument else "unknown", proved=bool(argument), cites=argument)
    if expected in ("isolated", "on") and observed.state == "off":
        idle = [rank for rank, state in as_mapping(observed.detail.get("ranks")).items() if state == "off"]
        where = f" of rank {', '.join(idle)}" if idle else ""
        return replace(observed, reason=f"no batch{where} held two samples in one row", help=_NOT_PACKED_HELP)
    if expected == "off" and observed.state in ("on", "isolated"):
        help = "write `packing: false`, or `expect: {packing: isolated}`"
        return replace(observed, reason="several samples share one row", help=help)
    if expected == "isolated" and observed.state == "on" and "missing_ranks" not in observed.detail:
        why = "was not tested" if evidence.probe else "cannot be shown by a log alone"
        return replace(observed, reason=observed.reason or f"whether packed samples see each other {why}")
    return observed


def _packing_by_rank(evidence: Evidence, expected: str | None) -> Observation | None:
    """As the ranks saw it, the gravest of them; None where none looked at a batch."""
    by_rank: dict[int, Event] = {}
    for record in evidence.records:
        states = {event.text("state"): event for event in record.all("packing_isolation", "packing")}
        for known in ("off", "on", "isolated", "leaking"):
            if known in states:
                by_rank[record.rank] = states[known]
    if not by_rank:
        return None
    states_by_rank = {str(rank): str(event.text("state")) for rank, event in by_rank.items()}
    packed = expected in ("isolated", "on")
    order = ("leaking", "off", "on", "isolated") if packed else ("leaking", "on", "isolated", "off")
    state = next(s for s in order if s in states_by_rank.values())
    cites = [event for event in by_rank.values() if event.text("state") == state]
    why = reason_of(evidence.events("packing_isolation")) if state == "on" else None
    missing = evidence.missing_ranks(by_rank)
    detail = _fields(cites[0]) | missing
    if len({*states_by_rank.values()}) > 1:
        detail["ranks"] = states_by_rank
    if (stand_in := _stand_in(evidence, "documents")) is not None:
        detail["stand_in"] = stand_in
    for event in evidence.events("half_wasted")[:1]:
        # packed rows are mostly empty, and another batch would fill them
        detail["wasted"] = event.text("message")
    # a single rank can disprove what was requested; to prove it takes all. `on` is neither for isolation
    disproved = state == "leaking" or (state == "off") == packed
    return Observation(
        state,
        proved=disproved or not (missing or (state == "on" and expected == "isolated")),
        unwanted=state == "leaking",
        cites=cites,
        detail=detail,
        reason=f"isolation was not tested: {why}" if why else None,
        help=_LEAKING_HELP if state == "leaking" else None,
    )


def _stand_in(evidence: Evidence, what: str) -> str | None:
    """What the probe supplied in the place of something that a CPU lacks."""
    for event in evidence.events("supplied"):
        if event.text("what") == what:
            return event.text("why")
    return None


def reason_of(events: Sequence[Event]) -> str | None:
    return next((text for event in events if (text := event.text("reason"))), None)


def observe_attention(evidence: Evidence, expected: str | None) -> Observation:
    events = [event for event in evidence.events("model") if event.text("attention")]
    if not events:
        return _attention_logged(evidence, expected)
    accepted = (expected, ATTENTION.get(expected or "", expected))
    other = [e for e in events if expected is not None and e.text("attention") not in accepted]
    state = str((other or events)[0].text("attention"))
    detail = evidence.missing_ranks({event.rank for event in events})
    proved, where = bool(other) or not detail, ""
    if len({event.text("attention") for event in events}) > 1:
        detail["ranks"] = by_rank = {str(event.rank): event.text("attention") for event in events}
        where = f" ({', '.join(f'rank {rank} {name}' for rank, name in by_rank.items())})"
    return Observation(
        state,
        proved=proved,
        synonym=None if other else expected,
        cites=[event for event in events if event.text("attention") == state],
        detail=detail,
        reason=f"the loaded model has {state}{where}" if proved else None,
        help=f"check that `{expected}` is installed (`launch doctor`), and what requests another" if proved else None,
    )


def _attention_logged(evidence: Evidence, expected: str | None) -> Observation:
    detected = evidence.signals("attention")[-1:]
    # DPO's own argument wins
    word = evidence.arguments.get("attn_implementation", "").strip("'")
    word = word or "".join(s.fields["value"] for s in detected)
    if word in ("", "None"):
        return UNKNOWN
    state = ATTENTION.get(word, word)
    return Observation(
        state,
        proved=expected is not None and ATTENTION.get(expected, expected) != state,
        cites=detected,
        detail={"announced": word},
        reason=f"the log announces {word}; only the probe can prove it",
    )


def observe_batch(evidence: Evidence, _expected: str | None) -> Observation:
    probe, manifest = evidence.probe, evidence.manifest
    if probe is None or (world := manifest.processes) is None:
        return UNKNOWN
    started = evidence.last_events("start")
    detail: dict[str, object] = {"world": probe.world, "planned_world": world}
    different = Observation("different", unwanted=True, detail=detail, help=_BATCH_HELP)
    if other := [event for event in started if event.number("world") not in (None, world)]:
        return replace(different, cites=other, reason=f"the world size was {probe.world}, {world} was planned")
    planned, data = _planned_sizes(manifest), manifest.plan.rows
    # of data that have not the rows of one step, every step is an epoch's last
    few = data is not None and manifest.global_batch is not None and data < manifest.global_batch
    as_planned = []
    for start in started:
        steps = probe.ranks[start.rank].steps
        odd = []
        for step in steps:
            sizes = zip(_sizes(step).values(), planned.values(), strict=True)
            # what a record lacks is no difference
            over = [size - plan for size, plan in sizes if size and plan]
            odd.append(any(more > 0 or (more < 0 and not few) for more in over))
        # an epoch's last step may be smaller, and then none beside it
        for step, before, now in zip(steps[1:], odd, odd[1:], strict=False):
            if before and now:
                found = f"step {step.step} of rank {step.rank}: {_in_words(_sizes(step))}"
                return replace(different, cites=(step,), reason=f"{found}; planned: {_in_words(planned)}")
        if start.number("world") and (manifest.steps == 0 or not all(odd)):
            as_planned.append(start.rank)
    if absent := [rank for rank in range(world) if rank not in as_planned]:
        detail["missing_ranks"] = absent
    return Observation("planned" if as_planned else "unknown", proved=not absent, cites=started, detail=detail)


def _planned_sizes(manifest: Manifest) -> dict[str, float | None]:
    """Of an optimizer step of one rank, as its probe counts them; None where that cannot be known."""
    backend = BACKENDS.get(str(manifest.backend))
    entry = None if backend is None else backend.STAGES.get(str(manifest.script or manifest.stage))
    packs = entry is not None and (entry.packing == "always" or bool(manifest.argument("packing")))
    kind = entry.packing if entry is not None and packs else None
    split = manifest.argument(entry.names.shared) if entry is not None else manifest.argument("sequence_parallel_size")
    each, rows = manifest.accumulation, manifest.per_device
    if kind in ("paired", "one-row") or (isinstance(split, int) and split > 1):
        # dpo.py fills its micro-batches anew (data_loader.py::HFDataLoader._reshard[usable_size = total_batches #1]);
        # ranks that share rows take turns with them
        each = None
    elif kind in ("refilled", "always"):
        rows = None  # of a row that is packed nobody knows how many it holds
    pair = 2 if str(manifest.stage) in PAIRED else 1
    return {"micro-batches": each, "rows": each * rows * pair if each and rows else None}


def _sizes(step: ProbeStep) -> dict[str, float | None]:
    return {"micro-batches": step.micro_batches, "rows": step.rows}


def _in_words(sizes: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {number:.0f}" for name, number in sizes.items() if number)


def observe_dataset_cache(evidence: Evidence, expected: str | None) -> Observation:
    observed = _cache_by_rank(evidence, "dataset_cache")
    if observed is None:
        whole = not (evidence.log and evidence.log.headless)
        observed = _cache_logged(evidence, ("dataset_missed", "dataset_saved"), "dataset_found", whole=whole)
    return _with_reason(observed, expected)


def observe_reference_cache(evidence: Evidence, expected: str | None) -> Observation:
    stale = Observation("stale", unwanted=True, help=_STALE_HELP)
    observed = _cache_by_rank(evidence, "reference_cache")
    if observed is not None and observed.state == "stale":
        observed = replace(stale, cites=observed.cites, detail=observed.detail)
    elif observed is None and (lines := probe_lines(evidence, _STALE)):
        observed = replace(stale, cites=lines)
    elif observed is None:
        observed = _cache_logged(evidence, ("reference_missed",), "reference_hit")
        first = first_plain_loss(evidence.log) if observed.state == "hit" else None
        if first is not None and abs(first.loss - math.log(2)) > FIRST_LOSS:
            # dropout moves the first loss too: what the log shows is a doubt, and no proof
            detail = {**observed.detail, "first_loss": first.loss}
            observed = replace(stale, proved=False, cites=(*observed.cites, first), detail=detail)
    return _with_reason(observed, expected)


def first_plain_loss(log: Log | None) -> StepLine | None:
    """The first step of a DPO whose loss must be ln 2, if the policy still is its own reference."""
    if log is None or not log.steps or log.all("resumed"):
        return None
    plain = re.search(r"\bdpo(?:_norm)?\b", log.arguments.get("loss_type", ""))
    added = log.arguments.get("load_balancing_loss") != "False"
    return log.steps[0] if log.steps[0].step == 1 and plain and not added else None


def _cache_logged(evidence: Evidence, misses: Sequence[str], hit: str, *, whole: bool = True) -> Observation:
    """One rank fills a cache and the others then find it, so a single miss outweighs all finds. A find proves nothing
    where another source may say a miss in other words, or the log is not `whole`."""
    missed, found = evidence.signals(*misses), evidence.signals(hit)
    if not missed and (not found or not whole or evidence.pinned is False):
        return UNKNOWN
    paths = [s.fields["path"] for s in (*found, *missed) if "path" in s.fields]
    cites = (*missed[:1], *missed[1:][-1:]) if missed else found
    return Observation("miss" if missed else "hit", cites=cites, detail={"path": paths[0]} if paths else {})


def _cache_by_rank(evidence: Evidence, name: str) -> Observation | None:
    for state in ("stale", "miss", "hit"):
        if found := [event for event in evidence.events(name) if event.text("state") == state]:
            # whoever left no record may be the one that filled the cache
            ranks = evidence.probe.ranks if evidence.probe else {}
            missing = evidence.missing_ranks(ranks) if state == "hit" else {}
            return Observation(state, proved=not missing, cites=found, detail=_fields(found[0]) | missing)
    return None


def _fields(event: Event) -> dict[str, object]:
    return {key: value for key, value in event.fields.items() if key not in ("t", "state")}


def _with_reason(observed: Observation, expected: str | None) -> Observation:
    path = f": {observed.detail['path']}" if observed.detail.get("path") else ""
    if (expected, observed.state) == ("hit", "miss"):
        help = "`launch cache why RUN` says what differs from the nearest one"
        return replace(observed, reason=f"not found, so it was computed{path}", help=help)
    if (expected, observed.state) == ("miss", "hit"):
        return replace(observed, reason=f"it was found{path}")
    return observed
