"""What a Python traceback in a log raised in the end: a `Raised`.

Ranks write over each other, so the lines of every rank's prefix (`[rank3]: `) are read by
themselves; a time stamp is no part of the prefix. Rich draws a box around the frames.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import NamedTuple

from launcher.lazy_dataclass import dataclass
from launcher.verdict.logs.segments import SEGMENT_BYTES, decode_text

FIRST_LINE = b"Traceback (most recent call last)"
MOST_LINES = 2_000
_FRAME_LINE = rb'(?P<frame>[^\r\n]{0,100}?  File "[^"\r\n]+", line \d+, in [^\r\n]*)'
FRAMES_FIRST = re.compile(rb"(?:[^\r\n]{0,100}?    [^\r\n]{0,1000}+\r?\n){0,3}?" + _FRAME_LINE)
"""A log that begins within a traceback, such as the output of `tail`."""
BEFORE_BYTES = 1_000
"""Bytes of the log before a traceback, which say what it belongs to."""

# What stands before the lines of many processes: a time, torchrun, srun, SkyPilot. One space ends
# it: further spaces are the line's own.
_STAMP = rb"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?: |$)"
_TAG = (
    rb"\[rank\d+\]: ?|\[default\d+\]:|\[\d{1,4}\]: ?|\d{1,4}:(?: |$)|[\w.-]{1,64} *\|(?: |$)"
    rb"|\([\w.-]+,? (?:rank=\d+, )?pid=\d+(?:, ip=[\w.:]+)?\)(?: |$)"
)
_PREFIX = re.compile(rb"(?:%s|%s)+" % (_STAMP, _TAG))
_STAMPS = re.compile(_STAMP)
_RANK = re.compile(rb"(?:^|[\s:])(?:\[(?:rank|default|)(\d+)\]|(\d{1,4})):")
# What follows the words of the first line: Python's colon, or Rich's box.
_OPENING = re.compile(rb"Traceback \(most recent call last\)(?::| (?:\xe2\x94\x80|-){3})")
_FRAME = re.compile(
    rb'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<call>\w+))?'
    rb"|(?P<file_>[^\s:]+):(?P<line_>\d+) in (?P<call_>\w*)"
)
_EVALUATION_CALLS = (
    b"evaluate",
    b"_evaluate",
    b"evaluation_loop",
    b"evaluate_model",
    b"prediction_loop",
    b"prediction_step",
    b"nested_concat",
    b"compute_metrics",
)
_SAVING_CALLS = (
    b"save_model",
    b"_save_checkpoint",
    b"save_checkpoint",
    b"save_pretrained",
    b"save_state",
    b"_save",
    b"save_16bit_model",
    b"_zero3_consolidated_16bit_state_dict",
    b"get_state_dict",
    b"save_with_accelerate",
    b"_save_optimizer_and_scheduler",
    b"save_fsdp_model",
    b"save_fsdp_optimizer",
    b"save_16bit_state",
)
_REFERENCE_CALLS = (
    b"compute_ref_log_probs",
    b"_precompute_ref_logps",
    b"build_reference_logprobs_cache",
)
_LOADING_CALLS = (
    b"from_pretrained",
    b"create_model_from_path",
    b"load_pretrained_model",
    b"_load_pretrained_model",
)
_PHASES: Mapping[bytes, str] = {
    **dict.fromkeys(_EVALUATION_CALLS, "evaluation"),
    **dict.fromkeys(_SAVING_CALLS, "saving"),
    **dict.fromkeys(_REFERENCE_CALLS, "reference"),
    **dict.fromkeys(_LOADING_CALLS, "loading"),
}
"""What training is busy with, by the functions that its trainers call for it."""
_IN_BOX = re.compile(rb"(?:\xe2\x94\x82|\|) (?P<words>.*?)\s*(?:\xe2\x94\x82|\|)?$")
_RAISED = re.compile(
    rb"(?P<type>(?:\w+\.)+(?:[A-Z]\w*|\w*error|timeout)"
    rb"|\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|StopIteration|Fault))"
    rb"(?::(?P<message>.*))?$"
)
# The line before a traceback that ends no process.
_HARMLESS = re.compile(
    rb"Exception ignored |--- Logging error ---|Exception in thread|^future: <Task finished "
)
_CHAINED = re.compile(rb"During handling of the above|The above exception was the direct cause")
# What a worker raised, printed behind what its parent raised because of it.
_OF_WORKER = b"Original " + FIRST_LINE + b":"
_LINE_BREAK = re.compile(rb"[\r\n]")


class Raised(NamedTuple):
    """The last line of a traceback, with its fields.

    `type`, `message` and `rank` are those of the exception; `at` is the innermost frame's
    `file:line`. `phase` is what a frame was called for: evaluation, saving, reference, loading, or
    nothing of these. `chained` says that it belongs to the exception before it: raised while that
    was handled, or what a worker process had raised at first.
    """

    line: int
    segment: bytes
    fields: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class _OpenTraceback:
    """A traceback whose last line is not read yet."""

    chained: bool = False
    harmless: bool = False
    at: str = ""
    phase: str = ""
    headless: bool = False
    wrapped: bytes = b""

    def unwrap(self, body: bytes) -> bytes:
        """The line inside Rich's box; a long path continues in the next line of the box."""
        box = _IN_BOX.match(body)
        if box is None:
            return body
        body = self.wrapped + box["words"]
        is_complete = not box["words"] or b" " in body or body[:1].isdigit()
        self.wrapped = b"" if is_complete else body
        return body

    def add_frame(self, frame: re.Match[bytes]) -> None:
        file = frame["file"] or frame["file_"]
        line = frame["line"] or frame["line_"]
        call = frame["call"] or frame["call_"] or b""
        self.at = f"{decode_text(file)}:{decode_text(line)}"
        self.phase = _PHASES.get(call, self.phase)

    def fields(self, exception: re.Match[bytes], prefix: bytes) -> dict[str, str]:
        rank = _RANK.search(prefix)
        return {
            "type": decode_text(exception["type"]),
            "message": decode_text(exception["message"] or b""),
            "at": self.at,
            "phase": self.phase,
            "rank": decode_text(rank[1] or rank[2]) if rank else "",
            "chained": "yes" if self.chained else "",
        }


