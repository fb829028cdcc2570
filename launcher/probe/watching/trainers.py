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

from .hooks import Call, ModuleAction, Replacement, load_file, react, wrap, wrap_if_present
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
                    plugin = getattr(state, "deepspeed_plugin", None)
                    probe.optimizer.saw(item, plugin)

    def prepared(call: Call) -> None:
        items = call.result
        if not isinstance(items, (tuple, list)):
            items = [items]
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
    wrap(owner, "prepare", react(record, before=preparing, after=prepared))
    wrap(owner, "backward", backward)
    wrap_if_present(owner, "clip_grad_norm_", react_to_clipping(probe))
    wrap_if_present(owner, "save_state", react_to_pause(probe, SAVING))
    wrap_if_present(owner, "get_state_dict", react_to_pause(probe, SAVING))
    wrap_if_present(owner, "load_state", react_to_loading(probe))
    wrap_if_present(owner, "accumulate", react_to_accumulation(probe))


def _is_model(item: Any) -> bool:
    return hasattr(item, "named_parameters") and hasattr(item, "forward")


def react_to_clipping(probe: Probe) -> Replacement:
    return react(
        probe.record,
        before=lambda _: probe.before_clipping(),
        after=lambda call: probe.clipped(call.result),
    )


def react_to_pause(probe: Probe, phase: str | None) -> Replacement:
    """A save, an evaluation or an upload between two steps; `phase` as `Probe.rest` takes it."""
    return react(probe.record, before=lambda _: probe.rest(phase))


def react_to_loading(probe: Probe) -> Replacement:
    """A checkpoint, the first argument, is loaded: the steps of the run are counted on."""

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
        if not checkpoint or not isinstance(checkpoint, (str, os.PathLike)):
            return
        path = os.fspath(checkpoint)
        steps = probe.optimizer.steps_done(path)
        probe.process.resume(path, steps)

    return react(probe.record, before=begin, after=resumed)


