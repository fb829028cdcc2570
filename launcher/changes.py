"""What is not as it was when a checkpoint was saved -> `Change`, with what a resume would make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher import contents, machine, noops
from launcher.caches import Cache
from launcher.contents import Contents
from launcher.earlier import (
    Attempts,
    Manifest,
    listed,
    mapping,
    number,
    processes,
    recorded,
    value_of,
)
from launcher.errors import Severity, brief
from launcher.machine import Trainer
from launcher.plan import Plan
from launcher.redaction import REDACTED, redact

NAMES: tuple[str, ...] = (
    "gpus", "per_device", "accumulation", "position", "data", "tokenizer", "model", "deepspeed",
    "reference", "pin", "packages", "mixed_precision",
)  # fmt: skip
"""What `--allow-changed-resume` takes, beside the name of any argument."""
BATCH = frozenset({"gpus", "per_device", "accumulation"})
"""Those that decide how rows make a step: `position` allows them too."""

# Where things go, what is shown, how fast it is: none of it moves a weight.
_HARMLESS = re.compile(
    r"output_dir|overwrite_\w+|do_not_randomize_output_dir|exp_name|run_name|logging_\w+|log_\w+|"
    r"report_to|with_tracking|wandb_\w+|trackio_\w+|project|push_to_hub|hf_\w+|hub_\w+|save_\w+|"
    r"checkpointing_steps|keep_last_n_checkpoints|clean_checkpoints_at_end|resume_from_checkpoint|"
    r"\w*local_cache_dir|\w*skip_cache|\w*cache_mode|cache_\w+_only|verbose|try_\w+|oe_eval\w*|eval_\w+|"
    r"do_eval|per_device_eval_batch_size|dataloader_\w+|dataset_num_proc|preprocessing_num_workers|"
    r"gs_bucket_path|timeout|ddp_\w+|disable_tqdm|low_cpu_mem_usage|gradient_checkpointing\w*|"
    r"activation_memory_budget|include_\w+|load_best_model_at_end|metric_for_best_model|"
    r"greater_is_better|torch_empty_cache_steps|skip_memory_metrics|ignore_data_skip|profiling|"
    r"per_device_train_batch_size|gradient_accumulation_steps"
)
_ADAPTER = re.compile(r"lora_\w+|use_dora|use_rslora|use_qlora")
# another class of optimizer, or another layout of its state, finds nothing of its own in what was saved
_OPTIMIZER = re.compile(
    r"optim|optim_args|optim_target_modules|optimizer_type|optimizer_kwargs|use_8bit_optimizer|"
    r"dpo_use_paged_optimizer"
)
_ENGINE = re.compile(
    r"deepspeed|zero_stage|zero_hpz_partition_size|offload_(?:optimizer|param)|fsdp\w*"
)
# torch's AdamW either way; which of the two it is lies in the state too
_ADAMW = ("adamw_torch", "adamw_torch_fused")
# what upstream computes where nothing is said (transformers/training_args.py:809)
_DEFAULTS = {"optim": "adamw_torch_fused"}
_RESTORED = "it comes out of the checkpoint: the new value does nothing"
_ARGUMENTS: tuple[tuple[re.Pattern[str], str, Severity], ...] = (
    (
        re.compile(
            r"model_name_or_path|model_revision|config_name|use_lora|use_peft|use_qlora|use_dora|"
            r"use_rslora|lora_\w+|load_in_\w+|additional_model_arguments|model_init_kwargs"
        ),
        "the checkpoint holds the weights of another model", "error",
    ),
    (
        re.compile(
            r"(?:dataset_)?mixer_list\w*|dataset_\w+|datasets|(?:dataset_)?transform_fn|"
            r"target_columns|config_hash|max_seq_length|max_length|max_train_samples|packing\w*|"
            r"truncation_mode|seed|data_seed|group_by_length|train_sampling_strategy|sft_messages_key|ground_truths_key|"
            r"sequence_parallel_size|tokenizer_\w+|chat_template\w*|add_bos|use_fast|"
            r"use_slow_tokenizer|get_tokenizer_fn|eos_token|pad_token"
        ),
        "the place in the data would be one in other data", "error",
    ),
    (_OPTIMIZER, "the saved state belongs to another optimizer", "error"),
    (_ENGINE, "the saved states may not fit another engine", "error"),
    # they lie in the optimizer's and the schedule's state, which is loaded over what was asked for
    (re.compile(r"learning_rate|weight_decay|adam_\w+|fused_optimizer"), _RESTORED, "warning"),
    (
        re.compile(
            r"lr_scheduler_\w+|warmup_\w+|final_lr_ratio|num_train_epochs|num_epochs|max_steps|"
            r"max_train_steps"
        ),
        "the learning rate goes on with another schedule", "warning",
    ),
    (re.compile(r".+"), "it acts from there on only", "warning"),
)  # fmt: skip
"""What a resume makes of another value of an argument; the first that matches its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that differs; `what` is the name to allow it by, `key` the argument it belongs to.

    `severity` is error where a resume would go on at the wrong place or with other weights, warning where
    the run becomes another one, note where nothing comes of it. `restored` says that upstream takes the
    value of before out of the checkpoint.
    """

    what: str
    before: Any
    after: Any
    effect: str
    severity: Severity
    key: str | None = None
    restored: bool = False

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "what": self.what, "before": self.before, "after": self.after, "effect": self.effect,
            "severity": self.severity,
        }  # fmt: skip

    @property
    def differs(self) -> str:
        """What it was and is."""
        return f"`{self.what}` was {brief(self.before)}, is {brief(self.after)}"

    @property
    def text(self) -> str:
        """One line for people."""
        return self.effect if self.what == "position" else f"{self.differs}: {self.effect}"


def since(
    told: Manifest, attempts: Attempts, trainer: Trainer, caches: Sequence[Cache], now: Contents
) -> Iterator[Change]:
    """Everything that differs between an attempt's manifest and what is about to start.

    `caches` are the cache folders of this start, `now` its contents.
    """
    plan = attempts.plan
    same = {role for role in ("data", "model") if _same(told, now, role)}
    yield from _devices(told, plan)
    yield from _batch(told, attempts)
    yield from _arguments(told, plan, same)
    yield from _contents(told, plan, now)
    yield from _engine(told, plan, now)
    yield from _reference(told, plan, caches)
    yield from _versions(told, plan, trainer)


def _devices(told: Manifest, plan: Plan) -> Iterator[Change]:
    """deepspeed/runtime/engine.py:4749: ZeRO's states belong to one number of processes."""
    was, now = processes(told), plan.processes
    gpus = number(mapping(told.get("plan")).get("gpus"))
    if was is None or (was == now and gpus == plan.gpus):
        return
    severity: Severity = "error"
    if was == now:
        effect, severity = "another kind of device rounds in another way", "warning"
    elif plan.gpus and (plan.stage.options.deepspeed is not None or _own_engine(plan)):
        effect = "its states were saved for that number of processes and cannot be loaded"
    elif plan.stage.options.backend == "open_instruct":
        # finetune.py:709, dpo_tune_cache.py:457
        effect = "the learning rate schedule counts every process and would go on at another place"
    else:
        effect, severity = "the random states of processes that are new begin anew", "warning"
    before, after = (gpus, plan.gpus) if was == now else (was, now)
    yield Change(what="gpus", before=before, after=after, effect=effect, severity=severity)


