"""Rules for open-instruct: what its `__post_init__`s refuse first, then what parses and goes wrong.

Line numbers are those of the pin; tests/test_upstream_facts.py holds them against a checkout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.backends.mixer_rules import RULES as MIXER_RULES
from launcher.backends.mixer_rules import listed, too_few_samples
from launcher.backends.rule import Rule, check, say
from launcher.backends.value_rules import RULES as VALUE_RULES
from launcher.errors import Finding, brief
from launcher.schema import Values, json_fault

# --- what __post_init__ refuses
# --------------------------------------------------------------------


def two_data_sources(values: Values) -> Iterator[Finding]:
    """finetune.py:330, dpo_utils.py:342: beside a list that is never None, both others fail."""
    data = listed(values)
    if values[data] is None:  # a commit whose list has no default: its own `__post_init__` is read
        return
    for key in ("dataset_name", "dataset_mixer"):
        if values[key] is not None:
            yield say(
                "error", "parser", "two-data-sources", key,
                f"`{key}` beside `{data}` is refused, even where `{data}` is not given",
                f"write `{data}: [name, amount, ...]` instead",
            )  # fmt: skip


def beaker_without_push(values: Values) -> Iterator[Finding]:
    """finetune.py:335, dpo_utils.py:347."""
    if values["try_launch_beaker_eval_jobs"] and not values["push_to_hub"]:
        why = "is true" if values.given("try_launch_beaker_eval_jobs") else "defaults to true"
        yield say(
            "error", "parser", "beaker-without-push", "push_to_hub",
            f"`push_to_hub: false` alone is refused: `try_launch_beaker_eval_jobs` {why}",
            "add `try_launch_beaker_eval_jobs: false`",
        )  # fmt: skip


def final_lr_ratio(values: Values) -> Iterator[Finding]:
    """finetune.py:338, finetune.py:340."""
    ratio = values.get("final_lr_ratio")
    if ratio is None:
        return
    if values["lr_scheduler_type"] != "linear":
        yield say(
            "error", "parser", "final-lr-scheduler", "final_lr_ratio",
            "`final_lr_ratio` needs `lr_scheduler_type: linear`, not "
            f"{values['lr_scheduler_type']}",
        )  # fmt: skip
    elif not 1.0 >= ratio >= 0.0:
        yield say(
            "error", "parser", "final-lr-range", "final_lr_ratio",
            f"`final_lr_ratio` is between 0 and 1, not {ratio}",
        )  # fmt: skip


def json_mappings(values: Values) -> Iterator[Finding]:
    """finetune.py:348, dpo_utils.py:353: a text that starts with a brace is read as JSON."""
    for key in ("additional_model_arguments", "optimizer_kwargs"):
        if (fault := json_fault(values.get(key))) is not None:
            yield say("error", "parser", "bad-json", key, f"`{key}` is not JSON: {fault}")


def zero_stage(values: Values) -> Iterator[Finding]:
    """dpo_utils.py:358, dpo_utils.py:360."""
    stage = values["zero_stage"]
    if stage is None:
        return
    if stage not in {0, 1, 2, 3}:
        message = f"`zero_stage` is 0, 1, 2 or 3, not {stage}"
        yield say("error", "parser", "zero-stage", "zero_stage", message)
    elif values["offload_param"] and stage != 3:
        yield say(
            "error", "parser", "offload-without-zero3", "offload_param",
            f"`offload_param` needs `zero_stage: 3`, not {stage}",
        )  # fmt: skip


# --- what parses and then goes wrong
# ---------------------------------------------------------------


def entity_twice(values: Values) -> Iterator[Finding]:
    """finetune.py:438, dpo_tune_cache.py:180 prefix `hf_entity`, or whoever is logged in."""
    repo = values["hf_repo_id"]
    if values["push_to_hub"] and isinstance(repo, str) and "/" in repo:
        entity, _, name = repo.rpartition("/")
        owner = values["hf_entity"] or "<you>"
        yield say(
            "error", "run", "entity-twice", "hf_repo_id",
            f"would be pushed to {owner}/{repo}: the entity is prefixed to `hf_repo_id`",
            f"write `hf_entity: {entity}` and `hf_repo_id: {name}`",
        )  # fmt: skip


def tracker_without_wandb(values: Values) -> Iterator[Finding]:
    """finetune.py:470 asks for wandb's tracker whatever `report_to` says (finetune.py:374)."""
    reported = values["report_to"]
    if not values["with_tracking"] or {"wandb", "all"} & set(reported or ()):
        return
    # the parser drops the default `all` of a list that is none (hf_argparser.py:223)
    what = f"with `report_to: {', '.join(reported)}`" if reported else "without `report_to`"
    yield say(
        "error", "run", "tracking-needs-wandb", "report_to",
        f"`with_tracking` {what} crashes: upstream asks for wandb's tracker",
        "write `report_to: wandb`, or `with_tracking: false`",
    )  # fmt: skip


