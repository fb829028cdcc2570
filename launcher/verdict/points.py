"""What ran, by the evidence: an `Observation` of Liger, packing, attention, batch and caches.

Each function takes the evidence and what is expected (None: nothing), because what proves a point
depends on it: an announcement can disprove `off`, but never prove `engaged`.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, field, replace

from launcher.config.keys import PAIRED
from launcher.lazy_dataclass import dataclass
from launcher.runs.record import Manifest, as_mapping
from launcher.upstream.logs.open_instruct import ATTENTION
from launcher.upstream.trainers import BACKENDS
from launcher.verdict.ending import find_final_signals
from launcher.verdict.evidence import (
    Event,
    Evidence,
    ExitRecord,
    ProbeStep,
    RankRecord,
    keep_finite,
    list_ranks,
    select_state,
)
from launcher.verdict.logs.scan import Log, LogLine, Signal, StepLine

OPERATIONS = ("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy", "preference_loss")
FUSED = ("fused_linear_cross_entropy", "cross_entropy")
FIRST_LOSS = 0.01
"""More than rounding moves DPO's first loss by."""
_LEAKING_HELP = (
    "packed samples attend to each other: use an attention that separates them (flash-attn) or set "
    "`packing: false`; TRL's `packing_strategy: wrapped` never separates them. In open-instruct's "
    "DPO on SDPA, transformers does not separate samples while it uses a cache: switch that off "
    "with `additional_model_arguments: {use_cache: false}`"
)
_STALE_HELP = (
    "the cached log-probabilities belong to another model than the one that training starts from, "
    "or to another attention mask: remove the file, or set REFERENCE_LOGPROBS_CACHE_PATH to a new "
    "folder"
)
_STALE = re.compile(r"reference_cache expected .*, seen stale: ")
_NOT_PACKED_HELP = (
    "open-instruct's SFT packs the rows of one micro-batch: a single row has nothing to be packed "
    "with. In data packed beforehand, a row of the maximal length leaves no room. Check the batch "
    "and row lengths; `launch explain packing CONFIG` says what reads the argument"
)
_BATCH_HELP = (
    "check what started the processes (an accelerate config, a scheduler's task count, the visible "
    "GPUs) and what changed the batch (a DeepSpeed file, `auto_find_batch_size`); "
    "`expect: {batch: any}` accepts it"
)
_LIGER_LOGGED = "the log only says {}; only the probe can count calls of the kernels"
_UNCALLED_HELP = (
    "the loss does not come from Liger's forward: check that Liger supports the model type, and "
    "what computes the loss; `expect: {liger: any}` accepts it"
)
_PACKING_STATES = ("off", "on", "isolated", "leaking")

Citable = Event | ProbeStep | ExitRecord | LogLine


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a point.

    `proved` is False if the evidence settles nothing for what is expected. An `unwanted` state must
    not pass even if nothing is expected. `reason` and `help` are for a point that is not as
    expected. `synonym` is the stage file's other word for the same state.
    """

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


def find_probe_messages(
    evidence: Evidence, start: str | re.Pattern[str] = ""
) -> tuple[Signal, ...]:
    """The lines of a log in which the probe reports a broken contract, by their beginning."""
    lines = find_final_signals(evidence, "violation") + evidence.signals("warned")
    return tuple(line for line in lines if re.match(start, line.fields["message"]))


@dataclass(frozen=True, slots=True)
class _LigerCalls:
    """The calls of Liger's operations, by rank, of every rank that made a step."""

    by_rank: Mapping[int, Mapping[str, int]]

    def operations(self) -> list[str]:
        names = dict.fromkeys(OPERATIONS)
        for counts in self.by_rank.values():
            names.update(dict.fromkeys(counts))
        return list(names)

    def of(self, operation: str) -> dict[str, int]:
        return {str(rank): counts.get(operation, 0) for rank, counts in self.by_rank.items()}

    def idle_ranks(self) -> list[int]:
        return [rank for rank, counts in self.by_rank.items() if not any(counts.values())]


def observe_liger(evidence: Evidence, expected: str | None) -> Observation:
    """Whether Liger's kernels were called; by a log alone, whether they were announced."""
    by_rank = {}
    for record in evidence.records:
        if record.steps:
            by_rank[record.rank] = _count_liger_calls(record)
    if not by_rank:
        return _observe_liger_in_log(evidence, expected)
    return _observe_liger_calls(evidence, expected, _LigerCalls(by_rank))