def _own_engine(plan: Plan) -> bool:
    return plan.values.get("zero_stage") is not None or bool(plan.values.get("fsdp"))


def _batch(told: Manifest, attempts: Attempts) -> Iterator[Change]:
    before, plan = mapping(told.get("plan")), attempts.plan
    was, now = attempts.total(told), attempts.total()
    longer = was is not None and now is not None and was != now
    moved = number(before.get("global")) not in (None, plan.global_batch)
    effect = "the same rows make a step, split in another way"
    if longer:
        effect = f"the run would have {now} steps, not {was}"
    elif moved:
        effect = f"a step took {before.get('global')} rows and takes {plan.global_batch}"
    for what, value in (("per_device", plan.per_device), ("accumulation", plan.accumulation)):
        old = number(before.get(what))
        if old is not None and old != value:
            yield Change(
                what=what, before=old, after=value, effect=effect,
                severity="error" if moved else "note", key=getattr(plan.stage.entry.names, what),
            )  # fmt: skip


def _arguments(told: Manifest, plan: Plan, same: Collection[str]) -> Iterator[Change]:
    adapter = plan.values.get("use_lora") or plan.values.get("use_peft")
    for name in plan.stage.schema.fields:
        if _HARMLESS.fullmatch(name) or not recorded(told, name):
            continue
        was, now = (
            _DEFAULTS.get(name) if value is None else value
            for value in (value_of(told, name), _plain(plan.values[name]))
        )
        # what looks like a token is kept out of a manifest
        if was == now or REDACTED in str(was) or redact({name: now}) != {name: now}:
            continue
        if adapter or not _ADAPTER.fullmatch(name):
            yield _argument(plan, name, was, now, same)


def _argument(plan: Plan, name: str, was: Any, now: Any, same: Collection[str]) -> Change:
    names = plan.stage.entry.names
    effect, severity = next(
        (effect, severity) for pattern, effect, severity in _ARGUMENTS if pattern.fullmatch(name)
    )
    state = _OPTIMIZER.fullmatch(name) or _ENGINE.fullmatch(name)
    if (name == names.model and "model" in same) or (name == names.data and "data" in same):
        effect, severity = "another name for the same content", "note"
    elif state and not noops.acts(plan.values, plan.stage.entry, name):
        effect, severity = "nothing reads it here", "note"
    elif was in _ADAMW and now in _ADAMW:
        effect, severity = _RESTORED, "warning"
    return Change(
        what=name, key=name, before=was, after=now, effect=effect, severity=severity,
        restored=effect == _RESTORED,
    )  # fmt: skip


