"""Save at a step boundary before the machine is taken away.

launch writes `save.json` beside the records of the ranks. Each rank looks for it in a thread, and
for the word of another rank in the process group's key-value store, so training never waits for
either. A rank that knows of the request names the first step boundary that it has not passed, and
stops there until all have named theirs. All save at the latest of them: no rank has passed a
boundary that it named, so every rank still reaches it.
"""

import os
import sys
import threading
from typing import Any

from .process import Process, read_attempt_number, read_json, read_local_rank, say, write_json

LISTENS = "listens.json"  # in the folder of the records, once requests are heard: {"attempt": N}
REQUEST = "save.json"  # beside it: {"attempt": N}
ANSWER = "saved.json"  # once all ranks have saved: {"attempt": N, "step": N, "path": ...}
POLL_S = 0.5


class Preemption(threading.Thread):
    """Waits for the request to save and stop, and agrees with the other ranks on the step.

    `done` is the last step whose boundary this rank has passed, `named` the one that it offered,
    `agreed` the one where all ranks save. `saving` is set from that boundary on.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(name="launch-preemption", daemon=True)
        self.process = process
        self.record = process.record
        self.attempt = read_attempt_number()
        self.folder = process.settings.out
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.settled = threading.Event()
        self.done = 0
        self.named: int | None = None
        self.agreed: int | None = None
        self.saving = False

    def run(self) -> None:
        self.tell(LISTENS, {})
        while not self.over.wait(POLL_S):
            with self.record.quietly("preemption"):
                if self.look():
                    return

    def stop(self) -> None:
        """End the thread before the interpreter goes: it may be inside the key-value store."""
        self.over.set()
        if self.is_alive():
            self.join(2 * POLL_S)

    def look(self) -> bool:
        """Take the agreement one step further; returns whether it is complete."""
        store = None
        world = self.process.world
        if world > 1:
            store = find_store()
            if store is None:
                # the ranks have not met: nothing has been trained yet
                return False
        if self.named is None:
            self._name_boundary(store)
        if self.named is None:
            return False
        steps = [self.named]
        if store is not None:
            keys = [self.key(rank) for rank in range(world)]
            if not store.check(keys):
                return False
            steps = [int(store.get(key)) for key in keys]
        self.agreed = max(steps)
        self.record.write("save_agreed", step=self.agreed)
        self.settled.set()
        return True

    def _name_boundary(self, store: Any) -> None:
        """Name one if launch, or a rank on another machine, requests a save."""
        request = read_json(os.path.join(self.folder, REQUEST))
        is_requested = request.get("attempt") == self.attempt
        if store is not None and not is_requested:
            is_requested = store.check([self.key("request")])
        if not is_requested:
            return
        with self.lock:
            self.named = self.done + 1
        if store is not None:
            store.set(self.key("request"), "1")
            store.set(self.key(self.process.rank), str(self.named))
        self.record.write("save_requested", step=self.named)

    def key(self, name: int | str) -> str:
        """A key of this attempt: torchrun keeps its store when it starts the ranks again."""
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0
        return f"launch/save/{self.attempt}.{restart}/{name}"

    def has_reached(self, step: int) -> bool:
        """This rank has done a step: do all save now? Waits until the ranks agree."""
        with self.lock:
            self.done = step
            named = self.named
        if named is None or step < named:
            return False
        # a signal still gets through
        self.settled.wait()
        return self.agreed is not None and step >= self.agreed

    def begin_save(self, step: int) -> None:
        self.saving = True
        self.record.write("saving_to_stop", step=step)
        if self.process.rank == 0:
            say(f"saving a checkpoint after step {step}, to stop there")

    def end_save(self, step: int, path: str) -> None:
        """Tell launch that every rank has saved."""
        self.record.write("preempted", step=step, path=path)
        if self.process.rank == 0:
            say(f"the checkpoint of step {step} is saved: {path}")
        self.tell(ANSWER, {"step": step, "path": path})

    def tell(self, name: str, content: dict[str, Any]) -> None:
        """Write a file for launch, once on each machine: each may have a folder of its own."""
        if read_local_rank() == 0:
            with self.record.quietly(name):
                path = os.path.join(self.folder, name)
                write_json(path, {"attempt": self.attempt, **content})


def find_store() -> Any:
    """The store through which the ranks met; None before that."""
    distributed = sys.modules.get("torch.distributed")
    # another thread may be in the middle of importing it
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return sys.modules["torch.distributed.distributed_c10d"]._get_default_store()
