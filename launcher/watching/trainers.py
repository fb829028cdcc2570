"""accelerate, transformers' Trainer and open-instruct's saving: where training tells what it does."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

from . import saves
from .hooks import wrap, wrap_known
from .probe import Probe


def watch_accelerate(probe: Probe, module: types.ModuleType) -> None:
    def prepare(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        model = False
        for item in args:
            with probe.record.quietly("prepare"):
                if hasattr(item, "named_parameters") and hasattr(item, "forward"):
                    model = True
                    probe.memory.mark("load")
                    probe.saw_model(item)
                elif hasattr(item, "param_groups") and hasattr(item, "zero_grad"):
                    probe.optimizer.saw(item, accelerator)
        result = original(accelerator, *args, **kwargs)
        for item in result if isinstance(result, (tuple, list)) else (result,):
            with probe.record.quietly("prepared"):
                if hasattr(item, "zero_optimization_stage"):
                    probe.optimizer.saw_engine(item)
                if hasattr(item, "named_parameters") and hasattr(item, "forward"):
                    probe.gradients.prepared(item)
        if model:
            probe.memory.mark("prepare")
        return result

    def backward(original: Any, accelerator: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        probe.backward_begins(loss)
        result = original(accelerator, loss, *args, **kwargs)
        probe.backward_ended(accelerator)
        return result

    owner = module.Accelerator
    wrap(owner, "prepare", prepare)
    wrap(owner, "backward", backward)
    wrap_known(owner, ("clip_grad_norm_",), clipping(probe))
    wrap_known(owner, ("save_state", "get_state_dict"), resting(probe))
    wrap_known(owner, ("load_state",), resuming(probe))


def watch_optimizer(probe: Probe, module: types.ModuleType) -> None:
    """accelerate's wrapper steps in every micro-batch and acts in the last one."""

    def step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with probe.record.quietly("gradients"):
            probe.before_optimizer(optimizer)
        result = original(optimizer, *args, **kwargs)
        with probe.record.quietly("step"):
            probe.close_step()
        return result

    wrap(module.AcceleratedOptimizer, "step", step)


def watch_trainer(probe: Probe, module: types.ModuleType) -> None:
    names = ("_save_checkpoint", "evaluate", "push_to_hub")
    wrap_known(module.Trainer, names, resting(probe))
    wrap_known(module.Trainer, ("save_model",), saving(probe, of_trainer))
    wrap_known(module.Trainer, ("_load_optimizer_and_scheduler",), resuming(probe))


def watch_final_save(probe: Probe, module: types.ModuleType) -> None:
    wrap_known(module, ("push_folder_to_hub",), resting(probe))
    wrap_known(module, ("save_with_accelerate",), saving(probe, of_script))


def of_trainer(trainer: Any, output_dir: Any = None, *_: Any, **__: Any) -> Any:
    """Where Trainer's `save_model` puts the model (transformers/trainer.py)."""
    return output_dir or trainer.args.output_dir


def of_script(*args: Any, **kwargs: Any) -> Any:
    """Where open-instruct's `save_with_accelerate` does (model_utils.py:527)."""
    return kwargs["output_dir"] if "output_dir" in kwargs else args[3]


def watch_saving(probe: Probe, module: types.ModuleType) -> None:
    def save(original: Any, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        probe.rests()
        result = original(model, save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            probe.record.write("saved", path=str(save_directory))
            with probe.record.quietly("saved model"):
                saves.note(probe.record, save_directory)
        probe.memory.mark("save", again=True)
        return result

    wrap(module.PreTrainedModel, "save_pretrained", save)


def resting(probe: Probe) -> Callable[..., Any]:
    """For what takes long and is no step."""

    def rest(original: Any, *args: Any, **kwargs: Any) -> Any:
        probe.rests()
        return original(*args, **kwargs)

    return rest


def saving(probe: Probe, folder: Callable[..., Any]) -> Callable[..., Any]:
    """For what writes the final model into `folder`; Trainer's checkpoints call it too, and say so."""

    def save(original: Any, *args: Any, **kwargs: Any) -> Any:
        probe.rests()
        if not kwargs.get("_internal_call"):
            probe.leaves_out_final_save()
        result = original(*args, **kwargs)
        with probe.record.quietly("saved model"):
            if not probe.process.rank:
                saves.note(probe.record, folder(*args, **kwargs))
        return result

    return save


def resuming(probe: Probe) -> Callable[..., Any]:
    """For what loads a checkpoint, given as the first argument; afterwards its steps are counted."""

    def resume(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        process = probe.process
        given = args[0] if args else next(iter(kwargs.values()), None)
        # Trainer calls it without a checkpoint too
        process.resumed = process.resumed or given is not None or not (args or kwargs)
        result = original(owner, *args, **kwargs)
        with probe.record.quietly("resume"):
            if isinstance(given, (str, os.PathLike)):
                path = os.fspath(given)
                process.resumes(path, probe.optimizer.steps_done(path))
        return result

    return resume


def clipping(probe: Probe) -> Callable[..., Any]:
    """For what clips the gradients and returns their norm."""

    def clip(original: Any, *args: Any, **kwargs: Any) -> Any:
        with probe.record.quietly("gradients"):
            probe.before_clipping()
        norm = original(*args, **kwargs)
        with probe.record.quietly("gradient norm"):
            probe.clipped(norm)
        return norm

    return clip