def react_to_accumulation(probe: Probe) -> Replacement:
    """`Accelerator.accumulate` is around a micro-batch, and around the step of the last one."""

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
        Path(folder, "COMPLETED").write_text("COMPLETED", encoding="utf-8")
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
    step = react(
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
        options = trainer.args
        only_model = options.save_only_model
        # without the optimizer nothing could continue from it
        options.save_only_model = False
        original(trainer, *args, **kwargs)
        options.save_only_model = only_model
        step = trainer.state.global_step
        checkpoint = os.path.join(options.output_dir, f"checkpoint-{step}")
        probe.stop_after_save(step, checkpoint)
        return None

    owner = module.Trainer
    wrap_if_present(owner, "_save_checkpoint", react_to_pause(probe, SAVING))
    wrap_if_present(owner, "evaluate", react_to_evaluation(probe))
    wrap_if_present(owner, "push_to_hub", react_to_pause(probe, None))
    wrap_if_present(owner, "save_model", react_to_saving(probe, folder))
    wrap_if_present(owner, "_load_optimizer_and_scheduler", react_to_loading(probe))
    wrap_if_present(owner, "_maybe_log_save_evaluate", save)
    probe.data.watch_inputs(module)


def react_to_evaluation(probe: Probe) -> Replacement:
    def note(call: Call) -> None:
        metrics = {}
        for name, value in call.result.items():
            if isinstance(value, int | float):
                metrics[name] = value
        step = call.owner.state.global_step
        probe.record.write("evaluation", step=step, metrics=metrics)

    def rest(_: Call) -> None:
        probe.rest(EVALUATION)

    return react(probe.record, before=rest, after=note)


def react_to_saving(probe: Probe, folder: Callable[[Call], Any]) -> Replacement:
    """The final model is written into `folder`; Trainer's checkpoints call it too, and say so."""

    def is_final(call: Call) -> bool:
        return not call.kwargs.get("_internal_call")

    def begin(call: Call) -> None:
        probe.rest(SAVING)
        if is_final(call):
            probe.leave_out_final_save()

    def saved(call: Call) -> None:
        if probe.process.rank == 0:
            note_saved(probe.record, folder(call))
        if is_final(call):
            # the script is about to end, in its own time
            probe.watchdog.enter(None)

    return react(probe.record, before=begin, after=saved)


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

    wrap_if_present(module.CallbackHandler, "on_step_end", end_step)


def watch_pretrained(probe: Probe, module: ModuleType) -> None:
    """Models are loaded, or made of a config, and saved."""

    def loaded(call: Call) -> None:
        model = call.result
        # with `output_loading_info` it is the first of two
        if isinstance(model, tuple):
            model = model[0]
        probe.rotary.restore(model)

    def saved(call: Call) -> None:
        if call.kwargs.get("is_main_process", True):
            path = call.argument(1, "save_directory")
            probe.record.write("saved", path=str(path))
            note_saved(probe.record, path)
        probe.memory.mark("save", again=True)

    owner = module.PreTrainedModel
    load = react(probe.record, after=loaded)
    wrap_if_present(owner, "from_pretrained", load)
    wrap_if_present(owner, "_from_config", load)
    save = react(probe.record, before=lambda _: probe.rest(SAVING), after=saved)
    wrap(owner, "save_pretrained", save)


@functools.cache
def load_digest_module() -> Any:
    return load_file(str(DIGEST), "launch_content")


def note_saved(record: EventLog, folder: Any) -> None:
    """Record the content of a model that was saved, unless it is a checkpoint."""
    if not isinstance(folder, (str, os.PathLike)):
        return
    name = os.fspath(folder)
    path = os.path.abspath(name)
    with record.quietly("saved model"):
        if load_digest_module().CHECKPOINT.search(name):
            return
        files = []
        if os.path.isdir(path):
            files = _read_weights(path)
        record.write("saved_model", path=path, files=files)


def _read_weights(folder: str) -> list[dict[str, object]]:
    """Name, size and digest of each file with weights, as the event `saved_model` has them."""
    digest = load_digest_module()
    files = []
    for name in digest.list_weights(folder):
        content, _ = digest.read_content(Path(folder, name))
        files.append(
            {"name": name, "size": content.size, "method": content.method, "digest": content.digest}
        )
    return files


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
    wrap_if_present(module, "compute_loss", react(probe.record, after=computed))
    _call_watchers(probe, module, probe.caches.watch_reference)


def _call_watchers(probe: Probe, module: ModuleType, *watchers: ModuleAction) -> None:
    """Call all: one that fails, at a commit without what it looks for, does not stop the others."""
    for watch in watchers:
        with probe.record.quietly(f"watching {module.__name__}"):
            watch(module)


def watch_final_save(probe: Probe, module: ModuleType) -> None:
    def folder(call: Call) -> Any:
        # model_utils.py::save_with_accelerate
        return call.argument(3, "output_dir")

    wrap_if_present(module, "push_folder_to_hub", react_to_pause(probe, None))
    wrap_if_present(module, "save_with_accelerate", react_to_saving(probe, folder))


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

    wrap(owner, "__init__", react(probe.record, before=begin, after=end))
    wrap(owner, "train_batch", train)


def watch_olmo_module(probe: Probe, module: ModuleType) -> None:
    """The train module of open-instruct's dpo.py."""

    def built(trained: Any) -> None:
        # dpo.py::main[dp_rank = global_rank]
        degree = int(getattr(trained.dpo_config, "tensor_parallel_degree", 1))
        probe.pairs.alike = max(1, degree)

    def before_batch(call: Call) -> None:
        if not probe.process.testing:
            probe.begin_micro_batch(call.argument(1, "micro_batch"))

    def after_batch(call: Call) -> None:
        probe.pairs.hidden = None
        if not probe.process.testing:
            probe.begin_backward(call.result[0])

    owner = module.DPOTrainModule
    _watch_train_module(probe, owner, built)
    batch = react(probe.record, before=before_batch, after=after_batch)
    wrap(owner, "_compute_microbatch_loss", batch)


def watch_olmo_step(probe: Probe, module: ModuleType) -> None:
    def begin(call: Call) -> None:
        probe.begin_step()
        if getattr(call.owner, "max_grad_norm", None) is None:
            probe.before_optimizer(call.owner.optim)

    owner = module.TransformerTrainModule
    step = react(probe.record, before=begin, after=lambda _: probe.close_step())
    wrap(owner, "optim_step", step)
    wrap_if_present(owner, "_clip_grad_norm", react_to_clipping(probe))


def watch_olmo_training(probe: Probe, module: ModuleType) -> None:
    """OLMo-core's own training of a language model: the model is given all facts about its rows."""

    def forward_ended(call: Call) -> None:
        if not probe.process.testing and hasattr(call.result, "ce_loss"):
            probe.begin_backward(call.result.ce_loss)

    watch_olmo_step(probe, module)
    owner = module.TransformerTrainModule
    _watch_train_module(probe, owner)
    wrap(owner, "model_forward", react(probe.record, after=forward_ended))


def watch_olmo_utils(probe: Probe, module: ModuleType) -> None:
    """The data of this script were tokenised before it began."""

    def prepared(call: Call) -> None:
        probe.data.saw_tokenizer(call.result)
        answer = json.loads(os.environ.get(TOKENISED) or "{}")
        if answer:
            is_hit = answer["state"] == "hit"
            probe.caches.tell("dataset_cache", is_hit, str(answer["path"]))

    wrap_if_present(module, "setup_tokenizer_and_cache", react(probe.record, after=prepared))


def watch_olmo_trainer(probe: Probe, module: ModuleType) -> None:
    """It loads and saves checkpoints; after `fit` the weights are gathered, which may take long."""

    def loaded(call: Call) -> None:
        steps = int(getattr(call.owner, "global_step", 0) or 0)
        if steps:
            checkpoint = str(call.argument(1, "dir"))
            probe.process.resume(checkpoint, steps)

    def fitted(call: Call) -> None:
        trainer = call.owner
        probe.rest()
        if probe.preemption.saving:
            # the checkpointer saves when a run is cancelled, too
            step = int(trainer.global_step)
            name = trainer.checkpointer.checkpoint_dirname(step)
            folder = os.path.join(str(trainer.save_folder), name)
            probe.stop_after_save(step, folder)
        probe.leave_out_final_save()

    owner = module.Trainer
    record = probe.record
    wrap_if_present(owner, "load_checkpoint", react(record, after=loaded))
    wrap_if_present(owner, "save_checkpoint", react_to_pause(probe, SAVING))
    wrap_if_present(owner, "save_checkpoint_async", react_to_pause(probe, SAVING))

    def begin(_: Call) -> None:
        # OLMo-core's memory monitor resets the counters before its first step
        probe.memory.mark("reference")

    wrap(owner, "fit", react(record, before=begin, after=fitted))
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
    wrap_if_present(owner, "_remove_checkpoint", lambda *_, **__: None)


# -- trackers


def watch_wandb(probe: Probe, module: ModuleType) -> None:
    def began(call: Call) -> None:
        run = call.result
        # a run of W&B's disabled mode cannot be continued
        if run is not None and not getattr(run, "disabled", False):
            _note_tracker(probe, "wandb", run.id, run.project, run.name)

    wrap_if_present(module, "init", react(probe.record, after=began))


def watch_mlflow(probe: Probe, module: ModuleType) -> None:
    def began(call: Call) -> None:
        info = call.result.info
        _note_tracker(probe, "mlflow", info.run_id, info.experiment_id, info.run_name)

    wrap_if_present(module, "start_run", react(probe.record, after=began))


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

    wrap_if_present(module, "init", begin)


def _note_tracker(probe: Probe, tracker: str, key: Any, project: Any, name: Any) -> None:
    if not isinstance(key, str) or not key:
        return
    texts = {}
    for field, value in (("project", project), ("name", name)):
        if isinstance(value, str):
            texts[field] = value
    probe.record.write("tracker", tracker=tracker, id=key, **texts)