def _count_liger_calls(record: RankRecord) -> dict[str, int]:
    event = record.last("liger")
    if event is None:
        return {}
    counts = {}
    for operation, value in as_mapping(event.fields.get("calls")).items():
        number = keep_finite(value)
        if number is not None and number > 0:
            counts[str(operation)] = int(number)
    return counts


def _observe_liger_calls(
    evidence: Evidence, expected: str | None, calls: _LigerCalls
) -> Observation:
    missing = evidence.missing_ranks(calls.by_rank)
    detail: dict[str, object] = {name: calls.of(name) for name in calls.operations()}
    detail |= missing
    cites = evidence.last_events("liger")
    idle = calls.idle_ranks()
    if idle:
        return _observe_idle_liger(
            evidence, expected, idle, replace(UNKNOWN, cites=cites, detail=detail)
        )
    uncalled = _find_uncalled_losses(evidence, calls)
    if uncalled and expected == "engaged":
        names = ", ".join(uncalled)
        return Observation(
            "not_engaged",
            cites=(*cites, *evidence.events("liger_patch")),
            detail={**detail, "uncalled": uncalled},
            reason=f"`{names}` was patched in but never called in {evidence.last_step} steps: "
            "the full logits are computed",
            help=_UNCALLED_HELP,
        )
    reason = None
    if expected == "off":
        called = []
        for name in calls.operations():
            if any(calls.of(name).values()):
                called.append(name)
        reason = f"Liger's kernels were called: {', '.join(called)}"
    return Observation(
        "engaged",
        proved=not missing or expected == "off",
        cites=cites,
        detail=detail,
        reason=reason,
    )


def _find_uncalled_losses(evidence: Evidence, calls: _LigerCalls) -> dict[str, dict[str, int]]:
    """The fused losses that Liger patched in, and that some rank never called.

    They save the memory of the logits, and the other kernels run without them. Which of the other
    kernels a model has, only Liger knows.
    """
    uncalled = {}
    for operation in FUSED:
        counts = calls.of(operation)
        if not all(counts.values()) and _is_patched(evidence, operation):
            uncalled[operation] = counts
    return uncalled


def _is_patched(evidence: Evidence, operation: str) -> bool:
    for event in evidence.events("liger_patch"):
        if as_mapping(event.fields.get("kwargs")).get(operation) is True:
            return True
    return False


def _observe_idle_liger(
    evidence: Evidence, expected: str | None, idle: Sequence[int], observation: Observation
) -> Observation:
    """What is to be said of ranks that called no kernel; `observation` has cites and detail."""
    ranks = 0
    steps = []
    for record in evidence.records:
        if record.steps:
            ranks += 1
        if record.rank in idle:
            steps.append(record.steps[-1])
    detail = dict(observation.detail)
    cites = (*observation.cites, *steps)
    is_requested = evidence.arguments.get("use_liger_kernel") == "True"
    where = ""
    if len(idle) < ranks:
        detail["idle_ranks"] = list(idle)
        where = f" on rank {', '.join(map(str, idle))}"
    elif expected != "engaged" and not is_requested:
        # a rank without a record may have called them
        proved = "missing_ranks" not in detail
        return Observation("off", proved=proved, cites=cites, detail=detail)
    if evidence.events("liger_patch"):
        patched = "though its patches were applied"
        help = "the model class that trains is not the one that was patched"
    else:
        patched = "and no patch was applied"
        help = "check that liger-kernel is installed (`launch doctor`) and supports the model type"
    reason = f"no Liger kernel was called{where} in {evidence.last_step} steps, {patched}"
    return Observation("not_engaged", cites=cites, detail=detail, reason=reason, help=help)


