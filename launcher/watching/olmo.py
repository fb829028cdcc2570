"""OLMo-core's trainer, which dpo.py starts: it calls everything itself, with no accelerate around it."""

from __future__ import annotations

import types
from typing import Any

from .hooks import observed, wrap, wrap_known
from .probe import Probe
from .trainers import clipping, resting


def watch_module(probe: Probe, module: types.ModuleType) -> None:
    """open-instruct's training module: the model, and each micro-batch."""

    def building(*_: Any, **__: Any) -> None:
        probe.memory.mark("load")

    def built(_: Any, trained: Any, *args: Any, **kwargs: Any) -> None:
        probe.saw_model(trained.model)
        probe.optimizer.saw(trained.optim, None)
        probe.gradients.prepared(trained.model)
        # dpo.py:191
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

    def train(original: Any, trained: Any, batch: Any, dry_run: bool = False) -> Any:
        # a batch that only warms up is none of training
        probe.process.testing = probe.process.testing or dry_run
        try:
            return original(trained, batch, dry_run=dry_run)
        finally:
            probe.process.testing = False if dry_run else probe.process.testing

    owner, record = module.DPOTrainModule, probe.record
    wrap(owner, "__init__", observed(record, before=building, after=built))
    micro_batch = observed(record, before=before_batch, after=after_batch)
    wrap(owner, "_compute_microbatch_loss", micro_batch)
    wrap(owner, "train_batch", train)


def watch_step(probe: Probe, module: types.ModuleType) -> None:
    """OLMo-core's own training module: gradients and optimizer."""

    def begin(trained: Any, *_: Any, **__: Any) -> None:
        probe.step_begins()
        if getattr(trained, "max_grad_norm", None) is None:
            probe.before_optimizer(trained.optim)

    owner = module.TransformerTrainModule
    wrap(owner, "optim_step", observed(probe.record, before=begin, after=probe.close_step))
    wrap_known(owner, ("_clip_grad_norm",), clipping(probe))


def watch_trainer(probe: Probe, module: types.ModuleType) -> None:
    """Checkpoints are loaded and saved by it; after `fit` the weights are gathered, which may take long."""

    def loaded(_: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        done = int(getattr(trainer, "global_step", 0) or 0)
        if done:
            folder = args[0] if args else kwargs.get("dir")
            probe.process.resumes(str(folder), done)

    def begin(*_: Any, **__: Any) -> None:
        # OLMo-core's memory monitor sets the counters back before its first step
        probe.memory.mark("reference")

    def over(*_: Any, **__: Any) -> None:
        probe.rests()
        probe.leaves_out_final_save()

    owner, record = module.Trainer, probe.record
    wrap_known(owner, ("load_checkpoint",), observed(record, after=loaded))
    wrap_known(owner, ("save_checkpoint", "save_checkpoint_async"), resting(probe))
    wrap(owner, "fit", observed(record, before=begin, after=over))
