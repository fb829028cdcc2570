"""Lines of a Python traceback -> what was raised in the end: a `Raised`. Ranks write over each other, so every rank's
prefix (`[rank3]: `) is followed on its own; a time stamp in it is no part of who speaks. Rich draws a box around the
frames."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from launcher.verdict.logs.segments import SEGMENT_BYTES, text

FIRST_LINE = b"Traceback (most recent call last)"
MOST_LINES = 2_000
_FRAME_LINE = rb'(?P<frame>[^\r\n]{0,100}?  File "[^"\r\n]+", line \d+, in [^\r\n]*)'
FRAMES_FIRST = re.compile(rb"(?:[^\r\n]{0,100}?    [^\r\n]{0,1000}+\r?\n){0,3}?" + _FRAME_LINE)
"""A log that begins within a traceback, such as what `tail` shows."""
BEFORE_BYTES = 1_000  # of the log before a traceback, which say what it belongs to

# What stands before the lines of many processes: a time, torchrun, srun, SkyPilot. One space ends it: those
# that follow are the line's own.
_STAMP = rb"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?: |$)"
_TAG = (
    rb"\[rank\d+\]: ?|\[default\d+\]:|\[\d{1,4}\]: ?|\d{1,4}:(?: |$)|[\w.-]{1,64} *\|(?: |$)"
    rb"|\([\w.-]+,? (?:rank=\d+, )?pid=\d+(?:, ip=[\w.:]+)?\)(?: |$)"
)
_PREFIX = re.compile(rb"(?:%s|%s)+" % (_STAMP, _TAG))
_STAMPS = re.compile(_STAMP)
_RANK = re.compile(rb"(?:^|[\s:])(?:\[(?:rank|default|)(\d+)\]|(\d{1,4})):")
# What stands around the first line: Python's colon, or Rich's box.
_OPENS = re.compile(rb"Traceback \(most recent call last\)(?::| (?:\xe2\x94\x80|-){3})")
_FRAME = re.compile(
    rb'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<call>\w+))?'
    rb"|(?P<file_>[^\s:]+):(?P<line_>\d+) in (?P<call_>\w*)"
)
# What training was busy with, by the functions that its trainers call for it.
_CALLS: Mapping[str, tuple[bytes, ...]] = {
    "evaluation": (
        *(b"evaluate", b"_evaluate", b"evaluation_loop", b"evaluate_model"),
        *(b"prediction_loop", b"prediction_step", b"nested_concat", b"compute_metrics"),
    ),
    "saving": (
        *(b"save_model", b"_save_checkpoint", b"save_checkpoint", b"save_pretrained", b"save_state", b"_save"),
        *(b"save_16bit_model", b"_zero3_consolidated_16bit_state_dict", b"get_state_dict", b"save_with_accelerate"),
        *(b"_save_optimizer_and_scheduler", b"save_fsdp_model", b"save_fsdp_optimizer", b"save_16bit_state"),
    ),
    "reference": (b"compute_ref_log_probs", b"_precompute_ref_logps", b"build_reference_logprobs_cache"),
    "loading": (b"from_pretrained", b"create_model_from_path", b"load_pretrained_model", b"_load_pretrained_model"),
}
_PHASES = {call: phase for phase, calls in _CALLS.items() for call in calls}
_IN_BOX = re.compile(rb"(?:\xe2\x94\x82|\|) (?P<words>.*?)\s*(?:\xe2\x94\x82|\|)?$")
_RAISED = re.compile(
    rb"(?P<type>(?:\w+\.)+(?:[A-Z]\w*|\w*error|timeout)"
    rb"|\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|StopIteration|Fault))"
    rb"(?::(?P<message>.*))?$"
)
# The line before a traceback that ends no process.
_HARMLESS = re.compile(rb"Exception ignored |--- Logging error ---|Exception in thread|^future: <Task finished ")
_CHAINED = re.compile(rb"During handling of the above|The above exception was the direct cause")
# What a worker raised, printed behind what its parent raised because of it.
_OF_WORKER = b"Original " + FIRST_LINE + b":"


class Raised(NamedTuple):
    """The last line of a traceback. Fields are type, message, rank and `at`, the innermost frame's `file:line`;
    `phase` is what a frame was called for: evaluation, saving, reference, loading, or nothing of these; `chained`
    says that it belongs to the exception before it: raised while that was being handled, or what a worker process had
    raised at first."""

    line: int
    segment: bytes
    fields: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class _Open:
    chained: bool
    harmless: bool
    at: str = ""
    phase: str = ""
    headless: bool = False
    wrapped: bytes = b""


@dataclass(slots=True, kw_only=True)
class Tracebacks:
    """The tracebacks that are open, by their rank's prefix, and each rank's last line."""

    open: dict[bytes, _Open] = field(default_factory=dict)
    last_lines: dict[bytes, bytes] = field(default_factory=dict)
    followed: int = 0

    def follow(self, block: bytes, start: int, limit: int, line: int) -> tuple[int, list[Raised]]:
        """Read on from `start`, in line `line`, until every open traceback says what was raised. Where a frame stands
        at `start`, one whose first line is not there is open. From `limit` on no other is opened. Gives the position
        reached and what was raised on the way."""
        raised: list[Raised] = []
        for segment in re.split(rb"[\r\n]", block[max(0, start - BEFORE_BYTES) : start]):
            self._say(segment.rstrip())
        if frame := FRAMES_FIRST.match(block, start):
            prefix, _ = self._say(frame["frame"])
            self.open[prefix] = _Open(chained=False, harmless=False, headless=True)
        while start < len(block):
            stop = block.find(b"\n", start)
            stop = stop if stop >= 0 else len(block)
            for segment in block[start : min(stop, start + SEGMENT_BYTES)].split(b"\r"):
                raised += self._line(segment.rstrip(), line, start < limit)
            start, line, self.followed = stop + 1, line + 1, self.followed + 1
            if self.followed > MOST_LINES or not self.open:
                self.open.clear()
                break
        return start, raised

    def _say(self, segment: bytes) -> tuple[bytes, bytes]:
        prefix = found[0] if (found := _PREFIX.match(segment)) else b""
        body = segment[len(prefix) :]
        prefix = _STAMPS.sub(b"", prefix).strip()
        if body and not _opens(body):
            self.last_lines[prefix] = body
        return prefix, body

    def _line(self, segment: bytes, line: int, opening: bool) -> list[Raised]:
        before = dict(self.last_lines) if FIRST_LINE in segment else {}
        prefix, body = self._say(segment)
        if _opens(body):
            if not opening:
                self.open.pop(prefix, None)
                return []
            last_line = before.get(prefix, b"")
            chained = _OF_WORKER in body or bool(_CHAINED.search(last_line))
            self.open[prefix] = _Open(chained=chained, harmless=bool(_HARMLESS.search(last_line)))
            self.followed = 0
        elif found := self.open.get(prefix):
            if box := _IN_BOX.match(body):  # a long path goes on in the next line of the box
                body = found.wrapped + box["words"]
                whole = not box["words"] or b" " in body or body[:1].isdigit()
                found.wrapped = b"" if whole else body
            if frame := _FRAME.match(body):
                found.at = f"{text(frame['file'] or frame['file_'])}:{text(frame['line'] or frame['line_'])}"
                found.phase = _PHASES.get(frame["call"] or frame["call_"] or b"", found.phase)
            elif end := _RAISED.match(body):
                del self.open[prefix]
                return [] if found.harmless else [Raised(line, segment, _fields(end, found, prefix))]
            elif found.headless and body and not body.startswith(b"    "):
                del self.open[prefix]  # not even a frame may be one: stacks are shown otherwise too
        return []


def _opens(body: bytes) -> bool:
    return FIRST_LINE in body and bool(_OPENS.search(body))


def _fields(end: re.Match[bytes], found: _Open, prefix: bytes) -> dict[str, str]:
    rank = _RANK.search(prefix)
    return {
        "type": text(end["type"]),
        "message": text(end["message"] or b""),
        "at": found.at,
        "phase": found.phase,
        "rank": text(rank[1] or rank[2]) if rank else "",
        "chained": "yes" if found.chained else "",
    }
