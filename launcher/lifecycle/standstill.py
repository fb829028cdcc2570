"""A training process that gives no sign of life: stopped, or stuck where no thread of it runs any more.

The probe's watchdog notices what hangs inside a process that still runs, and touches its rank's record every few
seconds. Here that is looked at from outside. What is found is added to the record as the watchdog would have done it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.machine import isolation, tools
from launcher.runs import attempt as attempts
from launcher.runs import events
from launcher.runs.runner import Living

EVERY_S = 5.0
SHORTEST_S = 15.0  # of no sign of life: the watchdog gives one every 5 s at the latest
_STATES = {"T": "stopped", "t": "traced", "D": "waiting for a disk or a network", "Z": "ended"}


@dataclass(slots=True)
class _Sign:
    """The last sign of life of a rank: when its record was written to, and since when that is all."""

    written: float
    since: float
    noted: bool = False


@dataclass(slots=True)
class Standstill:
    """Looks after the ranks of one attempt on this machine; `folder` holds their records."""

    folder: Path
    limit_s: float
    stops: bool
    signs: dict[int, _Sign] = field(default_factory=dict)
    looked: float = 0.0

    def look(self, living: Living) -> bool:
        """Note which processes of the run stand still; returns whether the run is to be stopped for it."""
        now = time.monotonic()
        if now - self.looked < EVERY_S:
            return False
        self.looked = now
        stands = False
        for rank, pid in _ranks_of(living()).items():
            stands = self._stands_still(rank, pid, now) or stands
        return stands and self.stops

    def _stands_still(self, rank: int, pid: int, now: float) -> bool:
        record = self.folder / f"rank-{rank}.jsonl"
        try:
            written = record.stat().st_mtime
        except OSError:
            return False
        sign = self.signs.get(rank)
        if sign is None or sign.written != written:
            self.signs[rank] = _Sign(written=written, since=now)
            return False
        waited = now - sign.since
        if waited < self.limit_s:
            return False
        if not sign.noted:
            sign.noted = True
            with contextlib.suppress(OSError):
                self._tell(record, rank, pid, waited)
                sign.written = record.stat().st_mtime
        return True

    def _tell(self, record: Path, rank: int, pid: int, waited: float) -> None:
        stacks = self.folder / f"rank-{rank}.stacks.txt"
        steps = [event["step"] for event in events.read_events(record) if event["event"] == "step"]
        step = steps[-1] if steps else 0
        state = _state_of(pid)
        message = f"nothing moved for {waited:.0f} s after step {step}: rank {rank} gives no sign of life, "
        message += f"its process {pid} is {state}; stacks in {stacks}"
        with stacks.open("a", encoding="utf-8") as stream:
            stream.write(f"# step {step}: no sign of life for {waited:.0f} s, process {pid} is {state}\n")
            stream.write(_stacks_of(pid))
        event = {
            "t": round(time.time(), 3),
            "event": "hang",
            "step": step,
            "waited": round(waited, 1),
            "limit": self.limit_s,
            "stacks": str(stacks),
            "message": message,
            "stopped": self.stops,
        }
        with record.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(event) + "\n")


def standstill_of(env: Mapping[str, str]) -> Standstill | None:
    """What looks after the training that a command's own environment `env` starts; None where it has no probe."""
    settings = attempts.probe_settings(env)
    folder = settings.text("out")
    if folder is None:
        return None
    seconds = settings.figure("hang_seconds") or 300.0
    return Standstill(Path(folder), limit_s=max(SHORTEST_S, seconds), stops=settings.text("on_hang") == "stop")


def _ranks_of(pids: Iterable[int]) -> dict[int, int]:
    """Rank -> process of those that run the probe; a process that a rank has started is none."""
    ranks: dict[int, int] = {}
    for pid in sorted(pids):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        # accelerate and torchrun name it among their own words
        script = next((index for index, word in enumerate(words) if word.endswith(b"probe/run.py")), None)
        if script is None or any(word.startswith((b"accelerate.", b"torch.")) for word in words[:script]):
            continue
        rank = next((one[5:] for one in variables if one.startswith(b"RANK=")), b"0")
        if rank.isdigit():
            ranks.setdefault(int(rank), pid)
    return ranks


def _state_of(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return _STATES.get(letter, f"in state {letter}")
    return "gone"


def _stacks_of(pid: int) -> str:
    """The Python stacks of a process by py-spy, where that is installed and allowed; else where its kernel part is."""
    if isolation.find_program("py-spy", os.environ) is not None:
        with contextlib.suppress(OSError, tools.NoAnswer):
            answer = tools.run_tool(["py-spy", "dump", "--nonblocking", "--pid", str(pid)])
            if answer.returncode == 0:
                return answer.out.decode(errors="replace")
    where = "unknown"
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text().strip() or where
    return f"no py-spy to read its stacks with; in the kernel it is in {where}\n"