def _plain(value: Any) -> Any:
    """A value as a manifest holds it."""
    return json.loads(json.dumps(value, default=str))


def _same(told: Manifest, now: Contents, role: str) -> bool:
    was, is_ = (contents.digests(listed, role) for listed in (told.get("contents"), now))
    return bool(was) and was == is_ and None not in was


_EFFECTS: tuple[tuple[str, str, str], ...] = (
    ("data", "data", "the place in the data would be one in other data"),
    ("tokenizer", "tokenizer", "the data would be tokenised in another way"),
    ("model", "model", "the run began from other weights"),
    ("deepspeed", "deepspeed", "its states may not fit another DeepSpeed configuration"),
    ("code", "pin", "upstream's script is another one"),
)


def _contents(told: Manifest, plan: Plan, now: Contents) -> Iterator[Change]:
    base = (
        plan.stage.options.stage == "dpo"
        or plan.values.get("use_lora")
        or plan.values.get("use_peft")
    )
    for role, what, effect in _EFFECTS:
        was, is_ = (contents.digests(listed, role) for listed in (told.get("contents"), now))
        if not was or not is_ or None in (*was, *is_) or was == is_:
            continue
        # without an adapter or a reference the weights come out of the checkpoint alone
        severity: Severity = "warning" if role == "model" and not base else "error"
        yield Change(
            what=what, before=contents.names(listed(told.get("contents")), role),
            after=f"{contents.names(now, role)}, with other content", effect=effect, severity=severity,
        )  # fmt: skip


def _engine(told: Manifest, plan: Plan, now: Contents) -> Iterator[Change]:
    """With DeepSpeed or without, and in which precision; between a CPU and GPUs nothing is compared."""
    gpus = number(mapping(told.get("plan")).get("gpus"))
    if gpus is None or bool(gpus) is not bool(plan.gpus):
        return
    # the first record that was kept of contents tells whether there was none
    if contents.digests(told.get("contents"), "code"):
        was, is_ = (bool(contents.digests(one, "deepspeed")) for one in (told.get("contents"), now))
        if was is not is_:
            yield Change(
                what="deepspeed", before="DeepSpeed" if was else "none", severity="error",
                after="DeepSpeed" if is_ else "none",
                effect="the states of the one are not those of the other",
            )  # fmt: skip
    # TRL's own `bf16` and `fp16` decide there
    before = _precision(told)
    if plan.stage.options.backend == "open_instruct" and before not in (None, plan.mixed_precision):
        yield Change(
            what="mixed_precision", before=before, after=plan.mixed_precision, severity="warning",
            effect="it acts from there on only",
        )  # fmt: skip


def _precision(told: Manifest) -> str | None:
    """What accelerate was told, of a run that accelerate started."""
    words = [str(one) for one in listed(told.get("argv"))]
    at = words.index("--mixed_precision") + 1 if "--mixed_precision" in words else len(words)
    return words[at] if at < len(words) else None


def _reference(told: Manifest, plan: Plan, caches: Sequence[Cache]) -> Iterator[Change]:
    """dpo_tune_cache.py:503, dpo_tune_cache.py:528: loaded first, then made its own reference."""
    now = next((one for one in caches if one.kind == "reference"), None)
    was = next(
        (one for one in listed(told.get("caches")) if mapping(one).get("kind") == "reference"), None
    )
    if now is None or was is None or plan.stage.options.backend != "open_instruct":
        return
    key, before = _plain(dict(now.key)), mapping(was.get("key"))
    other = [name for name in key if name in before and before[name] != key[name]]
    if was.get("digest") != now.digest or other:
        by = ", ".join(other) or "the content of the model, the data or upstream's code"
        yield Change(
            what="reference", before=str(was.get("path")), after=str(now.path), severity="error",
            effect=f"another reference belongs to it ({by}), and the half-trained model would be taken "
            "for it",
        )  # fmt: skip


def _versions(told: Manifest, plan: Plan, trainer: Trainer) -> Iterator[Change]:
    was, now = mapping(told.get("upstream")).get("version"), plan.stage.upstream.version
    if plan.stage.options.backend == "open_instruct" and isinstance(was, str) and was != now:
        effect = "another version may count, tokenise and save in another way"
        yield Change(what="pin", before=was, after=now, effect=effect, severity="error")
    before = mapping(mapping(told.get("trainer")).get("packages"))
    other = [
        name
        for name in machine.DECISIVE
        if before and before.get(name) != trainer.packages.get(name)
    ]
    if other:
        yield Change(
            what="packages", severity="warning",
            before=", ".join(f"{name} {before.get(name) or 'none'}" for name in other),
            after=", ".join(f"{name} {trainer.packages.get(name) or 'none'}" for name in other),
            effect="they may round, tokenise and shuffle in another way",
        )  # fmt: skip
