"""Saving at a step boundary before the machine is taken away: who asks for it, and how all ranks agree on the step.

launch writes `save.json` beside the records of the ranks. Each rank looks for it in a thread, and for the word of
another rank in the process group's key-value store, so training itself never waits for either. A rank that knows
of the request names the first step boundary that it has not passed, and stops there until all have named theirs.
The latest of them is where all save: no rank is behind a boundary that it named, so every rank still reaches it.
"""

import json
import os
import sys
import threading
from typing import Any

from .process import Process, attempt_number, say

LISTENS = "listens.json"  # in the folder of the records, once requests are heard: {"attempt": N}
REQUEST = "save.json"  # beside it: {"attempt": N}
ANSWER = "saved.json"  # once all ranks have saved: {"attempt": N, "step": N, "path": ...}
POLL_S = 0.5


class Preemption(threading.Thread):
    """Waits for the request to save and stop, and agrees with the other ranks on the step.

    `done` is the last step whose boundary this rank has passed, `named` the one that it offered, `agreed` the one
    where all ranks save. `saving` from the boundary on.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(name="launch-preemption", daemon=True)
        self.process, self.record = process, process.record
        self.attempt = attempt_number()
        self.folder = process.settings.out
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.settled = threading.Event()
        self.done = 0
        self.named: int | None = None
        self.agreed: int | None = None
        self.saving = False

    def run(self) -> None:
        self.tell(LISTENS, {"attempt": self.attempt})
        while not self.over.wait(POLL_S):
            with self.record.quietly("preemption"):
                if self.look():
                    return

    def stop(self) -> None:
        """End the thread before the interpreter goes: it may be inside the key-value store."""
        self.over.set()
        if self.is_alive():
            self.join(2 * POLL_S)

    def requested(self) -> bool:
        """Whether launch asks this attempt to save and stop."""
        try:
            with open(os.path.join(self.folder, REQUEST), encoding="utf-8") as stream:
                request = json.load(stream)
        except (OSError, ValueError):
            return False
        return isinstance(request, dict) and request.get("attempt") == self.attempt

    def look(self) -> bool:
        """Take the agreement one step further; returns whether it is complete."""
        store = None
        if self.process.world > 1:
            store = key_value_store()
            if store is None:
                # the ranks have not come together: nothing has been trained yet
                return False
        if self.named is None and not self._join(store):
            return False
        steps = [self.named or 0]
        if store is not None:
            keys = [self.key(rank) for rank in range(self.process.world)]
            if not store.check(keys):
                return False
            steps = [int(store.get(key)) for key in keys]
        self.agreed = max(steps)
        self.record.write("save_agreed", step=self.agreed)
        self.settled.set()
        return True

    def _join(self, store: Any) -> bool:
        """Name a boundary, if anybody has requested a save; returns whether one is named."""
        requested = self.requested()
        if not requested and store is not None:
            requested = store.check([self.key("request")])
        if not requested:
            return False
        with self.lock:
            self.named = self.done + 1
        if store is not None:
            store.set(self.key("request"), "1")
            store.set(self.key(self.process.rank), str(self.named))
        self.record.write("save_requested", step=self.named)
        return True

    def key(self, name: int | str) -> str:
        """A key of this attempt: torchrun keeps its store when it starts the ranks again."""
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0
        return f"launch/save/{self.attempt}.{restart}/{name}"

    def reached(self, step: int) -> bool:
        """This rank has done a step; returns whether all ranks save now. Waits until the step is agreed on."""
        with self.lock:
            self.done = step
            named = self.named
        if named is None or step < named:
            return False
        # a signal still gets through
        self.settled.wait()
        return self.agreed is not None and step >= self.agreed

    def begin_save(self, step: int) -> None:
        """From here on the training saves, to end then."""
        self.saving = True
        self.record.write("saving_to_stop", step=step)
        if self.process.rank == 0:
            say(f"saving a checkpoint after step {step}, to stop there")

    def saved(self, step: int, path: str) -> None:
        """Leave word that every rank has saved."""
        self.record.write("preempted", step=step, path=path)
        if self.process.rank == 0:
            say(f"the checkpoint of step {step} is saved: {path}")
        self.tell(ANSWER, {"attempt": self.attempt, "step": step, "path": path})

    def tell(self, name: str, content: dict[str, Any]) -> None:
        """Write a file for launch, once a machine: each may have a folder of its own."""
        if int(os.environ.get("LOCAL_RANK") or 0):
            return
        target = os.path.join(self.folder, name)
        part = f"{target}.{self.process.rank}"
        with self.record.quietly(name):
            with open(part, "w", encoding="utf-8") as stream:
                json.dump(content, stream)
            os.replace(part, target)


def key_value_store() -> Any:
    """The store through which the ranks came together; None before that."""
    distributed = sys.modules.get("torch.distributed")
    # another thread may be in the middle of importing it
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return sys.modules["torch.distributed.distributed_c10d"]._get_default_store()
