"""The probe of this process: passes what happens in training to the parts that it concerns."""

import contextlib
import os
import sys
import time
from typing import Any

from .contract import Caches, Contract, Liger
from .data import Data
from .gradients import Gradients
from .hooks import Call
from .model import PeakMemory, Rotary, describe, describe_device, find_base
from .optimizer import Movement, Optimizer
from .packing import Packing, read_batch, take_side
from .preemption import Preemption
from .process import Process, Settings, say
from .steps import ClosedStep, Pairs, Steps, Tally
from .watchdog import FIRST_STEP, SAVING, TRAINING, Watchdog

VIOLATION = 79  # the exit code of a process that stopped itself; no signal and no shell uses it


class Probe:
    """What happens in training, in its order: a model is loaded, batches go forward, steps are
    taken.

    `open`: the gradients of a step are complete, and it is not over yet.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.process = Process(Settings.from_json(settings))
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
        self.open = False
        self.leaving = False
        self.models: set[int] = set()
        self.marked = 0

    def saw_model(self, model: Any) -> None:
        if id(model) in self.models:
            return
        self.models.add(id(model))
        if self.watchdog.phase is None and not self.process.step:
            self.watchdog.enter(FIRST_STEP)
        facts = describe(model, self.record)
        self.record.write("model", **facts)
        with self.record.quietly("end tokens"):
            self.data.saw_model(find_base(model))
        # before an engine's own hook: a forward inside of that would put its weights back (FSDP2)
        model.register_forward_pre_hook(self.begin_forward, with_kwargs=True, prepend=True)
        self.contract.saw("attention", facts["attention"])

    def begin_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.process.testing:
            return
        self.watchdog.beat()
        with self.record.quietly("forward"):
            call = Call((module, *args), kwargs)
            ids = call.argument(1, "input_ids")
            is_training = getattr(module, "training", True)
            # a reference pass may run on a model in training mode
            if ids is not None and is_training and _is_grad_enabled():
                self._begin_training_pass(call, ids)

    def _begin_training_pass(self, call: Call, ids: Any) -> None:
        self.close_step()
        self.steps.settle()
        if self.process.step_begun is None:
            self._begin_first_step()
        # a save or an evaluation is over
        self.watchdog.enter(TRAINING if self.process.step else FIRST_STEP)
        batch = read_batch(ids, call.kwargs)
        if self.pairs.hidden is None:
            self.tally.add_batch(batch)
        # dpo_utils.py::concatenated_forward_olmo[output = model] gives the model less
        batch = self.pairs.complete(batch)
        with self.record.quietly("data"):
            self.data.count_batch(batch, self.tally)
        self.packing.look(call.owner, batch)
        self.packing.test(call, batch)

    def _begin_first_step(self) -> None:
        self.process.step_begun = time.perf_counter()
        self.memory.mark("load")
        with self.record.quietly("device"):
            self.record.write("device", **describe_device(self.settings.cpu))
        with self.record.quietly("timing"):
            self.steps.start_clock()

    def begin_micro_batch(self, batch: dict[str, Any]) -> None:
        """A micro-batch of pairs, of which the model is given a part."""
        self.close_step()
        chosen = take_side(batch, "chosen")
        rejected = take_side(batch, "rejected")
        self.pairs.begin(chosen, rejected, self.tally)
        with self.record.quietly("data"):
            self.data.count_pairs(chosen, rejected, self.tally)

    def begin_backward(self, loss: Any) -> None:
        with self.record.quietly("loss"):
            self.close_step()
            self.tally.add_loss(loss)
        self.gradients.begin_micro_batch()
        if self.optimizer.engine is not None:
            # it steps inside its backward
            self.movement.begin()

    def end_backward(self, accelerator: Any) -> None:
        self.watchdog.beat()
        if not getattr(accelerator, "sync_gradients", True):
            return
        with self.record.quietly("step"):
            self.process.step += 1
            self.open = True
            if getattr(accelerator, "deepspeed_engine_wrapped", None) is None:
                self.optimizer.scaled = getattr(accelerator, "scaler", None) is not None
                self.memory.mark("gradients")
                return
            # the engine has stepped inside its backward, and has the norm of all gradients
            self.gradients.end_step()
            if self.optimizer.engine is not None:
                self.clipped(self.optimizer.engine.get_global_grad_norm())
            self.close_step()

    def begin_step(self) -> None:
        """OLMo-core is about to clip and to step."""
        self.process.step += 1
        self.open = True
        self.memory.mark("gradients")
        self.gradients.before_step()
        self.movement.begin()

    def before_clipping(self) -> None:
        if self.open:
            self.gradients.before_step()

    def clipped(self, norm: Any) -> None:
        if norm is not None and self.open:
            self.tally.set_norm(norm)

    def before_optimizer(self, optimizer: Any) -> None:
        if not self.open:
            return
        self.gradients.before_step()
        self.movement.begin(optimizer)
        # if nobody computes a norm a few small gradients do: what is not finite spreads to them
        if "norm" not in self.tally.scalars and not self.optimizer.scaled:
            norm = self.optimizer.sample_norm(optimizer)
            if norm is not None:
                self.tally.scalars["sampled"] = [norm]

    def close_step(self) -> None:
        """The open optimizer step, if there is one, has been taken."""
        if not self.open:
            return
        self.open = False
        process = self.process
        if process.step == 1:
            self.memory.mark("optimizer")
        now = time.perf_counter()
        seconds = now - (process.step_begun or process.begun)
        self.watchdog.end_step(seconds, first=process.step == 1)
        parts = 1
        if not self.settings.divides_loss:
            parts = max(1, len(self.tally.scalars["loss"]))
        event = self._build_step_event(now)
        self.steps.add(self.tally, ClosedStep(seconds, self.optimizer.scaled, parts, event))
        # a step lasts from the end of the one before: it includes data loading and logging
        process.step_begun = now
        self.tally = Tally()
        self.steps.settle()
        self.gradients.settle()
        if process.step & (process.step - 1) == 0:
            self.liger.report()
            self.data.report()
        self.contract.after_step(process.step)

    def _build_step_event(self, now: float) -> dict[str, Any]:
        event = {
            "step": self.process.at,
            "elapsed": round(now - self.process.begun, 4),
            "micro_batches": self.tally.micro_batches,
            "positions": self.tally.positions,
            "interrupted": self.tally.interrupted,
            "learning_rate": None,
            "allocated_gib": None,
            "reserved_gib": None,
        }
        with self.record.quietly("memory"):
            counters = self.memory.counters()
            event["allocated_gib"] = counters.get("peak_allocated_gib")
            event["reserved_gib"] = counters.get("peak_reserved_gib")
        with self.record.quietly("learning rate"):
            event["learning_rate"] = self.optimizer.learning_rate()
        return event

    def rest(self, phase: str | None = None) -> None:
        """Something is saved, evaluated or uploaded: check first that what is saved is any good.

        `phase` is one of the watchdog's, None for what may take any time.
        """
        with self.record.quietly("last step"):
            self.close_step()
            self.watchdog.enter(phase)
            self.tally.interrupted = True
            self.steps.settle(wait=True)
            self.gradients.settle(wait=True)
            step = self.process.step
            if step:
                self.memory.mark("steps", again=step > self.marked)
                self.marked = step
            self.movement.report()

    def leave_out_final_save(self) -> None:
        """End the script here if nobody wants its model. Raises SystemExit then."""
        if self.settings.final_save:
            return
        with self.record.quietly("final save"):
            # another rank may still be reading from this one's memory
            self._wait_for_ranks()
            self.record.write("not_saved", step=self.process.at)
        raise SystemExit(0)

    def is_to_stop(self, step: int) -> bool:
        """A step is over: is every rank to save a checkpoint now, and to end?"""
        if self.preemption.saving:
            return True
        if not self.preemption.has_reached(step):
            return False
        self.rest(SAVING)
        self.preemption.begin_save(step)
        return True

    def stop_after_save(self, step: int, path: str) -> None:
        """End once every rank has saved the requested checkpoint. Raises SystemExit."""
        self._wait_for_ranks()
        self.preemption.end_save(step, os.path.abspath(path))
        raise SystemExit(0)

    def _wait_for_ranks(self) -> None:
        if self.process.world > 1:
            sys.modules["torch"].distributed.barrier()

    def end(self) -> None:
        self.preemption.stop()
        self.rest()
        with self.record.quietly("gradients"):
            self.gradients.end()
        if self.process.step:
            self.memory.mark("end")
        self.liger.report()
        self.data.report()

    def leave(self, message: str, *, stops: bool, settle: bool = True) -> None:
        """Warn, or end this process now; whoever started the ranks then ends the others."""
        if not stops:
            say(f"warning: {message}")
            return
        if self.leaving or not self.record.is_owner():
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
            _kill_data_workers()
        os._exit(VIOLATION)


def _is_grad_enabled() -> bool:
    torch: Any = sys.modules.get("torch")
    return not hasattr(torch, "is_grad_enabled") or torch.is_grad_enabled()


def _kill_data_workers() -> None:
    for name in ("multiprocessing", "multiprocess"):
        if name in sys.modules:
            for child in sys.modules[name].active_children():
                child.kill()