def report_to_unread(values: Values) -> Iterator[Finding]:
    """dpo_tune_cache.py:123 reports to wandb, whatever `report_to` says."""
    reported = values["report_to"]
    if values["with_tracking"] and reported and "wandb" not in reported:
        yield say(
            "warning", "run", "tracking-needs-wandb", "report_to",
            f"`report_to: {', '.join(reported)}` is not read: this script reports to wandb only",
            "write `report_to: wandb`, or `with_tracking: false`",
        )  # fmt: skip


def no_checkpoints(values: Values) -> Iterator[Finding]:
    """SFT writes none without (finetune.py:974, finetune.py:988); short runs need none."""
    steps = values["max_train_steps"]
    short = isinstance(steps, int) and steps <= 200
    words = values[listed(values)] or []
    counts = [str(amount) for amount in words[1::2]]
    small = bool(counts) and all(c.isdecimal() and int(c) <= 2000 for c in counts)
    if values["checkpointing_steps"] is None and not short and not small:
        yield say(
            "warning", "run", "no-checkpoints", "checkpointing_steps",
            "no checkpoints: whatever stops this run loses all of it",
            "add `checkpointing_steps: epoch`, or a number of steps",
        )  # fmt: skip


def checkpoint_steps_number(values: Values) -> Iterator[Finding]:
    """finetune.py:734: anything but `epoch` goes through int(), then finetune.py:974 divides by it."""
    steps = values["checkpointing_steps"]
    if steps is None or steps == "epoch":
        return
    try:
        number = int(steps)
    except ValueError:
        number = 0
    if number == 0:
        yield say(
            "error", "run", "checkpoint-steps", "checkpointing_steps",
            f"`checkpointing_steps` is `epoch` or a number of steps, not `{brief(steps)}`",
        )  # fmt: skip


def samples_crash(values: Values) -> Iterator[Finding]:
    """dpo_tune_cache.py:393: the reference cache is sized for the full set (dpo_utils.py:501)."""
    limit = values["max_train_samples"]
    # simpo alone needs no reference (dpo_utils.py:88)
    if limit is None or values["loss_type"] == "simpo":
        return
    amounts = [str(amount) for amount in (values[listed(values)] or [])[1::2]]
    if amounts and all(a.isdecimal() for a in amounts) and sum(map(int, amounts)) <= limit:
        return  # it leaves nothing out
    yield say(
        "error", "run", "max-train-samples", "max_train_samples",
        "`max_train_samples` crashes: the reference cache misses the samples left out",
        f"give a number of samples in `{listed(values)}` instead: [name, 200]",
    )  # fmt: skip


# at the end of training the default uploads the model
push_by_default = check(
    "finetune.py:283, dpo_utils.py:159", "push-by-default", "push_to_hub",
    lambda v: v["push_to_hub"] and not v.given("push_to_hub"),
    "the model will be uploaded to the hub: `push_to_hub` defaults to true",
    "write `push_to_hub: false` and `try_launch_beaker_eval_jobs: false`, or true to keep it",
    severity="warning",
)  # fmt: skip
# with `config_name` upstream starts from random weights
no_model = check(
    "finetune.py:548, dpo_tune_cache.py:287", "no-model", "model_name_or_path",
    lambda v: not v["model_name_or_path"]
    and not (v["config_name"] and v["tokenizer_name_or_path"]),
    "no model named", "add `model_name_or_path: <hub name or folder>`",
)  # fmt: skip

_SHARED: tuple[Rule, ...] = (
    two_data_sources, beaker_without_push, json_mappings, no_model, *MIXER_RULES, entity_twice,
    push_by_default, no_checkpoints,
)  # fmt: skip

RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (
        *_SHARED, *VALUE_RULES["sft"], final_lr_ratio, checkpoint_steps_number, tracker_without_wandb,
        # the linear schedule is stretched by 1 / (1 - final_lr_ratio)
        check(
            "finetune.py:358", "final-lr-one", "final_lr_ratio",
            lambda v: v["final_lr_ratio"] == 1.0 and v["lr_scheduler_type"] == "linear",
            "`final_lr_ratio: 1.0` parses and then divides by zero",
            "write `lr_scheduler_type: constant_with_warmup` for a constant rate",
        ),
    ),
    "dpo": (
        *_SHARED, *VALUE_RULES["dpo"], zero_stage, samples_crash, report_to_unread, too_few_samples,
        check(
            "dpo_tune_cache.py:696", "checkpoint-steps", "checkpointing_steps",
            lambda v: v["checkpointing_steps"] == 0,
            "`checkpointing_steps: 0` divides by zero", "write a number of steps",
        ),
        check(
            "dpo_utils.py:326", "packing-separate-forward", "packing",
            lambda v: v["packing"] and not v["concatenated_forward"],
            "`packing` with `concatenated_forward: false` is not implemented upstream",
        ),
    ),
}  # fmt: skip