@dataclass(slots=True, kw_only=True)
class Tracebacks:
    """The open tracebacks by their rank's prefix, and each rank's last line."""

    open: dict[bytes, _OpenTraceback] = field(default_factory=dict)
    last_lines: dict[bytes, bytes] = field(default_factory=dict)
    lines_read: int = 0

    def follow(self, block: bytes, start: int, limit: int, line: int) -> tuple[int, list[Raised]]:
        """Read on from `start`, in line `line`, until no traceback is open.

        Gives the position reached and what was raised on the way. If a frame stands at `start`, a
        traceback without its first line is open. From `limit` on no other one is opened.
        """
        raised: list[Raised] = []
        for segment in _LINE_BREAK.split(block[max(0, start - BEFORE_BYTES) : start]):
            self._remember_line(segment.rstrip())
        frame = FRAMES_FIRST.match(block, start)
        if frame is not None:
            prefix, _ = self._remember_line(frame["frame"])
            self.open[prefix] = _OpenTraceback(headless=True)
        while start < len(block):
            stop = block.find(b"\n", start)
            if stop < 0:
                stop = len(block)
            content = block[start : min(stop, start + SEGMENT_BYTES)]
            for segment in content.split(b"\r"):
                raised += self._read_segment(segment.rstrip(), line, may_open=start < limit)
            start = stop + 1
            line += 1
            self.lines_read += 1
            if self.lines_read > MOST_LINES or not self.open:
                self.open.clear()
                break
        return start, raised

    def _remember_line(self, segment: bytes) -> tuple[bytes, bytes]:
        """Keep a line as the last one of its rank; gives its prefix and the rest."""
        prefix = b""
        match = _PREFIX.match(segment)
        if match is not None:
            prefix = match[0]
        body = segment[len(prefix) :]
        prefix = _STAMPS.sub(b"", prefix).strip()
        if body and not _is_opening(body):
            self.last_lines[prefix] = body
        return prefix, body

    def _read_segment(self, segment: bytes, line: int, *, may_open: bool) -> Iterator[Raised]:
        prefix, body = self._remember_line(segment)
        if _is_opening(body):
            if may_open:
                self._open_traceback(prefix, body)
            else:
                self.open.pop(prefix, None)
            return
        traceback = self.open.get(prefix)
        if traceback is None:
            return
        body = traceback.unwrap(body)
        frame = _FRAME.match(body)
        if frame is not None:
            traceback.add_frame(frame)
            return
        exception = _RAISED.match(body)
        if exception is not None:
            del self.open[prefix]
            if not traceback.harmless:
                yield Raised(line, segment, traceback.fields(exception, prefix))
        elif traceback.headless and body and not body.startswith(b"    "):
            # not even the frame may be one: stacks are also shown otherwise
            del self.open[prefix]

    def _open_traceback(self, prefix: bytes, body: bytes) -> None:
        last_line = self.last_lines.get(prefix, b"")
        self.open[prefix] = _OpenTraceback(
            chained=_OF_WORKER in body or _CHAINED.search(last_line) is not None,
            harmless=_HARMLESS.search(last_line) is not None,
        )
        self.lines_read = 0


def _is_opening(body: bytes) -> bool:
    return FIRST_LINE in body and _OPENING.search(body) is not None
