"""The probe of this process: what a watched module tells goes to the piece that it concerns."""

import contextlib
import os
import sys
import time
from typing import Any

from .contract import Caches, Contract, Liger
from .data import Data
from .gradients import Gradients
from .model import PeakMemory, Rotary, base_of, described, device
from .optimizer import Movement, Optimizer
from .packing import Packing, told_by_lengths
from .preemption import Preemption
from .process import Process, Settings, say
from .steps import Pairs, Steps, Tally
from .watchdog import FIRST_STEP, SAVING, TRAINING, Watchdog

VIOLATION = 79  # the exit code of a process that stopped itself; no signal and no shell uses it


class Probe:
    """What happens in training, in its order: a model is loaded, batches go forward, steps are taken."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.process = Process(Settings(settings))
        self.settings = self.process.settings
        self.record = self.process.record
        self.memory = PeakMemory(self.process)
        self.rotary = Rotary(self.process)
        self.liger = Liger(self.process)
        self.contract = Contract(self.process, self.liger, self.leave)
        self.gradients = Gradients(self.process, self.contract)
        self.watchdog = Watchdog(self.process, self.leave)
        self.preemption = Preemption(self.process)
        self.optimizer = Optimizer(self.process, self.memory)
        self.movement = Movement(self.process, self.optimizer)
        self.packing = Packing(self.process, self.contract)
        self.pairs = Pairs(self.process, self.packing)
        self.caches = Caches(self.process, self.contract, self.watchdog)
        self.data = Data(self.process)
        self.steps = Steps(self.process, self.contract, self.caches, self.pairs, self.data)
        self.tally = Tally()
        self.open = self.leaving = False
        self.models: set[int] = set()
        self.marked = 0

    def saw_model(self, model: Any) -> None:
        if id(model) in self.models:
            return
        self.models.add(id(model))
        if self.watchdog.phase is None and not self.process.step:
            self.watchdog.enter(FIRST_STEP)
        facts = described(model, self.record)
        self.record.write("model", **facts)
        with self.record.quietly("end tokens"):
            self.data.saw_model(base_of(model))
        # before an engine's own: a forward inside of one would put its weights back (FSDP2)
        model.register_forward_pre_hook(self.forward_begins, with_kwargs=True, prepend=True)
        self.contract.seen("attention", facts["attention"])

    def forward_begins(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self.process.testing:
            return
        self.watchdog.beat()
        with self.record.quietly("forward"):
            ids = kwargs.get("input_ids", args[0] if args else None)
            # a reference pass or an evaluation is no training, whatever mode the model is in
            graded = getattr(sys.modules.get("torch"), "is_grad_enabled", lambda: True)()
            if ids is None or not getattr(module, "training", True) or not graded:
                return
            self.close_step()
            self.steps.settle()
            if self.process.step_begun is None:
                self.process.step_begun = time.perf_counter()
                self.memory.mark("load")
                with self.record.quietly("device"):
                    self.record.write("device", **device(self.settings.cpu))
                self.steps.start_clock()
            # what was being saved or evaluated is over
            self.watchdog.enter(TRAINING if self.process.step else FIRST_STEP)
            # what the model is not told (dpo_utils.py::concatenated_forward_olmo[output = model]), the batch says
            known = {**kwargs, **told_by_lengths(ids, kwargs), **(self.pairs.hidden or {})}
            if self.pairs.hidden is None:
                self.tally.count(ids, known)
            with self.record.quietly("data"):
                self.data.batch(ids, known, self.tally)
            self.packing.look(module, ids, known)
            self.packing.test(module, args, ids, kwargs, known)

    def micro_batch_begins(self, batch: dict[str, Any]) -> None:
        self.close_step()
        self.pairs.begins(batch, self.tally)
        with self.record.quietly("data"):
            self.data.pair_batch(batch, self.tally)

    def backward_begins(self, loss: Any) -> None:
        with self.record.quietly("loss"):
            self.close_step()
            self.tally.loss(loss)
        self.gradients.micro_batch()
        if self.optimizer.engine is not None:
            # it steps inside its backward
            self.movement.begin()

    def backward_ended(self, accelerator: Any) -> None:
        self.watchdog.beat()
        if not getattr(accelerator, "sync_gradients", True):
            return
        with self.record.quietly("step"):
            self.process.step += 1
            self.open = True
            if getattr(accelerator, "deepspeed_engine_wrapped", None) is not None:
                # the engine has stepped inside its backward, and has a norm of all gradients
                self.gradients.step_over()
                norm = self.optimizer.norm()
                self.tally.norm = [] if norm is None else [norm]
                self.close_step()
            else:
                self.optimizer.scaled = getattr(accelerator, "scaler", None) is not None
                self.memory.mark("gradients")

    def step_begins(self) -> None:
        self.process.step += 1
        self.open = True
        self.memory.mark("gradients")
        self.gradients.before_step()
        self.movement.begin()

    def before_clipping(self, *_: Any, **__: Any) -> None:
        if self.open:
            self.gradients.before_step()

    def clipped(self, norm: Any, *_: Any, **__: Any) -> None:
        if norm is not None and self.open:
            self.tally.norm = [norm]

    def before_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Where nobody computes a norm, a few small gradients tell: what is not finite spreads down."""
        if not self.open:
            return
        self.gradients.before_step()
        self.movement.begin(optimizer)
        if not self.tally.norm and not self.optimizer.scaled:
            norm = self.optimizer.sample(optimizer)
            if norm is not None:
                self.tally.scalars["sampled"] = [norm]

    def close_step(self, *_: Any, **__: Any) -> None:
        """The optimizer step that is open, if one is, has been taken."""
        if not self.open:
            return
        self.open = False
        process, tally = self.process, self.tally
        if process.step == 1:
            self.memory.mark("optimizer")
        now = time.perf_counter()
        seconds = now - (process.step_begun or process.begun)
        event: dict[str, Any] = {
            "step": process.at,
            "elapsed": round(now - process.begun, 4),
            "micro_batches": tally.micro_batches,
            "positions": tally.positions,
            "interrupted": tally.interrupted,
            **dict.fromkeys(("learning_rate", "allocated_gib", "reserved_gib")),
        }
        with self.record.quietly("memory"):
            event |= self.memory.peaks()
        with self.record.quietly("learning rate"):
            event["learning_rate"] = self.optimizer.learning_rate()
        self.watchdog.step(seconds, first=process.step == 1)
        parts = 1 if self.settings.divides_loss else max(1, len(tally.scalars["loss"]))
        known = {"seconds": seconds, "scaled": self.optimizer.scaled, "parts": parts, "event": event}
        self.steps.add({**tally.scalars, "norm": tally.norm}, known)
        # a step lasts from the end of the one before: its data loading and logging are part of it
        process.step_begun = now
        self.tally = Tally()
        self.steps.settle()
        self.gradients.settle()
        if process.step & (process.step - 1) == 0:
            self.liger.report()
            self.data.report()
        self.contract.after_step(process.step)

    def rests(self, phase: str | None = None) -> None:
        """Something is saved, evaluated or uploaded: first see that what is saved is any good.

        `phase` is one of the watchdog's, None for what may take any time.
        """
        with self.record.quietly("last step"):
            self.close_step()
            self.watchdog.enter(phase)
            self.tally.interrupted = True
            self.steps.settle(wait=True)
            self.gradients.settle(wait=True)
            if step := self.process.step:
                self.memory.mark("steps", again=step > self.marked)
                self.marked = step
            self.movement.report()

    def leaves_out_final_save(self) -> None:
        """The script ends here, well, where nobody wants its model. Raises SystemExit then."""
        if self.settings.final_save:
            return
        with self.record.quietly("final save"):
            if self.process.world > 1:
                # another rank may still be reading from this one's memory
                sys.modules["torch"].distributed.barrier()
            self.record.write("not_saved", step=self.process.at)
        raise SystemExit(0)

    def is_to_stop(self, step: int) -> bool:
        """A step is over; returns whether a checkpoint is to be saved now and the training ended, on every rank."""
        if self.preemption.saving:
            return True
        if not self.preemption.reached(step):
            return False
        self.rests(SAVING)
        self.preemption.begin_save(step)
        return True

    def stops_after_save(self, step: int, path: str) -> None:
        """The checkpoint that was requested is saved: once every rank has its part, end. Raises SystemExit."""
        if self.process.world > 1:
            sys.modules["torch"].distributed.barrier()
        self.preemption.saved(step, os.path.abspath(path))
        raise SystemExit(0)

    def ends(self) -> None:
        self.preemption.stop()
        self.rests()
        self.gradients.ends()
        if self.process.step:
            self.memory.mark("end")
        self.liger.report()
        self.data.report()

    def leave(self, message: str, *, stops: bool, settle: bool = True) -> None:
        """Warn, or (`stops`) end this process now; whoever started the ranks then ends the others."""
        if not stops:
            say(f"warning: {message}")
        if not stops or self.leaving or not self.record.ours():
            return
        self.leaving = True
        if settle:
            with self.record.quietly("last steps"):
                self.steps.settle(wait=True)
        self.liger.report()
        self.data.report()
        self.gradients.report()
        self.record.write("end", exit=VIOLATION)
        say(f"stopped: {message}")
        with contextlib.suppress(Exception):
            for name in ("multiprocessing", "multiprocess"):
                for child in getattr(sys.modules.get(name), "active_children", list)():
                    child.kill()
        os._exit(VIOLATION)