def _observe_liger_in_log(evidence: Evidence, expected: str | None) -> Observation:
    """By announcements, which can rule Liger out but never prove that it runs."""
    is_off = evidence.arguments.get("use_liger_kernel") == "False"
    applied: tuple[Signal, ...] = ()
    attempted: tuple[Signal, ...] = ()
    refused: tuple[Signal, ...] = ()
    if not is_off:
        # with Liger off, only rows of the data speak of it
        applied = evidence.signals("liger_applied")
        attempted = evidence.signals("liger_attempted")
        refused = evidence.signals("liger_unsupported")
    patches = evidence.events("liger_patch")
    if applied or patches:
        detail = {}
        if applied and applied[0].fields.get("kwargs") is not None:
            detail["kwargs"] = applied[0].fields["kwargs"]
        return Observation(
            "applied",
            proved=expected != "engaged",
            cites=(*patches, *applied),
            detail=detail,
            reason=_LIGER_LOGGED.format("that patches were applied"),
        )
    if refused:
        cites = attempted + refused
        return Observation("not_engaged", cites=cites, reason=refused[0].text)
    if attempted:
        reason = _LIGER_LOGGED.format("that it is tried")
        proved = expected == "off"
        return Observation("attempted", proved=proved, cites=attempted, reason=reason)
    return _observe_unannounced_liger(evidence, expected, is_off=is_off)


def _observe_unannounced_liger(
    evidence: Evidence, expected: str | None, *, is_off: bool
) -> Observation:
    """What the absence of the announcement right before training proves.

    No attempt was made if the arguments or the script rule it out (use_qlora wins over
    use_liger_kernel, and dpo.py does not read it), or if the source is known to announce it in
    these words.
    """
    arguments = evidence.arguments
    is_dpo = bool(evidence.signals("progress"))
    has_begun = bool(arguments and evidence.signals("total_steps", "progress"))
    is_ruled_out = is_dpo or arguments.get("use_qlora") == "True"
    is_proved = has_begun and (is_ruled_out or evidence.pinned is True)
    cites: Sequence[Citable] = ()
    if evidence.log is not None:
        cites = evidence.log.argument("use_liger_kernel")
    reason = None
    if expected == "engaged":
        reason = "the log shows no attempt to apply it"
    return Observation(
        "off" if is_proved or is_off else "unknown",
        proved=is_proved or (is_off and expected == "off"),
        cites=cites or evidence.signals("liger_asked"),
        reason=reason,
    )


def observe_packing(evidence: Evidence, expected: str | None) -> Observation:
    """Whether rows held several samples, and whether these could see each other."""
    observation = _observe_packing_by_rank(evidence, expected)
    if observation is None:
        observation = _observe_packing_in_log(evidence, expected)
    state = observation.state
    if state == "off" and expected in ("isolated", "on"):
        ranks = as_mapping(observation.detail.get("ranks"))
        idle = ", ".join(rank for rank, rank_state in ranks.items() if rank_state == "off")
        where = ""
        if idle:
            where = f" of rank {idle}"
        reason = f"no batch{where} held two samples in one row"
        return replace(observation, reason=reason, help=_NOT_PACKED_HELP)
    if state in ("on", "isolated") and expected == "off":
        help = "write `packing: false`, or `expect: {packing: isolated}`"
        return replace(observation, reason="several samples share one row", help=help)
    is_explained = observation.reason or "missing_ranks" in observation.detail
    if state == "on" and expected == "isolated" and not is_explained:
        why = "cannot be shown by a log alone"
        if evidence.probe:
            why = "was not tested"
        return replace(observation, reason=f"whether packed samples see each other {why}")
    return observation


def _observe_packing_in_log(evidence: Evidence, expected: str | None) -> Observation:
    announced = evidence.signals("packing")
    argument: tuple[LogLine, ...] = ()
    if evidence.log is not None:
        argument = evidence.log.argument("packing")
    is_on = evidence.arguments.get("packing") == "True" and not evidence.packs_nothing
    if announced or is_on:
        cites = (*announced, *argument)
        return Observation("on", proved=expected != "isolated", cites=cites)
    if argument:
        return Observation("off", cites=argument)
    return UNKNOWN


