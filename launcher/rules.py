"""Rules over several fields at once: what upstream refuses after parsing, crashes on, or misreads.

Each rule is a short generator over `Values`; none edits anything. Layer `parser` repeats upstream's
own `__post_init__`; layer `run` is what would parse and then crash or do something else than it says.
The place in the file is filled in by `stage`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.backends import BACKENDS
from launcher.errors import Finding, Layer, Severity
from launcher.schema import Values

Rule = Callable[[Values], Iterator[Finding]]

LOCAL_DATA = (".jsonl", ".json", ".parquet")


def _say(
    severity: Severity, layer: Layer, code: str, key: str, message: str, help: str | None = None
) -> Finding:
    return Finding(
        severity=severity, layer=layer, code=code, key=f"args.{key}", message=message, help=help
    )


# --- open-instruct: what __post_init__ refuses ------------------------------------------------------


def two_data_sources(values: Values) -> Iterator[Finding]:
    """finetune.py:327-335, dpo_utils.py:341-349: beside a list that is never None, both others fail."""
    listed = BACKENDS["open_instruct"].STAGES[values.schema.stage].names.data
    for key in ("dataset_name", "dataset_mixer"):
        if values[key] is not None:
            yield _say(
                "error", "parser", "two-data-sources", key,
                f"`{key}` beside `{listed}` is refused, even where `{listed}` is not given",
                f"write `{listed}: [name, amount, ...]` instead",
            )  # fmt: skip


def beaker_without_push(values: Values) -> Iterator[Finding]:
    """finetune.py:336, dpo_utils.py:350."""
    if values["try_launch_beaker_eval_jobs"] and not values["push_to_hub"]:
        yield _say(
            "error", "parser", "beaker-without-push", "push_to_hub",
            "`push_to_hub: false` alone is refused: `try_launch_beaker_eval_jobs` defaults to true",
            "add `try_launch_beaker_eval_jobs: false`",
        )  # fmt: skip


def final_lr_ratio(values: Values) -> Iterator[Finding]:
    """finetune.py:338-342."""
    ratio = values.get("final_lr_ratio")
    if ratio is None:
        return
    if values["lr_scheduler_type"] != "linear":
        yield _say(
            "error", "parser", "final-lr-scheduler", "final_lr_ratio",
            f"`final_lr_ratio` needs `lr_scheduler_type: linear`, not {values['lr_scheduler_type']}",
        )  # fmt: skip
    elif not 1.0 >= ratio >= 0.0:
        yield _say(
            "error", "parser", "final-lr-range", "final_lr_ratio",
            f"`final_lr_ratio` is between 0 and 1, not {ratio}",
        )  # fmt: skip


def json_mappings(values: Values) -> Iterator[Finding]:
    """finetune.py:345-352, dpo_utils.py:353-358: a text that starts with a brace is read as JSON."""
    for key in ("additional_model_arguments", "optimizer_kwargs"):
        value = values.get(key)
        if isinstance(value, str) and value.startswith("{"):
            try:
                json.loads(value)
            except ValueError as error:
                yield _say("error", "parser", "bad-json", key, f"`{key}` is not JSON: {error}")


def zero_stage(values: Values) -> Iterator[Finding]:
    """dpo_utils.py:360-364."""
    stage = values["zero_stage"]
    if stage is None:
        return
    if stage not in {0, 1, 2, 3}:
        yield _say(
            "error",
            "parser",
            "zero-stage",
            "zero_stage",
            f"`zero_stage` is 0, 1, 2 or 3, not {stage}",
        )
    elif values["offload_param"] and stage != 3:
        yield _say(
            "error", "parser", "offload-without-zero3", "offload_param",
            f"`offload_param` needs `zero_stage: 3`, not {stage}",
        )  # fmt: skip


# --- open-instruct: what parses and then goes wrong -------------------------------------------------


def no_data(values: Values) -> Iterator[Finding]:
    """SFT would train on a small default set (finetune.py:117); DPO's default is an empty list."""
    listed = BACKENDS["open_instruct"].STAGES[values.schema.stage].names.data
    if not values.given(listed):
        what = f"train on its default {values[listed]}" if values[listed] else "find no data at all"
        yield _say(
            "error", "launch", "no-data", listed,
            f"no data named: upstream would {what}", f"add `{listed}: [name, amount, ...]`",
        )  # fmt: skip


