"""OLMo-core's trainer, which dpo.py starts: it calls everything itself, with no accelerate around it."""

from __future__ import annotations

import types
from typing import Any

from .hooks import wrap, wrap_known
from .probe import Probe
from .trainers import clipping, resting


def watch_module(probe: Probe, module: types.ModuleType) -> None:
    """open-instruct's training module: the model, and each micro-batch."""

    def build(original: Any, trained: Any, *args: Any, **kwargs: Any) -> Any:
        probe.memory.mark("load")
        result = original(trained, *args, **kwargs)
        with probe.record.quietly("train module"):
            probe.saw_model(trained.model)
            probe.optimizer.saw(trained.optim, None)
            probe.gradients.prepared(trained.model)
            # dpo.py:191
            degree = getattr(trained.dpo_config, "tensor_parallel_degree", 1)
            probe.pairs.alike = max(1, int(degree))
            probe.memory.mark("prepare")
        return result

    def micro(original: Any, trained: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        testing = probe.process.testing
        if not testing:
            with probe.record.quietly("micro-batch"):
                probe.micro_batch_begins(micro_batch)
        result = original(trained, micro_batch, *args, **kwargs)
        probe.pairs.told = None
        if not testing:
            probe.backward_begins(result[0])
        return result

    def train(original: Any, trained: Any, batch: Any, dry_run: bool = False) -> Any:
        # a batch that only warms up is none of training
        probe.process.testing = probe.process.testing or dry_run
        try:
            return original(trained, batch, dry_run=dry_run)
        finally:
            probe.process.testing = False if dry_run else probe.process.testing

    owner = module.DPOTrainModule
    wrap(owner, "__init__", build)
    wrap(owner, "_compute_microbatch_loss", micro)
    wrap(owner, "train_batch", train)


def watch_step(probe: Probe, module: types.ModuleType) -> None:
    """OLMo-core's own training module: gradients and optimizer."""

    def step(original: Any, trained: Any, *args: Any, **kwargs: Any) -> Any:
        with probe.record.quietly("gradients"):
            probe.step_begins()
            if getattr(trained, "max_grad_norm", None) is None:
                probe.before_optimizer(trained.optim)
        result = original(trained, *args, **kwargs)
        with probe.record.quietly("step"):
            probe.close_step()
        return result

    wrap(module.TransformerTrainModule, "optim_step", step)
    wrap_known(module.TransformerTrainModule, ("_clip_grad_norm",), clipping(probe))


def watch_trainer(probe: Probe, module: types.ModuleType) -> None:
    """Checkpoints are loaded and saved by it; after `fit` the weights are gathered, which may take long."""

    def load(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(trainer, *args, **kwargs)
        with probe.record.quietly("resume"):
            done = int(getattr(trainer, "global_step", 0) or 0)
            if done:
                given = args[0] if args else kwargs.get("dir")
                probe.process.resumes(str(given), done)
        return result

    def fit(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        # OLMo-core's memory monitor sets the counters back before its first step
        probe.memory.mark("reference")
        result = original(trainer, *args, **kwargs)
        probe.rests()
        probe.leaves_out_final_save()
        return result

    wrap_known(module.Trainer, ("load_checkpoint",), load)
    wrap_known(module.Trainer, ("save_checkpoint", "save_checkpoint_async"), resting(probe))
    wrap(module.Trainer, "fit", fit)