def _observe_packing_by_rank(evidence: Evidence, expected: str | None) -> Observation | None:
    """The gravest state that a rank saw; None if no rank looked at a batch."""
    by_rank = {}
    for record in evidence.records:
        event = _find_packing_event(record)
        if event is not None:
            by_rank[record.rank] = event
    if not by_rank:
        return None
    states = {str(rank): str(event.text("state")) for rank, event in by_rank.items()}
    is_packed = expected in ("isolated", "on")
    state = _choose_gravest_packing(states.values(), is_packed=is_packed)
    cites = select_state(by_rank.values(), state)
    missing = evidence.missing_ranks(by_rank)
    detail = _select_fields(cites[0]) | missing
    if len(set(states.values())) > 1:
        detail["ranks"] = states
    stand_in = _find_stand_in(evidence, "documents")
    if stand_in is not None:
        detail["stand_in"] = stand_in
    for event in evidence.events("half_wasted")[:1]:
        # packed rows are mostly empty, and another batch would fill them
        detail["wasted"] = event.text("message")
    # one rank can disprove what was requested; proving it takes all of them
    is_disproved = state == "leaking" or (state == "off") == is_packed
    # `on` neither proves nor disproves isolation
    is_open = bool(missing) or (state == "on" and expected == "isolated")
    reason = None
    help = None
    if state == "leaking":
        help = _LEAKING_HELP
    elif state == "on":
        untested = find_first_reason(evidence.events("packing_isolation"))
        if untested:
            reason = f"isolation was not tested: {untested}"
    return Observation(
        state,
        proved=is_disproved or not is_open,
        unwanted=state == "leaking",
        cites=cites,
        detail=detail,
        reason=reason,
        help=help,
    )


def _find_stand_in(evidence: Evidence, feature: str) -> str | None:
    """What the probe supplied for a feature that a CPU lacks."""
    for event in evidence.events("supplied"):
        if event.text("what") == feature:
            return event.text("why")
    return None


def _find_packing_event(record: RankRecord) -> Event | None:
    """The event with the gravest state of a rank."""
    by_state = {event.text("state"): event for event in record.all("packing_isolation", "packing")}
    for state in reversed(_PACKING_STATES):
        if state in by_state:
            return by_state[state]
    return None


def _choose_gravest_packing(states: Collection[str], *, is_packed: bool) -> str:
    order = ("leaking", "on", "isolated", "off")
    if is_packed:
        order = ("leaking", "off", "on", "isolated")
    return min(states, key=order.index)


def find_first_reason(events: Iterable[Event]) -> str | None:
    for event in events:
        reason = event.text("reason")
        if reason:
            return reason
    return None


def observe_attention(evidence: Evidence, expected: str | None) -> Observation:
    """The attention of the loaded model on every rank; by a log alone, the announced one."""
    events = [event for event in evidence.events("model") if event.text("attention")]
    if not events:
        return _observe_attention_in_log(evidence, expected)
    shown = events[0]
    differing = []
    if expected is not None:
        accepted = (expected, ATTENTION.get(expected, expected))
        differing = [event for event in events if event.text("attention") not in accepted]
    if differing:
        shown = differing[0]
    state = str(shown.text("attention"))
    detail = evidence.missing_ranks(list_ranks(events))
    is_proved = bool(differing) or not detail
    by_rank = {str(event.rank): event.text("attention") for event in events}
    where = ""
    if len({event.text("attention") for event in events}) > 1:
        detail["ranks"] = by_rank
        ranks = [f"rank {rank} {name}" for rank, name in by_rank.items()]
        where = f" ({', '.join(ranks)})"
    observation = Observation(
        state,
        proved=is_proved,
        synonym=None if differing else expected,
        cites=[event for event in events if event.text("attention") == state],
        detail=detail,
    )
    if not is_proved:
        return observation
    return replace(
        observation,
        reason=f"the loaded model has {state}{where}",
        help=f"check that `{expected}` is installed (`launch doctor`), and what requests another",
    )


def observe_positions(evidence: Evidence, _expected: str | None) -> Observation:
    """Whether the model turns positions by the frequencies of its config (`probe.Rotary`)."""
    events = evidence.last_events("rotary")
    if not events:
        return UNKNOWN
    detail: dict[str, object] = evidence.missing_ranks(list_ranks(events))
    missing = bool(detail)
    detail["largest_error"] = max(event.number("largest_error") or 0.0 for event in events)
    states = {event.text("state") for event in events}
    if "rounded" in states:
        return Observation(
            "rounded",
            unwanted=True,
            cites=events,
            detail=detail,
            reason="the rotary frequencies of the trained model are not those of its config",
            help="train with ZeRO-2 or FSDP: ZeRO-3 loads every float tensor in bfloat16",
        )
    state = "exact"
    if "restored" in states:
        state = "restored"
    return Observation(state, proved=not missing, cites=events, detail=detail)