def mixer_amounts(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:2045-2051: with a dot a share, without one a count."""
    listed = BACKENDS["open_instruct"].STAGES[values.schema.stage].names.data
    if not values.given(listed):
        return
    words = values[listed]
    if len(words) % 2:
        yield _say(
            "error", "run", "odd-mixer-list", listed,
            f"`{listed}` alternates names and amounts, but has {len(words)} entries",
            "every set needs its amount: 1.0 is all of it, 200 is 200 samples",
        )  # fmt: skip
        return
    for index in range(0, len(words), 2):
        name, amount = words[index : index + 2]
        yield from _amount(f"{listed}[{index + 1}]", str(name), str(amount))


def _amount(key: str, name: str, amount: str) -> Iterator[Finding]:
    if amount == "1":
        yield _say(
            "warning", "run", "one-sample", key,
            f"the amount 1 is ONE sample of {name}", "1.0 is all of it",
        )  # fmt: skip
        return
    try:
        number = float(amount) if "." in amount else int(amount)
    except ValueError:
        yield _say(
            "error", "run", "mixer-amount", key, f"`{amount}` is no amount for {name}",
            "with a dot it is a share (0.25), without one a number of samples (200)",
        )  # fmt: skip
        return
    if number <= 0:
        yield _say(
            "error", "run", "mixer-amount", key, f"the amount {amount} leaves nothing of {name}"
        )


def missing_data_files(values: Values) -> Iterator[Finding]:
    """A local file in a mixer list; relative paths are relative to where launch was started."""
    listed = BACKENDS["open_instruct"].STAGES[values.schema.stage].names.data
    if not values.given(listed):
        return
    for index, word in enumerate(values[listed][::2]):
        name = str(word)
        if name.endswith(LOCAL_DATA) and not Path(name).expanduser().exists():
            yield _say(
                "warning", "run", "missing-data", f"{listed}[{2 * index}]",
                f"there is no file {name} here", "relative paths start where launch is started",
            )  # fmt: skip


def entity_twice(values: Values) -> Iterator[Finding]:
    """finetune.py:439, dpo_tune_cache.py:185 prefix `hf_entity`, or whoever is logged in."""
    repo = values["hf_repo_id"]
    if values["push_to_hub"] and isinstance(repo, str) and "/" in repo:
        entity, _, name = repo.rpartition("/")
        owner = values["hf_entity"] or "<you>"
        yield _say(
            "error", "run", "entity-twice", "hf_repo_id",
            f"would be pushed to {owner}/{repo}: the entity is prefixed to `hf_repo_id`",
            f"write `hf_entity: {entity}` and `hf_repo_id: {name}`",
        )  # fmt: skip


def push_by_default(values: Values) -> Iterator[Finding]:
    """finetune.py:265, dpo_utils.py:157: the default uploads the model when training has ended."""
    if values["push_to_hub"] and not values.given("push_to_hub"):
        yield _say(
            "warning", "run", "push-by-default", "push_to_hub",
            "the model will be uploaded to the hub: `push_to_hub` defaults to true",
            "write `push_to_hub: false` and `try_launch_beaker_eval_jobs: false`, or true to keep it",
        )  # fmt: skip


def tracker_without_wandb(values: Values) -> Iterator[Finding]:
    """finetune.py:470, dpo_tune_cache.py:212 ask for wandb's tracker whatever `report_to` says."""
    reported = values["report_to"]
    # `None` and "all" let accelerate pick every tracker that is installed
    if values["with_tracking"] and reported and not {"wandb", "all"} & set(reported):
        yield _say(
            "error", "run", "tracking-needs-wandb", "report_to",
            f"`with_tracking` with `report_to: {reported}` crashes: upstream asks for wandb's tracker",
            "add wandb to `report_to`, or write `with_tracking: false`",
        )  # fmt: skip


def no_checkpoints(values: Values) -> Iterator[Finding]:
    """Without `checkpointing_steps` SFT writes none (finetune.py:987); short runs need none."""
    steps = values["max_train_steps"]
    short = isinstance(steps, int) and steps <= 200
    listed = values[BACKENDS["open_instruct"].STAGES[values.schema.stage].names.data] or []
    counts = [str(amount) for amount in listed[1::2]]
    small = bool(counts) and all(c.isdigit() and int(c) <= 2000 for c in counts)
    if values["checkpointing_steps"] is None and not short and not small:
        yield _say(
            "warning", "run", "no-checkpoints", "checkpointing_steps",
            "no checkpoints: whatever stops this run loses all of it",
            "add `checkpointing_steps: epoch`, or a number of steps",
        )  # fmt: skip


def checkpoint_steps_number(values: Values) -> Iterator[Finding]:
    """finetune.py:733: anything but `epoch` goes through int()."""
    steps = values["checkpointing_steps"]
    if steps is not None and str(steps).lower() != "epoch" and not str(steps).lstrip("+").isdigit():
        yield _say(
            "error", "run", "checkpoint-steps", "checkpointing_steps",
            f"`checkpointing_steps` is `epoch` or a number of steps, not `{steps}`",
        )  # fmt: skip


def no_model(values: Values) -> Iterator[Finding]:
    """finetune.py:555, dpo_tune_cache.py:273: a model from scratch is not supported by the scripts."""
    if not values["model_name_or_path"]:
        yield _say(
            "error", "run", "no-model", "model_name_or_path", "no model named",
            "add `model_name_or_path: <hub name or folder>`",
        )  # fmt: skip


def divides_by_zero(values: Values) -> Iterator[Finding]:
    """finetune.py:359: the linear schedule is stretched by 1 / (1 - final_lr_ratio)."""
    if values["final_lr_ratio"] == 1.0 and values["lr_scheduler_type"] == "linear":
        yield _say(
            "error", "run", "final-lr-one", "final_lr_ratio",
            "`final_lr_ratio: 1.0` parses and then divides by zero",
            "write `lr_scheduler_type: constant_with_warmup` for a constant rate",
        )  # fmt: skip


def separate_forward_packed(values: Values) -> Iterator[Finding]:
    """dpo_utils.py:325."""
    if values["packing"] and not values["concatenated_forward"]:
        yield _say(
            "error", "run", "packing-separate-forward", "packing",
            "`packing` with `concatenated_forward: false` is not implemented upstream",
        )  # fmt: skip


def samples_crash(values: Values) -> Iterator[Finding]:
    """dpo_tune_cache.py:394: the reference cache is sized for the full set (dpo_utils.py:496)."""
    if values["max_train_samples"] is not None:
        yield _say(
            "error", "run", "max-train-samples", "max_train_samples",
            "`max_train_samples` crashes: the reference cache misses the samples left out",
            "give a number of samples in `mixer_list` instead: [name, 200]",
        )  # fmt: skip


# --- TRL ---------------------------------------------------------------------------------------------


def trl_no_data(values: Values) -> Iterator[Finding]:
    """trl/scripts/sft.py: one of both must be there."""
    if not values.given("dataset_name") and not values.given("datasets"):
        yield _say(
            "error", "run", "no-data", "dataset_name", "no data named",
            "add `dataset_name: <hub name or folder>`",
        )  # fmt: skip


def trl_liger_lora(values: Values) -> Iterator[Finding]:
    """Measured: 29.2 s against 15.2 s for the same steps (Qwen2.5-7B, one GPU)."""
    if values["use_liger_kernel"] and values["use_peft"]:
        yield _say(
            "warning", "run", "liger-with-lora", "use_liger_kernel",
            "Liger on a LoRA model was measured at half the speed", "write `use_liger_kernel: false`",
        )  # fmt: skip


_OPEN_INSTRUCT: tuple[Rule, ...] = (
    two_data_sources, beaker_without_push, json_mappings, no_model, no_data, mixer_amounts,
    missing_data_files, entity_twice, push_by_default, tracker_without_wandb, no_checkpoints,
)  # fmt: skip

RULES: dict[tuple[str, str], tuple[Rule, ...]] = {
    ("open_instruct", "sft"): (
        *_OPEN_INSTRUCT, final_lr_ratio, divides_by_zero, checkpoint_steps_number,
    ),
    ("open_instruct", "dpo"): (
        *_OPEN_INSTRUCT, zero_stage, separate_forward_packed, samples_crash,
    ),
    ("trl", "sft"): (no_model, trl_no_data, trl_liger_lora),
    ("trl", "dpo"): (no_model, trl_no_data, trl_liger_lora),
}  # fmt: skip


def apply(values: Values) -> Iterator[Finding]:
    """Every finding of every rule for the stage and backend of `values`."""
    for rule in RULES[values.schema.backend, values.schema.stage]:
        yield from rule(values)
