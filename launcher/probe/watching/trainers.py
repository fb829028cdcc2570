"""accelerate, transformers' Trainer, OLMo-core, open-instruct's saving: where training tells what it does.

So do trackers: the run of W&B, MLflow or trackio that training reports to is recorded, so that a resume can continue
it. The first two take it from variables of their own. trackio has none: a run is continued by its name
(`init(name=..., resume="allow")`), which no trainer passes where the stage file names none.
"""

import contextlib
import functools
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .hooks import observed, wrap, wrap_known
from .probe import Probe
from .process import TOKENISED, EventLog
from .watchdog import EVALUATION, SAVING

TRACKIO_RUN = "LAUNCH_TRACKIO_RUN"  # the variable with the name of the trackio run to continue


def watch_accelerate(probe: Probe, module: types.ModuleType) -> None:
    def preparing(accelerator: Any, *items: Any, **_: Any) -> None:
        for item in items:
            with probe.record.quietly("prepare"):
                if _is_model(item):
                    probe.memory.mark("load")
                    probe.saw_model(item)
                elif hasattr(item, "param_groups") and hasattr(item, "zero_grad"):
                    probe.optimizer.saw(item, accelerator)

    def prepared(result: Any, _: Any, *items: Any, **__: Any) -> None:
        for item in result if isinstance(result, (tuple, list)) else (result,):
            with probe.record.quietly("prepared"):
                if hasattr(item, "zero_optimization_stage"):
                    probe.optimizer.saw_engine(item)
                if _is_model(item):
                    probe.gradients.prepared(item)
                    # an engine may cast the whole model
                    probe.rotary.restore(item)
                    probe.rotary.report(item)
        if any(map(_is_model, items)):
            probe.memory.mark("prepare")

    def backward(original: Any, accelerator: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        probe.backward_begins(loss)
        result = original(accelerator, loss, *args, **kwargs)
        probe.backward_ended(accelerator)
        return result

    owner = module.Accelerator
    wrap(owner, "prepare", observed(probe.record, before=preparing, after=prepared))
    wrap(owner, "backward", backward)
    wrap_known(owner, ("clip_grad_norm_",), clipping(probe))
    wrap_known(owner, ("save_state", "get_state_dict"), resting(probe, SAVING))
    wrap_known(owner, ("load_state",), resuming(probe))
    wrap_known(owner, ("accumulate",), stepping(probe))


def stepping(probe: Probe) -> Callable[..., Any]:
    """For `Accelerator.accumulate`, which holds one micro-batch, and the optimizer step of the last one."""

    @contextlib.contextmanager
    def accumulate(original: Any, accelerator: Any, *models: Any) -> Iterator[None]:
        with original(accelerator, *models):
            yield
        if accelerator.sync_gradients:
            _end_step_of_script(probe, accelerator)

    return accumulate


def _end_step_of_script(probe: Probe, accelerator: Any) -> None:
    """Save as the loops of open-instruct do (finetune.py::main[if isinstance(checkpointing_steps]), if that was
    requested; then SystemExit.
    """
    if not probe.preemption.reached(probe.process.at):
        return
    # not before: the variables that are looked at stay alive, and batches are large
    loop = _variables_of_loop()
    if loop is None:
        return
    # the loop counts this step behind here
    step, options = loop["completed_steps"] + 1, loop["args"]
    if step >= options.max_train_steps:
        return
    probe.is_to_stop(step)
    folder = os.path.join(options.output_dir, f"step_{step}")
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with open(os.path.join(folder, "COMPLETED"), "w", encoding="utf-8") as mark:
            mark.write("COMPLETED")
    probe.stops_after_save(step, folder)


def _variables_of_loop() -> dict[str, Any] | None:
    """The variables of the script's training loop that is running; None where none of open-instruct's is."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "main" and "completed_steps" in frame.f_code.co_varnames:
            return frame.f_locals
        frame = frame.f_back
    return None


def _several(*actions: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
    """All of these; one that fails, at a commit that lacks what it looks for, keeps none of the others back."""

    def watch(module: types.ModuleType) -> None:
        faults: list[Exception] = []
        for action in actions:
            try:
                action(module)
            except Exception as fault:
                faults.append(fault)
        if faults:
            raise faults[0]

    return watch


def watch_data_sets(probe: Probe, module: types.ModuleType) -> None:
    _several(probe.caches.watch_maps, probe.data.watch_filters)(module)


def watch_tokenising(probe: Probe, module: types.ModuleType) -> None:
    _several(probe.caches.watch_dataset, probe.data.watch_transformation)(module)


def watch_preparation(probe: Probe, module: types.ModuleType) -> None:
    probe.data.watch_preparation(module)


def watch_pairs(probe: Probe, module: types.ModuleType) -> None:
    _several(probe.caches.watch_reference, functools.partial(_watch_forward_of_pairs, probe))(module)


def _watch_forward_of_pairs(probe: Probe, module: types.ModuleType) -> None:
    probe.data.watch_pairs(module, lambda: probe.tally)

    def computed(result: Any, *_: Any, **__: Any) -> None:
        _, chosen, rejected = result
        probe.tally.rewards(chosen, rejected)

    wrap_known(module, ("compute_loss",), observed(probe.record, after=computed))


def _is_model(item: Any) -> bool:
    return hasattr(item, "named_parameters") and hasattr(item, "forward")


def watch_optimizer(probe: Probe, module: types.ModuleType) -> None:
    """accelerate's wrapper steps in every micro-batch and acts in the last one."""
    step = observed(probe.record, before=probe.before_optimizer, after=probe.close_step)
    wrap(module.AcceleratedOptimizer, "step", step)


def watch_trainer(probe: Probe, module: types.ModuleType) -> None:
    def folder(trainer: Any, output_dir: Any = None, *_: Any, **__: Any) -> Any:
        return output_dir or trainer.args.output_dir

    wrap_known(module.Trainer, ("_save_checkpoint",), resting(probe, SAVING))
    wrap_known(module.Trainer, ("evaluate",), evaluating(probe))
    wrap_known(module.Trainer, ("push_to_hub",), resting(probe, None))
    wrap_known(module.Trainer, ("save_model",), saving(probe, folder))
    wrap_known(module.Trainer, ("_load_optimizer_and_scheduler",), resuming(probe))

    def save(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not probe.preemption.saving:
            return original(trainer, *args, **kwargs)
        only_model = trainer.args.save_only_model
        # without the optimizer nothing could continue from it
        trainer.args.save_only_model = False
        original(trainer, *args, **kwargs)
        trainer.args.save_only_model = only_model
        step = trainer.state.global_step
        probe.stops_after_save(step, os.path.join(trainer.args.output_dir, f"checkpoint-{step}"))

    wrap_known(module.Trainer, ("_maybe_log_save_evaluate",), save)
    probe.data.watch_inputs(module)


def watch_callbacks(probe: Probe, module: types.ModuleType) -> None:
    """What a step of Trainer leads to is decided by callbacks; whoever speaks last has his way."""

    def step_ended(original: Any, handler: Any, args: Any, state: Any, control: Any) -> Any:
        control = original(handler, args, state, control)
        # behind the last step the training is about to end by itself
        if control.should_training_stop or not probe.is_to_stop(state.global_step):
            return control
        control.should_save = True
        control.should_training_stop = True
        # it may take longer than there is time
        control.should_evaluate = False
        return control

    wrap_known(module.CallbackHandler, ("on_step_end",), step_ended)


def watch_final_save(probe: Probe, module: types.ModuleType) -> None:
    def folder(*args: Any, **kwargs: Any) -> Any:
        # model_utils.py::save_with_accelerate
        return kwargs["output_dir"] if "output_dir" in kwargs else args[3]

    wrap_known(module, ("push_folder_to_hub",), resting(probe, None))
    wrap_known(module, ("save_with_accelerate",), saving(probe, folder))


def watch_pretrained(probe: Probe, module: types.ModuleType) -> None:
    """A model is loaded, or made of a config, before any pass of it."""

    def loaded(result: Any, *_: Any, **__: Any) -> None:
        # with `output_loading_info` the model is the first of two
        probe.rotary.restore(result[0] if isinstance(result, tuple) else result)

    wrap_known(module.PreTrainedModel, ("from_pretrained", "_from_config"), observed(probe.record, after=loaded))
    watch_saving(probe, module)


def watch_saving(probe: Probe, module: types.ModuleType) -> None:
    def saved(_: Any, _model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("is_main_process", True):
            probe.record.write("saved", path=str(save_directory))
            with probe.record.quietly("saved model"):
                note_saved(probe.record, save_directory)
        probe.memory.mark("save", again=True)

    def begin(*_: Any, **__: Any) -> None:
        probe.rests(SAVING)

    save = observed(probe.record, before=begin, after=saved)
    wrap(module.PreTrainedModel, "save_pretrained", save)


@functools.cache
def digest_module() -> Any:
    path = Path(__file__).resolve().parents[2] / "artifacts" / "digest.py"
    spec = importlib.util.spec_from_file_location("launch_content", path)
    assert spec is not None and spec.loader is not None
    # a dataclass looks its module up
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def note_saved(record: EventLog, folder: Any) -> None:
    """Fingerprint a model that has just been saved; a checkpoint is none of the final ones."""
    if not isinstance(folder, (str, os.PathLike)) or digest_module().CHECKPOINT.search(os.fspath(folder)):
        return
    path = os.path.abspath(os.fspath(folder))
    names = digest_module().weights(path) if os.path.isdir(path) else ()
    found = [(name, digest_module().read(Path(path, name))[0]) for name in names]
    files = [{"name": name, "size": one.size, "method": one.method, "digest": one.digest} for name, one in found]
    record.write("saved_model", path=path, files=files)


def resting(probe: Probe, phase: str | None) -> Callable[..., Any]:
    def begin(*_: Any, **__: Any) -> None:
        probe.rests(phase)

    return observed(probe.record, before=begin)


def evaluating(probe: Probe) -> Callable[..., Any]:
    def begin(*_: Any, **__: Any) -> None:
        probe.rests(EVALUATION)

    def note(metrics: Any, trainer: Any, *_: Any, **__: Any) -> None:
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        probe.record.write("evaluation", step=trainer.state.global_step, metrics=numbers)

    return observed(probe.record, before=begin, after=note)


def saving(probe: Probe, folder: Callable[..., Any]) -> Callable[..., Any]:
    """For what writes the final model into `folder`; Trainer's checkpoints call it too, and say so."""

    def begin(*_: Any, **kwargs: Any) -> None:
        probe.rests(SAVING)
        if not kwargs.get("_internal_call"):
            probe.leaves_out_final_save()

    def saved(_: Any, *args: Any, **kwargs: Any) -> None:
        if not probe.process.rank:
            note_saved(probe.record, folder(*args, **kwargs))
        if not kwargs.get("_internal_call"):
            # the script is about to end, in its own time
            probe.watchdog.enter(None)

    return observed(probe.record, before=begin, after=saved)


def resuming(probe: Probe) -> Callable[..., Any]:
    """For what loads a checkpoint, given as the first argument; afterwards its steps are counted."""

    def checkpoint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if args else next(iter(kwargs.values()), None)

    def begin(_: Any, *args: Any, **kwargs: Any) -> None:
        # Trainer calls it without a checkpoint too
        if checkpoint(args, kwargs) is not None or not (args or kwargs):
            probe.process.resumed = True

    def resumed(_: Any, _owner: Any, *args: Any, **kwargs: Any) -> None:
        path = checkpoint(args, kwargs)
        if isinstance(path, (str, os.PathLike)):
            path = os.fspath(path)
            probe.process.resumes(path, probe.optimizer.steps_done(path))

    return observed(probe.record, before=begin, after=resumed)


def marking(probe: Probe, phase: str) -> Callable[..., object]:
    return lambda *_, **__: probe.memory.mark(phase)


def clipping(probe: Probe) -> Callable[..., Any]:
    return observed(probe.record, before=probe.before_clipping, after=probe.clipped)


# -- OLMo-core's trainer: it calls everything itself, with no accelerate around it


def _saw_olmo_module(probe: Probe, trained: Any) -> None:
    """Watch the model and the optimizer of a train module that has been built."""
    probe.saw_model(trained.model)
    probe.optimizer.saw(trained.optim, None)
    probe.gradients.prepared(trained.model)


def warming_up(probe: Probe) -> Callable[..., Any]:
    """For `train_batch`: a batch that only warms up is none of training."""

    def train(original: Any, trained: Any, batch: Any, dry_run: bool = False) -> Any:
        probe.process.testing = probe.process.testing or dry_run
        try:
            return original(trained, batch, dry_run=dry_run)
        finally:
            probe.process.testing = False if dry_run else probe.process.testing

    return train


def watch_olmo_module(probe: Probe, module: types.ModuleType) -> None:
    def built(_: Any, trained: Any, *args: Any, **kwargs: Any) -> None:
        _saw_olmo_module(probe, trained)
        # dpo.py::main[dp_rank = global_rank]
        degree = getattr(trained.dpo_config, "tensor_parallel_degree", 1)
        probe.pairs.alike = max(1, int(degree))
        probe.memory.mark("prepare")

    def before_batch(_: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> None:
        if not probe.process.testing:
            probe.micro_batch_begins(micro_batch)

    def after_batch(result: Any, *_: Any, **__: Any) -> None:
        probe.pairs.hidden = None
        if not probe.process.testing:
            probe.backward_begins(result[0])

    owner, record = module.DPOTrainModule, probe.record
    wrap(owner, "__init__", observed(record, before=marking(probe, "load"), after=built))
    wrap(owner, "_compute_microbatch_loss", observed(record, before=before_batch, after=after_batch))
    wrap(owner, "train_batch", warming_up(probe))


def watch_olmo_step(probe: Probe, module: types.ModuleType) -> None:
    def begin(trained: Any, *_: Any, **__: Any) -> None:
        probe.step_begins()
        if getattr(trained, "max_grad_norm", None) is None:
            probe.before_optimizer(trained.optim)

    owner = module.TransformerTrainModule
    wrap(owner, "optim_step", observed(probe.record, before=begin, after=probe.close_step))
    wrap_known(owner, ("_clip_grad_norm",), clipping(probe))


def watch_olmo_utils(probe: Probe, module: types.ModuleType) -> None:
    """The tokenizer of a script whose data were tokenised before it began, and whether they were there already."""

    def prepared(tokenizer: Any, *_: Any, **__: Any) -> None:
        probe.data.saw_tokenizer(tokenizer)
        answer = json.loads(os.environ.get(TOKENISED) or "{}")
        if answer:
            probe.caches.tell("dataset_cache", answer["state"] == "hit", str(answer["path"]))

    wrap_known(module, ("setup_tokenizer_and_cache",), observed(probe.record, after=prepared))


def watch_olmo_training(probe: Probe, module: types.ModuleType) -> None:
    """OLMo-core's own training of a language model: it calls the model with all that it knows of the rows."""
    watch_olmo_step(probe, module)

    def built(_: Any, trained: Any, *args: Any, **kwargs: Any) -> None:
        _saw_olmo_module(probe, trained)
        probe.memory.mark("prepare")

    def forward_ended(result: Any, *_: Any, **__: Any) -> None:
        if not probe.process.testing and hasattr(result, "ce_loss"):
            probe.backward_begins(result.ce_loss)

    owner, record = module.TransformerTrainModule, probe.record
    wrap(owner, "__init__", observed(record, before=marking(probe, "load"), after=built))
    wrap(owner, "model_forward", observed(record, after=forward_ended))
    wrap(owner, "train_batch", warming_up(probe))


def watch_olmo_trainer(probe: Probe, module: types.ModuleType) -> None:
    """Checkpoints are loaded and saved by it; after `fit` the weights are gathered, which may take long."""

    def loaded(_: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        done = int(getattr(trainer, "global_step", 0) or 0)
        if done:
            folder = args[0] if args else kwargs.get("dir")
            probe.process.resumes(str(folder), done)

    def over(_: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        probe.rests()
        if probe.preemption.saving:
            # the checkpointer saves when a run is cancelled, too
            step = int(trainer.global_step)
            folder = trainer.checkpointer.checkpoint_dirname(step)
            probe.stops_after_save(step, os.path.join(str(trainer.save_folder), folder))
        probe.leaves_out_final_save()

    def step_over(complete: bool, trainer: Any) -> bool:
        # it is asked after each step, and before the first
        if complete or not probe.process.step or not probe.is_to_stop(int(trainer.global_step)):
            return complete
        trainer.cancel_run("a checkpoint was requested", no_sync=True)
        return True

    owner, record = module.Trainer, probe.record
    complete = vars(owner).get("training_complete")
    if isinstance(complete, property) and complete.fget is not None:
        is_complete = complete.fget
        owner.training_complete = property(lambda trainer: step_over(is_complete(trainer), trainer))
    wrap_known(owner, ("load_checkpoint",), observed(record, after=loaded))
    wrap_known(owner, ("save_checkpoint", "save_checkpoint_async"), resting(probe, SAVING))
    # OLMo-core's memory monitor sets the counters back before its first step
    wrap(owner, "fit", observed(record, before=marking(probe, "reference"), after=over))


def watch_olmo_checkpoints(probe: Probe, module: types.ModuleType) -> None:
    """OLMo-core saves a state before the first step and after the last; of a trial nobody wants one."""
    if probe.settings.final_save:
        return

    def leave_out(_: Any, callback: Any, *args: Any, **kwargs: Any) -> str:
        callback._latest_checkpoint_step = callback.step
        return f"step{callback.step}, not saved"

    owner = module.CheckpointerCallback
    wrap(owner, "_save_checkpoint", leave_out)
    # what was not saved is not removed, either
    wrap_known(owner, ("_remove_checkpoint",), lambda *_, **__: None)


def watch_wandb(probe: Probe, module: types.ModuleType) -> None:
    def began(run: Any, *_: Any, **__: Any) -> None:
        # a run of W&B's disabled mode is none that could be continued
        if run is not None and not getattr(run, "disabled", False):
            _note(probe, "wandb", run.id, project=run.project, name=run.name)

    wrap_known(module, ("init",), observed(probe.record, after=began))


def watch_mlflow(probe: Probe, module: types.ModuleType) -> None:
    def began(run: Any, *_: Any, **__: Any) -> None:
        _note(probe, "mlflow", run.info.run_id, project=run.info.experiment_id, name=run.info.run_name)

    wrap_known(module, ("start_run",), observed(probe.record, after=began))


def watch_trackio(probe: Probe, module: types.ModuleType) -> None:
    def begin(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        continued = os.environ.get(TRACKIO_RUN)
        # the name is the second parameter
        if continued and len(args) < 2 and kwargs.get("name") in (None, continued):
            kwargs = {**kwargs, "name": continued, "resume": "allow"}
        run = original(*args, **kwargs)
        with probe.record.quietly("after trackio.init"):
            _note(probe, "trackio", run.name, project=run.project, name=run.name)
        return run

    wrap_known(module, ("init",), begin)


def _note(probe: Probe, tracker: str, key: Any, *, project: Any, name: Any) -> None:
    if not isinstance(key, str) or not key:
        return
    shown = {"project": project, "name": name}
    texts = {field: value for field, value in shown.items() if isinstance(value, str)}
    probe.record.write("tracker", tracker=tracker, id=key, **texts)