def _observe_attention_in_log(evidence: Evidence, expected: str | None) -> Observation:
    detected = evidence.signals("attention")[-1:]
    # DPO's own argument wins
    word = evidence.arguments.get("attn_implementation", "").strip("'")
    if not word and detected:
        word = detected[0].fields["value"]
    if word in ("", "None"):
        return UNKNOWN
    state = ATTENTION.get(word, word)
    is_disproved = expected is not None and ATTENTION.get(expected, expected) != state
    return Observation(
        state,
        proved=is_disproved,
        cites=detected,
        detail={"announced": word},
        reason=f"the log announces {word}; only the probe can prove it",
    )


def observe_batch(evidence: Evidence, _expected: str | None) -> Observation:
    """Whether the processes and the rows of each step were as planned."""
    probe = evidence.probe
    manifest = evidence.manifest
    world = manifest.processes
    if probe is None or world is None:
        return UNKNOWN
    starts = evidence.last_events("start")
    detail: dict[str, object] = {"world": probe.world, "planned_world": world}
    different = Observation("different", unwanted=True, detail=detail, help=_BATCH_HELP)
    others = [start for start in starts if start.number("world") not in (None, world)]
    if others:
        reason = f"the world size was {probe.world}, {world} was planned"
        return replace(different, cites=others, reason=reason)
    planned = _read_planned_batch(manifest)
    # of data with fewer rows than a step, every step is an epoch's last
    rows = manifest.plan.rows
    has_few_rows = False
    if rows is not None and manifest.global_batch is not None:
        has_few_rows = rows < manifest.global_batch
    as_planned = []
    for start in starts:
        steps = probe.ranks[start.rank].steps
        odd = [planned.differs(_read_batch_size(step), has_few_rows=has_few_rows) for step in steps]
        # an epoch's last step may be smaller, but not two steps in a row
        for number in range(1, len(steps)):
            if odd[number - 1] and odd[number]:
                step = steps[number]
                sizes = f"step {step.step} of rank {step.rank}: {_read_batch_size(step).describe()}"
                reason = f"{sizes}; planned: {planned.describe()}"
                return replace(different, cites=(step,), reason=reason)
        if start.number("world") and (manifest.steps == 0 or not all(odd)):
            as_planned.append(start.rank)
    missing = [rank for rank in range(world) if rank not in as_planned]
    if missing:
        detail["missing_ranks"] = missing
    state = "planned" if as_planned else "unknown"
    return Observation(state, proved=not missing, cites=starts, detail=detail)


@dataclass(frozen=True, slots=True)
class _BatchSize:
    """An optimizer step of one rank, as its probe counts it; None where that is unknown."""

    micro_batches: float | None
    rows: float | None

    def differs(self, actual: "_BatchSize", *, has_few_rows: bool) -> bool:
        """Whether a step differs from this plan; with few rows it may be smaller."""
        pairs = ((self.micro_batches, actual.micro_batches), (self.rows, actual.rows))
        for planned, size in pairs:
            # what a record lacks is no difference
            if not planned or not size:
                continue
            if size > planned or (size < planned and not has_few_rows):
                return True
        return False

    def describe(self) -> str:
        parts = []
        if self.micro_batches:
            parts.append(f"micro-batches {self.micro_batches:.0f}")
        if self.rows:
            parts.append(f"rows {self.rows:.0f}")
        return ", ".join(parts)


def _read_batch_size(step: ProbeStep) -> _BatchSize:
    return _BatchSize(step.micro_batches, step.rows)


def _read_planned_batch(manifest: Manifest) -> _BatchSize:
    backend = BACKENDS.get(str(manifest.backend))
    entry = None
    if backend is not None:
        entry = backend.STAGES.get(str(manifest.script or manifest.stage))
    packing = None
    split_name = "sequence_parallel_size"
    if entry is not None:
        split_name = entry.names.shared
        if entry.packing == "always" or manifest.argument("packing"):
            packing = entry.packing
    micro_batches = manifest.accumulation
    rows = manifest.per_device
    split = manifest.argument(split_name)
    if packing in ("paired", "one-row") or (isinstance(split, int) and split > 1):
        # dpo.py fills its micro-batches anew
        # (data_loader.py::HFDataLoader._reshard[usable_size = total_batches #1]);
        # ranks that share rows take turns with them
        return _BatchSize(None, None)
    if packing in ("refilled", "always") or not micro_batches or not rows:
        # how many rows a packed row holds is unknown
        return _BatchSize(micro_batches, None)
    if str(manifest.stage) in PAIRED:
        rows *= 2
    return _BatchSize(micro_batches, micro_batches * rows)


