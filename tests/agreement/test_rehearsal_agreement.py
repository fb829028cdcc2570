"""Rules against rehearsals: what one refuses and the other does not is known by name.

Random arguments of a small stage of each trainer; `N=200 SEED=7` tries others.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from real_training import needs_open_instruct, needs_trl

from launcher.config import load
from launcher.planning.collect import judge_request
from launcher.planning.request import Request
from launcher.workflows.rehearse.ask import Servers, describe_error
from launcher.workflows.rehearse.attempts import Attempts

SEED = int(os.environ.get("SEED", "20261124"))
COUNT = int(os.environ.get("N", "10"))

Arguments = dict[str, Any]
Pool = dict[str, tuple[Any, ...]]
"""Values for each argument, right and wrong ones."""

POOLS: dict[str, Pool] = {
    "trl": {
        "learning_rate": (-1, 0, 1e-5, "fast"),
        "max_length": (0, 64, 128, None),
        "lr_scheduler_type": ("cosine", "cosinus", "constant", "cosine_with_min_lr"),
        "lr_scheduler_kwargs": ({"min_lr": 1e-6}, {"num_cycles": 1}),
        "warmup_steps": (0, 0.1, -1, 3),
        "weight_decay": (-0.1, 0.0, 0.1),
        "max_grad_norm": (-1, 0, 1.0),
        "seed": (-1, 7, 2**33),
        "optim": ("adamw_torch", "sgd", "adafactor", "nonsense"),
        "gradient_checkpointing": (True, False),
        "gradient_checkpointing_kwargs": ({"use_reentrant": False}, {"foo": 1}),
        "eval_strategy": ("no", "steps", "epoch", "often"),
        "eval_steps": (1, 2.5, 0),
        "load_best_model_at_end": (True,),
        "metric_for_best_model": ("loss", "bleu"),
        "save_strategy": ("no", "epoch", "best"),
        "save_steps": (0, 3, 2.5),
        "logging_steps": (0, 1, 0.5),
        "dataset_train_split": ("train", "nowhere", "train[:10]"),
        "dataset_num_proc": (-1, 1, 2),
        "dataloader_num_workers": (0, 1, -1),
        "dataloader_prefetch_factor": (2,),
        "dataloader_persistent_workers": (True,),
        "dataloader_drop_last": (True,),
        "pad_token": ("<|endoftext|>", "<nothing>"),
        "report_to": ("none", "wandbb", "tensorboard"),
        "use_peft": (True, False),
        "lora_r": (0, 4),
        "lora_dropout": (0.0, 1.5),
        "lora_target_modules": (
            ["q_proj", "v_proj"],
            ["nothing"],
            ["all-linear"],
            ["q_proj"],
            [".*q_proj"],
        ),
        "dtype": ("float32", "bfloat16", "half"),
        "model_init_kwargs": ({"foo": 1}, {"use_cache": False}),
        "max_steps": (-1, 0, 5),
        "num_train_epochs": (0, 1, 0.5),
        "group_by_length": (True,),
        "neftune_noise_alpha": (5.0, -1.0),
        "label_smoothing_factor": (0.1,),
        "torch_empty_cache_steps": (0, 2),
        "accelerator_config": ({"split_batches": True}, {"nonsense": 1}),
    },
    "trl sft": {
        "packing": (True, False),
        "packing_strategy": ("bfd", "wrapped", "best"),
        "padding_free": (True,),
        "assistant_only_loss": (True,),
        "completion_only_loss": (True, False),
        "eos_token": ("<nothing>",),
        "dataset_text_field": ("text", "nowhere"),
        "dataset_kwargs": ({"skip_prepare_dataset": True},),
        "chat_template_path": ("/nowhere/x.jinja",),
        "loss_type": ("nll", "dft", "nonsense"),
    },
    "trl dpo": {
        "loss_type": (["sigmoid"], ["ipo"], ["orpo"], ["exo_pair"], ["sigmoid", "sft"]),
        "loss_weights": ([1.0, 0.5], [1.0]),
        "beta": (0.1, -0.1),
        "label_smoothing": (0.1, 0.0),
        "f_divergence_type": ("reverse_kl", "js_divergence", "kl"),
        "use_weighting": (True,),
        "precompute_ref_log_probs": (True,),
        "sync_ref_model": (True,),
        "padding_free": (True,),
        "train_sampling_strategy": ("group_by_length", "random"),
        "truncation_mode": ("keep_end", "middle"),
    },
    "open_instruct": {
        "learning_rate": (0.0, 1e-5, -1.0),
        "max_seq_length": (64, 256, 0),
        "warmup_ratio": (0.1, 0.0, 2.0),
        "lr_scheduler_type": ("linear", "cosine", "cosinus", "constant"),
        "weight_decay": (0.0, 0.1),
        "num_epochs": (1, 2),
        "seed": (1, -1),
        "chat_template_name": ("tulu", "nonsense", "olmo"),
        "use_lora": (True,),
        "lora_rank": (4, 0),
        "gradient_checkpointing": (True, False),
        "logging_steps": (1, 0),
        "checkpointing_steps": ("epoch", "500", "x"),
        "add_bos": (True,),
        "use_slow_tokenizer": (True, False),
        "tokenizer_name_or_path": ("/nowhere",),
        "preprocessing_num_workers": (1,),
        "gradient_accumulation_steps": (1, 2),
        "per_device_train_batch_size": (1, 2),
        "max_train_samples": (8,),
        "nonsense": (1,),
    },
    "open_instruct sft": {
        "reduce_loss": ("mean", "sum", "max"),
        "packing": (True,),
        "clip_grad_norm": (-1.0, 1.0),
        "fused_optimizer": (True, False),
        "dataset_mixer_list_splits": (["train"], ["nowhere"]),
        "dataset_target_columns": (["input_ids", "labels", "attention_mask"], ["nothing"]),
        "dataset_transform_fn": (
            ["sft_tulu_tokenize_and_truncate_v1", "sft_tulu_filter_v1"],
            ["nothing", "x"],
        ),
        "load_balancing_loss": (True,),
        "timeout": (1800,),
    },
    "open_instruct dpo": {
        "loss_type": ("dpo", "dpo_norm", "simpo", "wpo", "nonsense"),
        "beta": (0.1, 0.5),
        "packing": (True,),
        "concatenated_forward": (True, False),
        "max_grad_norm": (1.0,),
        "label_smoothing": (0.0, 0.1),
        "mixer_list_splits": (["train"], ["nowhere"]),
        "transform_fn": (
            ["preference_tulu_tokenize_and_truncate_v1", "preference_tulu_filter_v1"],
        ),
        "dpo_use_paged_optimizer": (True,),
        "use_8bit_optimizer": (True,),
    },
}

# What rules refuse and a rehearsal does not, by code, and why.
NO_SUCH_NAME = "the rehearsal leaves out names that the parser does not know"
RULES_ALONE = {
    "unknown-key": NO_SUCH_NAME,
    "removed-key": NO_SUCH_NAME,
    "renamed-key": NO_SUCH_NAME,
    "checkpoint-steps": "a rehearsal saves no checkpoints",
    "report-unknown": "a rehearsal has no tracker",
}
# What a rehearsal refuses and rules leave to it: an argument, and what the trainer says of it.
TRAINERS = {
    "chat_template_path": "Repo id must be",
    "tokenizer_name_or_path": "Repo id must",
    "dataloader_num_workers": "num_workers option should be",
    "dataloader_persistent_workers": "persistent_workers",
    "dataset_kwargs": "No columns in the dataset",
    "dataset_mixer_list_splits": "Only train split",
    "f_divergence_type": "divergence",
    "gradient_checkpointing_kwargs": "foo",
    "label_smoothing": "label_smoothing",
    "learning_rate": "change no weight",
    "load_balancing_loss": "aux_loss",
    "lora_dropout": "dropout probability",
    "lora_r": "r` should be a positive",
    "lora_target_modules": "Target modules",
    "loss_type": "",
    "lr_scheduler_kwargs": "unexpected keyword",
    "lr_scheduler_type": "min_lr",
    "metric_for_best_model": "metric_for_best",
    "mixer_list_splits": "Only train split",
    "model_init_kwargs": "unexpected keyword",
    "accelerator_config": "nonsense",
    "neftune_noise_alpha": "uniform_ expects",
    "num_train_epochs": "change no weight",
    "save_strategy": "metric_for_best_model",
    "seed": "Seed must be",
    "sync_ref_model": "sync_ref_model",
    "eos_token": "vocabulary",
    "pad_token": "vocabulary",
    "train_sampling_strategy": "infer lengths",
    "dataset_num_proc": "num_proc",
    "lora_rank": "r` should be a positive",
    "use_weighting": "use_weighting",
    "warmup_ratio": "change no weight",
}


def is_left_to_trainer(args: Arguments, refusal: str) -> bool:
    """Whether one of these arguments is known to be refused so by the trainer alone."""
    return any(name in TRAINERS and TRAINERS[name] in refusal for name in args)


def small_stage(backend: str, stage: str, assets: Path) -> Arguments:
    if backend == "trl":
        return {
            "model_name_or_path": f"{assets}/model",
            "dataset_name": f"{assets}/data/{stage}",
            "max_length": 128,
            "bf16": False,
        }
    mixer = "dataset_mixer_list" if stage == "sft" else "mixer_list"
    return {
        "model_name_or_path": f"{assets}/model",
        "chat_template_name": "tulu",
        "max_seq_length": 256,
        mixer: [f"{assets}/data/{stage}/train.jsonl", "100"],
        "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
    }


def drawn_arguments(backend: str, stage: str) -> Iterator[Arguments]:
    chance = random.Random(f"{SEED} {backend} {stage}")
    pool = {**POOLS[backend], **POOLS[f"{backend} {stage}"]}
    for _ in range(COUNT):
        count = chance.randint(1, 3)
        names = chance.sample(sorted(pool), count)
        yield {name: chance.choice(pool[name]) for name in names}


def write_stage(path: Path, backend: str, stage: str, args: Arguments) -> None:
    lines = [f"stage: {stage}", f"backend: {backend}", "deepspeed: none", "args:"]
    for name, value in args.items():
        lines.append(f"  {name}: {load.spell_override(value)}")
    path.write_text("\n".join(lines) + "\n")


def refusal_of(attempts: Attempts) -> str:
    """Why the rehearsal of a stage ends in a refusal; "" where it does not."""
    response = attempts.trials.run(attempts.tried)
    if response.phase is None:
        return "its process ended"
    if response.refusal is not None:
        return describe_error(response.refusal)
    attempts.parse_what_is_left_out()
    for finding in attempts.findings:
        return finding.message
    return ""


@dataclass
class Rehearsals:
    """Rehearsals of stages that share a small model."""

    servers: Servers
    model: str | None = None

    def refusal(self, path: Path) -> tuple[set[str], str]:
        """The codes of the errors that rules find in a stage, and why its rehearsal refuses it."""
        judged, trainer = judge_request(Request(stage=None, config=path))
        assert judged.schema is not None
        assert judged.upstream is not None
        codes = {finding.code for finding in judged.findings if finding.severity == "error"}
        server = self.servers.of(
            trainer, judged.schema.backend, judged.schema.key, judged.upstream.root
        )
        attempts = Attempts(replace(judged, findings=()), server)
        if self.model is None:
            attempts.make_small_model()
            self.model = attempts.trials.model
        attempts.trials.model = self.model
        return codes, refusal_of(attempts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "stage"),
    [
        pytest.param("trl", "sft", marks=needs_trl),
        pytest.param("trl", "dpo", marks=needs_trl),
        pytest.param("open_instruct", "sft", marks=needs_open_instruct),
        pytest.param("open_instruct", "dpo", marks=needs_open_instruct),
    ],
)
def test_rules_and_rehearsals_refuse_the_same(
    backend: str, stage: str, demo_assets: Path, tmp_path: Path
) -> None:
    base = small_stage(backend, stage, demo_assets)
    path = tmp_path / "stage.yaml"
    differences = []
    with Servers() as servers:
        rehearsals = Rehearsals(servers)
        for args in drawn_arguments(backend, stage):
            write_stage(path, backend, stage, {**base, **args})
            codes, refusal = rehearsals.refusal(path)
            if not refusal and codes - RULES_ALONE.keys():
                differences.append(f"{args}: the rules alone refuse it: {sorted(codes)}")
            if refusal and not codes and not is_left_to_trainer(args, refusal):
                differences.append(f"{args}: the trainer alone refuses it: {refusal[:200]}")
    assert not differences, "\n".join(differences)
