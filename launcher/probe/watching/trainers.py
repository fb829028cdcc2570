"""Where training tells what it does: accelerate, transformers' Trainer, OLMo-core, open-instruct.

Trackers, too: the run of W&B, MLflow or trackio that training reports to is recorded, so that a
resume can continue it. The first two take it from variables of their own. trackio continues a run
by its name (`init(name=..., resume="allow")`), which no trainer passes if the stage file has none.
"""

import contextlib
import functools
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .hooks import Call, load_file, observed, wrap, wrap_known
from .probe import Probe
from .process import TOKENISED, EventLog
from .watchdog import EVALUATION, SAVING

TRACKIO_RUN = "LAUNCH_TRACKIO_RUN"  # the variable with the name of the trackio run to continue
DIGEST = Path(__file__).resolve().parents[2] / "artifacts" / "digest.py"


# -- accelerate


def watch_accelerate(probe: Probe, module: ModuleType) -> None:
    record = probe.record

    def preparing(call: Call) -> None:
        for item in call.args[1:]:
            with record.quietly("prepare"):
                if _is_model(item):
                    probe.memory.mark("load")
                    probe.saw_model(item)
                elif hasattr(item, "param_groups") and hasattr(item, "zero_grad"):
                    state = getattr(call.owner, "state", None)
                    probe.optimizer.saw(item, getattr(state, "deepspeed_plugin", None))

    def prepared(call: Call) -> None:
        items = call.result if isinstance(call.result, (tuple, list)) else [call.result]
        for item in items:
            with record.quietly("prepared"):
                if hasattr(item, "zero_optimization_stage"):
                    probe.optimizer.saw_engine(item)
                if _is_model(item):
                    probe.gradients.prepared(item)
                    # an engine may cast the whole model
                    probe.rotary.report(item)
        if any(map(_is_model, call.args[1:])):
            probe.memory.mark("prepare")

    def backward(original: Any, accelerator: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        probe.begin_backward(loss)
        result = original(accelerator, loss, *args, **kwargs)
        probe.end_backward(accelerator)
        return result

    owner = module.Accelerator
    wrap(owner, "prepare", observed(record, before=preparing, after=prepared))
    wrap(owner, "backward", backward)
    wrap_known(owner, ("clip_grad_norm_",), clipping(probe))
    wrap_known(owner, ("save_state", "get_state_dict"), resting(probe, SAVING))
    wrap_known(owner, ("load_state",), resuming(probe))
    wrap_known(owner, ("accumulate",), accumulating(probe))


def _is_model(item: Any) -> bool:
    return hasattr(item, "named_parameters") and hasattr(item, "forward")


def clipping(probe: Probe) -> Callable[..., Any]:
    return observed(
        probe.record,
        before=lambda _: probe.before_clipping(),
        after=lambda call: probe.clipped(call.result),
    )


def resting(probe: Probe, phase: str | None) -> Callable[..., Any]:
    return observed(probe.record, before=lambda _: probe.rest(phase))


def resuming(probe: Probe) -> Callable[..., Any]:
    """For what loads a checkpoint, its first argument: the steps of the run are counted on."""

    def checkpoint_of(call: Call) -> Any:
        arguments = [*call.args[1:], *call.kwargs.values()]
        # without an argument accelerate loads its newest checkpoint
        return arguments[0] if arguments else ""

    def begin(call: Call) -> None:
        # Trainer calls it without a checkpoint, too
        if checkpoint_of(call) is not None:
            probe.process.resumed = True

    def resumed(call: Call) -> None:
        checkpoint = checkpoint_of(call)
        if checkpoint and isinstance(checkpoint, (str, os.PathLike)):
            path = os.fspath(checkpoint)
            probe.process.resume(path, probe.optimizer.steps_done(path))

    return observed(probe.record, before=begin, after=resumed)


def accumulating(probe: Probe) -> Callable[..., Any]:
    """For `Accelerator.accumulate`, around a micro-batch and the optimizer step of the last one."""

    @contextlib.contextmanager
    def accumulate(original: Any, accelerator: Any, *models: Any) -> Iterator[None]:
        with original(accelerator, *models):
            yield
        if accelerator.sync_gradients and probe.preemption.has_reached(probe.process.at):
            _save_to_stop(probe, accelerator)

    return accumulate


def _save_to_stop(probe: Probe, accelerator: Any) -> None:
    """Save as open-instruct's loops do (finetune.py::main[if isinstance(checkpointing_steps]).

    Raises SystemExit afterwards.
    """
    loop = _find_loop_variables()
    if loop is None:
        return
    # the loop counts this step only later
    step = loop["completed_steps"] + 1
    options = loop["args"]
    if step >= options.max_train_steps:
        return
    probe.is_to_stop(step)
    folder = os.path.join(options.output_dir, f"step_{step}")
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with open(os.path.join(folder, "COMPLETED"), "w", encoding="utf-8") as mark:
            mark.write("COMPLETED")
    probe.stop_after_save(step, folder)


def _find_loop_variables() -> dict[str, Any] | None:
    """The variables of open-instruct's loop that is running; None outside of one.

    Call it at the end only: the variables stay alive while they are looked at, and batches are
    large.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "main" and "completed_steps" in frame.f_code.co_varnames:
            return frame.f_locals
        frame = frame.f_back
    return None


def watch_optimizer(probe: Probe, module: ModuleType) -> None:
    """accelerate's wrapper is called in every micro-batch, and steps in the last one."""
    step = observed(
        probe.record,
        before=lambda call: probe.before_optimizer(call.owner),
        after=lambda _: probe.close_step(),
    )
    wrap(module.AcceleratedOptimizer, "step", step)


# -- transformers


def watch_trainer(probe: Probe, module: ModuleType) -> None:
    def folder(call: Call) -> Any:
        return call.argument(1, "output_dir") or call.owner.args.output_dir

    def save(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not probe.preemption.saving:
            return original(trainer, *args, **kwargs)
        only_model = trainer.args.save_only_model
        # without the optimizer nothing could continue from it
        trainer.args.save_only_model = False
        original(trainer, *args, **kwargs)
        trainer.args.save_only_model = only_model
        step = trainer.state.global_step
        checkpoint = os.path.join(trainer.args.output_dir, f"checkpoint-{step}")
        probe.stop_after_save(step, checkpoint)
        return None

    owner = module.Trainer
    wrap_known(owner, ("_save_checkpoint",), resting(probe, SAVING))
    wrap_known(owner, ("evaluate",), evaluating(probe))
    wrap_known(owner, ("push_to_hub",), resting(probe, None))
    wrap_known(owner, ("save_model",), saving(probe, folder))
    wrap_known(owner, ("_load_optimizer_and_scheduler",), resuming(probe))
    wrap_known(owner, ("_maybe_log_save_evaluate",), save)
    probe.data.watch_inputs(module)


def evaluating(probe: Probe) -> Callable[..., Any]:
    def note(call: Call) -> None:
        metrics = {}
        for name, value in call.result.items():
            if isinstance(value, int | float):
                metrics[name] = value
        step = call.owner.state.global_step
        probe.record.write("evaluation", step=step, metrics=metrics)

    def rest(_: Call) -> None:
        probe.rest(EVALUATION)

    return observed(probe.record, before=rest, after=note)


def saving(probe: Probe, folder: Callable[[Call], Any]) -> Callable[..., Any]:
    """For what writes the final model into `folder`; Trainer's checkpoints call it, and say so."""

    def begin(call: Call) -> None:
        probe.rest(SAVING)
        if not call.kwargs.get("_internal_call"):
            probe.leave_out_final_save()

    def saved(call: Call) -> None:
        if probe.process.rank == 0:
            note_saved(probe.record, folder(call))
        if not call.kwargs.get("_internal_call"):
            # the script is about to end, in its own time
            probe.watchdog.enter(None)

    return observed(probe.record, before=begin, after=saved)


def watch_callbacks(probe: Probe, module: ModuleType) -> None:
    """Callbacks decide what a step of Trainer leads to; the last one prevails."""

    def end_step(original: Any, handler: Any, args: Any, state: Any, control: Any) -> Any:
        control = original(handler, args, state, control)
        # after the last step the training ends by itself
        if not control.should_training_stop and probe.is_to_stop(state.global_step):
            control.should_save = True
            control.should_training_stop = True
            # it may take longer than there is time
            control.should_evaluate = False
        return control

    wrap_known(module.CallbackHandler, ("on_step_end",), end_step)


def watch_pretrained(probe: Probe, module: ModuleType) -> None:
    """Models are loaded, or made of a config, and saved."""

    def loaded(call: Call) -> None:
        # with `output_loading_info` the model is the first of two
        model = call.result[0] if isinstance(call.result, tuple) else call.result
        probe.rotary.restore(model)

    def saved(call: Call) -> None:
        if call.kwargs.get("is_main_process", True):
            path = call.argument(1, "save_directory")
            probe.record.write("saved", path=str(path))
            note_saved(probe.record, path)
        probe.memory.mark("save", again=True)

    owner = module.PreTrainedModel
    makers = ("from_pretrained", "_from_config")
    wrap_known(owner, makers, observed(probe.record, after=loaded))
    save = observed(probe.record, before=lambda _: probe.rest(SAVING), after=saved)
    wrap(owner, "save_pretrained", save)


@functools.cache
def digest_module() -> Any:
    return load_file(str(DIGEST), "launch_content")


def note_saved(record: EventLog, folder: Any) -> None:
    """Record the content of a model that was saved, unless it is a checkpoint."""
    if not isinstance(folder, (str, os.PathLike)):
        return
    path = os.path.abspath(os.fspath(folder))
    with record.quietly("saved model"):
        digest = digest_module()
        if digest.CHECKPOINT.search(os.fspath(folder)):
            return
        files = []
        for name in digest.weights(path) if os.path.isdir(path) else ():
            content, _ = digest.read_content(Path(path, name))
            entry = {"name": name, "size": content.size}
            files.append({**entry, "method": content.method, "digest": content.digest})
        record.write("saved_model", path=path, files=files)


# -- open-instruct


def watch_data_sets(probe: Probe, module: ModuleType) -> None:
    _call_watchers(probe, module, probe.caches.watch_maps, probe.data.watch_filters)


def watch_tokenising(probe: Probe, module: ModuleType) -> None:
    _call_watchers(probe, module, probe.caches.watch_dataset, probe.data.watch_transformation)


def watch_preparation(probe: Probe, module: ModuleType) -> None:
    probe.data.watch_preparation(module)


def watch_pairs(probe: Probe, module: ModuleType) -> None:
    def computed(call: Call) -> None:
        _, chosen, rejected = call.result
        probe.tally.add_rewards(chosen, rejected)

    probe.data.watch_pairs(module, lambda: probe.tally)
    wrap_known(module, ("compute_loss",), observed(probe.record, after=computed))
    _call_watchers(probe, module, probe.caches.watch_reference)


def _call_watchers(
    probe: Probe, module: ModuleType, *watchers: Callable[[ModuleType], None]
) -> None:
    """Call all: one that fails, at a commit without what it looks for, does not stop the others."""
    for watch in watchers:
        with probe.record.quietly(f"watching {module.__name__}"):
            watch(module)


def watch_final_save(probe: Probe, module: ModuleType) -> None:
    def folder(call: Call) -> Any:
        # model_utils.py::save_with_accelerate
        return call.argument(3, "output_dir")

    wrap_known(module, ("push_folder_to_hub",), resting(probe, None))
    wrap_known(module, ("save_with_accelerate",), saving(probe, folder))


# -- OLMo-core's trainer: it calls everything itself, without accelerate


def _watch_train_module(
    probe: Probe, owner: type, built: Callable[[Any], object] = lambda _: None
) -> None:
    """Watch how a train module is built, and its batches; `built` gets it afterwards."""

    def begin(_: Call) -> None:
        probe.memory.mark("load")

    def end(call: Call) -> None:
        probe.saw_model(call.owner.model)
        probe.optimizer.saw(call.owner.optim)
        probe.gradients.prepared(call.owner.model)
        built(call.owner)
        probe.memory.mark("prepare")

    def train(original: Any, trained: Any, batch: Any, dry_run: bool = False) -> Any:
        if not dry_run:
            return original(trained, batch, dry_run=False)
        # a batch that only warms up
        probe.process.testing = True
        try:
            return original(trained, batch, dry_run=True)
        finally:
            probe.process.testing = False

    wrap(owner, "__init__", observed(probe.record, before=begin, after=end))
    wrap(owner, "train_batch", train)


def watch_olmo_module(probe: Probe, module: ModuleType) -> None:
    """The train module of open-instruct's dpo.py."""

    def built(trained: Any) -> None:
        # dpo.py::main[dp_rank = global_rank]
        degree = getattr(trained.dpo_config, "tensor_parallel_degree", 1)
        probe.pairs.alike = max(1, int(degree))

    def before_batch(call: Call) -> None:
        if not probe.process.testing:
            probe.begin_micro_batch(call.argument(1, "micro_batch"))

    def after_batch(call: Call) -> None:
        probe.pairs.hidden = None
        if not probe.process.testing:
            probe.begin_backward(call.result[0])

    owner = module.DPOTrainModule
    _watch_train_module(probe, owner, built)
    batch = observed(probe.record, before=before_batch, after=after_batch)
    wrap(owner, "_compute_microbatch_loss", batch)


def watch_olmo_step(probe: Probe, module: ModuleType) -> None:
    def begin(call: Call) -> None:
        probe.begin_step()
        if getattr(call.owner, "max_grad_norm", None) is None:
            probe.before_optimizer(call.owner.optim)

    owner = module.TransformerTrainModule
    step = observed(probe.record, before=begin, after=lambda _: probe.close_step())
    wrap(owner, "optim_step", step)
    wrap_known(owner, ("_clip_grad_norm",), clipping(probe))


def watch_olmo_training(probe: Probe, module: ModuleType) -> None:
    """OLMo-core's own training of a language model: the model is given all facts about its rows."""

    def forward_ended(call: Call) -> None:
        if not probe.process.testing and hasattr(call.result, "ce_loss"):
            probe.begin_backward(call.result.ce_loss)

    watch_olmo_step(probe, module)
    owner = module.TransformerTrainModule
    _watch_train_module(probe, owner)
    wrap(owner, "model_forward", observed(probe.record, after=forward_ended))


def watch_olmo_utils(probe: Probe, module: ModuleType) -> None:
    """The data of this script were tokenised before it began."""

    def prepared(call: Call) -> None:
        probe.data.saw_tokenizer(call.result)
        answer = json.loads(os.environ.get(TOKENISED) or "{}")
        if answer:
            probe.caches.tell("dataset_cache", answer["state"] == "hit", str(answer["path"]))

    wrap_known(module, ("setup_tokenizer_and_cache",), observed(probe.record, after=prepared))


def watch_olmo_trainer(probe: Probe, module: ModuleType) -> None:
    """It loads and saves checkpoints; after `fit` the weights are gathered, which may take long."""

    def loaded(call: Call) -> None:
        steps = int(getattr(call.owner, "global_step", 0) or 0)
        if steps:
            probe.process.resume(str(call.argument(1, "dir")), steps)

    def fitted(call: Call) -> None:
        trainer = call.owner
        probe.rest()
        if probe.preemption.saving:
            # the checkpointer saves when a run is cancelled, too
            step = int(trainer.global_step)
            folder = trainer.checkpointer.checkpoint_dirname(step)
            probe.stop_after_save(step, os.path.join(str(trainer.save_folder), folder))
        probe.leave_out_final_save()

    owner = module.Trainer
    record = probe.record
    wrap_known(owner, ("load_checkpoint",), observed(record, after=loaded))
    wrap_known(owner, ("save_checkpoint", "save_checkpoint_async"), resting(probe, SAVING))

    # OLMo-core's memory monitor resets the counters before its first step
    def begin(_: Call) -> None:
        probe.memory.mark("reference")

    wrap(owner, "fit", observed(record, before=begin, after=fitted))
    complete = vars(owner).get("training_complete")
    if isinstance(complete, property):
        owner.training_complete = property(functools.partial(_is_complete, probe, complete))


def _is_complete(probe: Probe, original: Any, trainer: Any) -> bool:
    """OLMo-core asks after each step, and before the first: cancel its run if it is to stop."""
    if original.fget(trainer):
        return True
    if not probe.process.step or not probe.is_to_stop(int(trainer.global_step)):
        return False
    trainer.cancel_run("a checkpoint was requested", no_sync=True)
    return True


def watch_olmo_checkpoints(probe: Probe, module: ModuleType) -> None:
    """OLMo-core saves a state before the first step and after the last; nobody wants a trial's."""
    if probe.settings.final_save:
        return

    def leave_out(_: Any, callback: Any, *args: Any, **kwargs: Any) -> str:
        callback._latest_checkpoint_step = callback.step
        return f"step{callback.step}, not saved"

    owner = module.CheckpointerCallback
    wrap(owner, "_save_checkpoint", leave_out)
    # nor is it removed
    wrap_known(owner, ("_remove_checkpoint",), lambda *_, **__: None)


# -- trackers


def watch_wandb(probe: Probe, module: ModuleType) -> None:
    def began(call: Call) -> None:
        run = call.result
        # a run of W&B's disabled mode cannot be continued
        if run is not None and not getattr(run, "disabled", False):
            _note_tracker(probe, "wandb", run.id, run.project, run.name)

    wrap_known(module, ("init",), observed(probe.record, after=began))


def watch_mlflow(probe: Probe, module: ModuleType) -> None:
    def began(call: Call) -> None:
        info = call.result.info
        _note_tracker(probe, "mlflow", info.run_id, info.experiment_id, info.run_name)

    wrap_known(module, ("start_run",), observed(probe.record, after=began))


def watch_trackio(probe: Probe, module: ModuleType) -> None:
    def begin(original: Any, *args: Any, **kwargs: Any) -> Any:
        continued = os.environ.get(TRACKIO_RUN)
        # the name is the second parameter
        is_by_keyword = len(args) < 2
        if continued and is_by_keyword and kwargs.get("name") in (None, continued):
            kwargs["name"] = continued
            kwargs["resume"] = "allow"
        run = original(*args, **kwargs)
        with probe.record.quietly("after trackio.init"):
            _note_tracker(probe, "trackio", run.name, run.project, run.name)
        return run

    wrap_known(module, ("init",), begin)


def _note_tracker(probe: Probe, tracker: str, key: Any, project: Any, name: Any) -> None:
    if not isinstance(key, str) or not key:
        return
    texts = {}
    for field, value in (("project", project), ("name", name)):
        if isinstance(value, str):
            texts[field] = value
    probe.record.write("tracker", tracker=tracker, id=key, **texts)