def observe_dataset_cache(evidence: Evidence, expected: str | None) -> Observation:
    observation = _observe_cache_by_rank(evidence, "dataset_cache")
    if observation is None:
        misses = evidence.signals("dataset_missed", "dataset_saved")
        hits = evidence.signals("dataset_found")
        is_headless = evidence.log is not None and evidence.log.headless
        observation = UNKNOWN
        if misses or not is_headless:
            observation = _observe_cache_in_log(evidence, misses, hits)
    return _add_cache_reason(observation, expected)


def observe_reference_cache(evidence: Evidence, expected: str | None) -> Observation:
    observation = _observe_cache_by_rank(evidence, "reference_cache")
    if observation is None:
        observation = _observe_reference_cache_in_log(evidence)
    if observation.state == "stale":
        return replace(observation, unwanted=True, help=_STALE_HELP)
    return _add_cache_reason(observation, expected)


def _observe_reference_cache_in_log(evidence: Evidence) -> Observation:
    messages = find_probe_messages(evidence, _STALE)
    if messages:
        return Observation("stale", cites=messages)
    misses = evidence.signals("reference_missed")
    hits = evidence.signals("reference_hit")
    observation = _observe_cache_in_log(evidence, misses, hits)
    first = find_first_plain_loss(evidence.log)
    if observation.state != "hit" or first is None:
        return observation
    if abs(first.loss - math.log(2)) <= FIRST_LOSS:
        return observation
    # dropout moves the first loss too: the log shows a doubt, and no proof
    return Observation(
        "stale",
        proved=False,
        cites=(*observation.cites, first),
        detail={**observation.detail, "first_loss": first.loss},
    )


def find_first_plain_loss(log: Log | None) -> StepLine | None:
    """The first step of a DPO whose loss is ln 2 if the policy still is its own reference."""
    if log is None or not log.steps or log.all("resumed"):
        return None
    first = log.steps[0]
    is_plain = re.search(r"\bdpo(?:_norm)?\b", log.arguments.get("loss_type", ""))
    has_extra_loss = log.arguments.get("load_balancing_loss") != "False"
    if first.step != 1 or not is_plain or has_extra_loss:
        return None
    return first


def _observe_cache_in_log(
    evidence: Evidence, misses: Sequence[Signal], hits: Sequence[Signal]
) -> Observation:
    """A miss outweighs all hits: one rank fills a cache and the others find it.

    A hit proves nothing if the source may report a miss in other words.
    """
    if not misses and (not hits or evidence.pinned is False):
        return UNKNOWN
    detail = {}
    for signal in (*hits, *misses):
        if "path" in signal.fields:
            detail["path"] = signal.fields["path"]
            break
    if not misses:
        return Observation("hit", cites=hits, detail=detail)
    cites = [misses[0]]
    if len(misses) > 1:
        cites.append(misses[-1])
    return Observation("miss", cites=cites, detail=detail)


def _observe_cache_by_rank(evidence: Evidence, name: str) -> Observation | None:
    for state in ("stale", "miss", "hit"):
        events = select_state(evidence.events(name), state)
        if not events:
            continue
        missing: dict[str, object] = {}
        if state == "hit" and evidence.probe is not None:
            # a rank without a record may be the one that filled the cache
            missing = evidence.missing_ranks(evidence.probe.ranks)
        detail = _select_fields(events[0]) | missing
        return Observation(state, proved=not missing, cites=events, detail=detail)
    return None


def _select_fields(event: Event) -> dict[str, object]:
    return {key: value for key, value in event.fields.items() if key not in ("t", "state")}


def _add_cache_reason(observation: Observation, expected: str | None) -> Observation:
    path = observation.detail.get("path")
    where = ""
    if path:
        where = f": {path}"
    if expected == "hit" and observation.state == "miss":
        help = "`launch cache why RUN` says what differs from the nearest one"
        reason = f"not found, so it was computed{where}"
        return replace(observation, reason=reason, help=help)
    if expected == "miss" and observation.state == "hit":
        return replace(observation, reason=f"it was found{where}")
    return observation
