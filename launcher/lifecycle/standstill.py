"""Training processes without a sign of life: stopped, or hung where no thread runs any more.

The probe's watchdog notices hangs in a process that still runs, and touches its rank's record every
few seconds. This looks from outside, and adds what it notices to the record as the watchdog would.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from launcher.lazy_dataclass import dataclass
from launcher.machine import isolation, process, tools
from launcher.runs import attempt as attempts
from launcher.runs import events
from launcher.runs.runner import Living

EVERY_S = 5.0
SHORTEST_S = 15.0  # without a sign of life: the watchdog gives one every 5 s
_DEFAULT_LIMIT_S = 300.0
_STATES = {"T": "stopped", "t": "traced", "D": "waiting for a disk or a network", "Z": "ended"}


@dataclass(slots=True)
class _LastSign:
    """When a rank last wrote to its record, and since when (monotonic) that has not changed."""

    written: float
    since: float
    noted: bool = False


@dataclass(slots=True)
class Standstill:
    """Watches the ranks of one attempt on this machine; `folder` holds their records."""

    folder: Path
    limit_s: float
    stops: bool
    signs: dict[int, _LastSign] = field(default_factory=dict)
    looked: float = 0.0

    def look(self, living: Living) -> bool:
        """Record which processes of the run stand still; whether to stop the run for that."""
        now = time.monotonic()
        if now - self.looked < EVERY_S:
            return False
        self.looked = now
        any_stands_still = False
        for rank, pid in _find_ranks(living()).items():
            if self._stands_still(rank, pid, now):
                any_stands_still = True
        return any_stands_still and self.stops

    def _stands_still(self, rank: int, pid: int, now: float) -> bool:
        record = self.folder / f"rank-{rank}.jsonl"
        try:
            written = record.stat().st_mtime
        except OSError:
            return False
        sign = self.signs.get(rank)
        if sign is None or sign.written != written:
            self.signs[rank] = _LastSign(written=written, since=now)
            return False
        waited_s = now - sign.since
        if waited_s < self.limit_s:
            return False
        if not sign.noted:
            sign.noted = True
            with contextlib.suppress(OSError):
                self._record_standstill(record, rank, pid, waited_s)
                sign.written = record.stat().st_mtime
        return True

    def _record_standstill(self, record: Path, rank: int, pid: int, waited_s: float) -> None:
        stacks = self.folder / f"rank-{rank}.stacks.txt"
        step = _read_last_step(record)
        state = _read_state(pid)
        message = f"nothing moved for {waited_s:.0f} s after step {step}: "
        message += f"rank {rank} gives no sign of life, its process {pid} is {state}; "
        message += f"stacks in {stacks}"
        with stacks.open("a", encoding="utf-8") as stream:
            heading = f"# step {step}: no sign of life for {waited_s:.0f} s, "
            heading += f"process {pid} is {state}\n"
            stream.write(heading)
            stream.write(_read_stacks(pid))
        event = {
            "t": round(time.time(), 3),
            "event": "hang",
            "step": step,
            "waited": round(waited_s, 1),
            "limit": self.limit_s,
            "stacks": str(stacks),
            "message": message,
            "stopped": self.stops,
        }
        with record.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(event) + "\n")


def watch_standstill(env: Mapping[str, str]) -> Standstill | None:
    """The watch over the training that a command with `env` starts; None without a probe."""
    settings = attempts.read_probe_settings(env)
    folder = settings.text("out")
    if folder is None:
        return None
    limit_s = settings.figure("hang_seconds") or _DEFAULT_LIMIT_S
    return Standstill(
        folder=Path(folder),
        limit_s=max(SHORTEST_S, limit_s),
        stops=settings.text("on_hang") == "stop",
    )


def _read_last_step(record: Path) -> int:
    step = 0
    for event in events.read_events(record):
        if event["event"] == "step":
            step = event["step"]
    return step


def _find_ranks(pids: Iterable[int]) -> dict[int, int]:
    """Rank -> process of those that run the probe, without processes that a rank has started."""
    ranks: dict[int, int] = {}
    for pid in sorted(pids):
        if not _runs_probe(process.read_command_line(pid)):
            continue
        rank = process.read_variable(pid, "RANK")
        if rank is None:
            rank = "0"
        if rank.isdecimal():
            ranks.setdefault(int(rank), pid)
    return ranks


def _runs_probe(words: Sequence[str]) -> bool:
    for word in words:
        if word.endswith("probe/run.py"):
            return True
        # accelerate and torchrun name the probe among their own words
        if word.startswith(("accelerate.", "torch.")):
            return False
    return False


def _read_state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return _STATES.get(letter, f"in state {letter}")
    return "gone"


def _read_stacks(pid: int) -> str:
    """The Python stacks of a process if py-spy can read them, else its place in the kernel."""
    if isolation.find_program("py-spy", os.environ) is not None:
        with contextlib.suppress(OSError, tools.NoAnswer):
            answer = tools.run_tool(["py-spy", "dump", "--nonblocking", "--pid", str(pid)])
            if answer.returncode == 0:
                return answer.out.decode(errors="replace")
    place = ""
    with contextlib.suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text().strip()
    return f"no py-spy to read its stacks with; in the kernel it is in {place or 'unknown'}\n"
