"""Rules for open-instruct's arguments: what its `__post_init__`s refuse, then what parses and goes
wrong.

tests/agreement/test_upstream_facts.py holds what they cite against a checkout.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from launcher.artifacts import chat_template, model_config
from launcher.errors import Finding, Severity, shorten
from launcher.paths import exists
from launcher.rules.premises import asks, where
from launcher.rules.rule import Range, Rule, cites, no_model, outside, say, warn
from launcher.upstream import behaviour
from launcher.upstream.schema import Values, find_json_fault
from launcher.upstream.trainers import find_entry

LOCAL_DATA = (".jsonl", ".json", ".parquet")
# transformers/trainer_utils.py::SchedulerType: those that take nothing but steps
SCHEDULES = (
    "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt"
).split()
# a path that a shell would have changed
_UNEXPANDED = re.compile(r"~|.*\$\{?\w", re.DOTALL)


@where(behaviour.REFUSES_TWO_SOURCES)
@cites(
    "finetune.py::FlatArguments.__post_init__[self.dataset_name is not None and]",
    "dpo_utils.py::DPOExperimentConfig.__post_init__[self.dataset_name is not None and]",
    reviewed=("e6c3044aa620",),
)
def two_data_sources(values: Values) -> Iterator[Finding]:
    """Beside a list that is never None, both others fail; a script that has neither takes none."""
    data = listed(values)
    if values[data] is None:  # a commit whose list has no default: its own `__post_init__` is read
        return
    for key in ("dataset_name", "dataset_mixer"):
        if values.get(key) is not None:
            message = f"`{key}` beside `{data}` is refused, even where `{data}` is not given"
            help = f"write `{data}: [name, amount, ...]` instead"
            yield say("error", "two-data-sources", key, message, help, layer="parser")


@cites(
    "finetune.py::FlatArguments.__post_init__[if self.try_launch_beaker_eval_jobs]",
    "dpo_utils.py::DPOExperimentConfig.__post_init__[if self.try_launch_beaker_eval_jobs]",
    reviewed=("e6c3044aa620",),
)
def beaker_without_push(values: Values) -> Iterator[Finding]:
    if values["try_launch_beaker_eval_jobs"] and not values["push_to_hub"]:
        why = "defaults to true"
        if values.given("try_launch_beaker_eval_jobs"):
            why = "is true"
        message = f"`push_to_hub: false` alone is refused: `try_launch_beaker_eval_jobs` {why}"
        help = "add `try_launch_beaker_eval_jobs: false`"
        yield say("error", "beaker-without-push", "push_to_hub", message, help, layer="parser")


@cites(
    "finetune.py::FlatArguments.__post_init__[if self.lr_scheduler_type]",
    "finetune.py::FlatArguments.__post_init__[if not (1.0 >= self.final_lr_ratio]",
    reviewed=("e6c3044aa620",),
)
def final_lr_ratio(values: Values) -> Iterator[Finding]:
    ratio = values.get("final_lr_ratio")
    if ratio is None:
        return
    if values["lr_scheduler_type"] != "linear":
        message = (
            f"`final_lr_ratio` needs `lr_scheduler_type: linear`, not {values['lr_scheduler_type']}"
        )
        yield say("error", "final-lr-scheduler", "final_lr_ratio", message, layer="parser")
    elif not 1.0 >= ratio >= 0.0:
        message = f"`final_lr_ratio` is between 0 and 1, not {ratio}"
        yield say("error", "final-lr-range", "final_lr_ratio", message, layer="parser")


@cites(
    "finetune.py::FlatArguments.__post_init__[if isinstance(passed_value]",
    "dpo_utils.py::DPOExperimentConfig.__post_init__[loaded_dict = json.loads]",
    reviewed=("e6c3044aa620",),
)
def json_mappings(values: Values) -> Iterator[Finding]:
    """A text that starts with a brace is read as JSON."""
    for key in ("additional_model_arguments", "optimizer_kwargs"):
        fault = find_json_fault(values.get(key))
        if fault is not None:
            yield say("error", "bad-json", key, f"`{key}` is not JSON: {fault}", layer="parser")


@cites(
    "dpo_utils.py::DPOExperimentConfig.__post_init__[if self.zero_stage not]",
    "dpo_utils.py::DPOExperimentConfig.__post_init__[if self.offload_param]",
    reviewed=("e6c3044aa620",),
)
def zero_stage(values: Values) -> Iterator[Finding]:
    stage = values["zero_stage"]
    if stage is None:
        return
    if stage not in {0, 1, 2, 3}:
        message = f"`zero_stage` is 0, 1, 2 or 3, not {stage}"
        yield say("error", "zero-stage", "zero_stage", message, layer="parser")
    elif values["offload_param"] and stage != 3:
        message = f"`offload_param` needs `zero_stage: 3`, not {stage}"
        yield say("error", "offload-without-zero3", "offload_param", message, layer="parser")


def listed(values: Values) -> str:
    return _choose_name(values, "mixer_list", "dataset_mixer_list")


def _choose_name(values: Values, name: str, otherwise: str) -> str:
    """Which of two names an argument has here: it depends on the script and the commit."""
    if name in values:
        return name
    return otherwise


def severity_if_unknown(values: Values) -> Severity:
    """The severity of a name that the pin does not have: another commit may have more of them."""
    if values.schema.tested:
        return "error"
    return "warning"


@cites("finetune.py::FlatArguments[dataset_mixer_list: list]")
def no_data(values: Values) -> Iterator[Finding]:
    """SFT would train on a small default set; DPO's default is an empty list."""
    data = listed(values)
    others = ("dataset_name", "dataset_mixer", "train_file")
    if values[data] is None and any(values.get(other) is not None for other in others):
        return  # a commit that takes its data from there too
    if not values.given(data):
        what = "find no data at all"
        if values[data]:
            what = f"train on its default {values[data]}"
        message = f"no data named: upstream would {what}"
        yield say(
            "error", "no-data", data, message, f"add `{data}: [name, amount, ...]`", layer="launch"
        )


@cites(
    "dataset_transformation.py::load_dataset_configs[frac_or_num_samples = float]",
    reviewed=("e6c3044aa620",),
)
def mixer_amounts(values: Values) -> Iterator[Finding]:
    """With a dot a share, without one a count."""
    data = listed(values)
    if not values.given(data):
        return
    words = values[data]
    if len(words) % 2:
        message = f"`{data}` alternates names and amounts, but has {len(words)} entries"
        help = "every set needs its amount: 1.0 is all of it, 200 is 200 samples"
        yield say("error", "odd-mixer-list", data, message, help)
        return
    for index in range(0, len(words), 2):
        name, amount = map(str, words[index : index + 2])
        yield from _check_amount(f"{data}[{index + 1}]", name, amount)


def _check_amount(key: str, name: str, amount: str) -> Iterator[Finding]:
    is_share = "." in amount
    try:
        number = float(amount) if is_share else int(amount)
    except ValueError:
        help = "with a dot it is a share (0.25), without one a number of samples (200)"
        yield say(
            "error", "mixer-amount", key, f"`{shorten(amount)}` is not an amount for {name}", help
        )
        return
    if number < 0:
        # upstream counts from the end, and draws at random
        # (dataset_transformation.py::DatasetConfig.select_samples[full_repeats = target_size])
        yield say("error", "mixer-amount", key, f"the amount {amount} is below 0, for {name}")
    elif not number > 0:
        yield say("error", "mixer-amount", key, f"the amount {amount} leaves nothing of {name}")
    elif number == 1 and not is_share:
        message = f"the amount {amount} is ONE sample of {name}"
        yield say("warning", "one-sample", key, message, "1.0 is all of it")


@cites("dataset_transformation.py::DatasetConfig.__post_init__[.jsonl]")
def missing_data_files(values: Values) -> Iterator[Finding]:
    """What is no .jsonl or .parquet here is looked up on the hub."""
    data = listed(values)
    if not values.given(data):
        return
    for index, word in enumerate(values[data][::2]):
        name = str(word)
        key = f"{data}[{2 * index}]"
        if not name.endswith(LOCAL_DATA):
            continue
        # upstream expands no `~`
        if not exists(Path(name)):
            message = f"there is no file {shorten(name)} here"
            help = "relative paths start where launch is started; `~` is not expanded"
            yield say("warning", "missing-data", key, message, help)
        elif name.endswith(".json"):
            message = (
                f"{shorten(name)} would be looked up on the hub: only .jsonl and .parquet are read "
                "from disk"
            )
            help = (
                f"`launch data convert {name} -o {Path(name).with_suffix('.jsonl')}` writes one "
                "object a line"
            )
            yield say("error", "json-data", key, message, help)


@asks(behaviour.ONE_SPLIT_A_SET)
@cites(
    "dataset_transformation.py::load_dataset_configs[if len(dataset_mixer_list_splits) == 1]",
    "dataset_transformation.py::load_dataset_configs[if len(dataset_mixer_list_splits) != len]",
    "dataset_transformation.py::load_dataset_configs[dataset_split=dataset_mixer_list_splits]",
    reviewed=("e6c3044aa620",),
)
def mixer_splits(values: Values) -> Iterator[Finding]:
    """One split for all sets, or as many as the list has entries; since #1494, as many as there are
    sets.

    Until then the split of a set is the one at the place of its name; those at the places of
    amounts are not read.
    """
    data = listed(values)
    key = f"{data}_splits"
    entries = values[data] or []
    splits = values[key]
    # of an odd list another rule speaks; with a cache key SFT reads neither
    # (dataset_transformation.py::get_cached_dataset_tulu_with_statistics[dcs = #2])
    if (
        splits is None
        or not entries
        or len(entries) % 2
        or values.get("dataset_config_hash") is not None
    ):
        return
    if values.schema.does(behaviour.ONE_SPLIT_A_SET):
        yield from _check_one_split_a_set(key, entries, splits)
        return
    sets = len(entries) // 2
    if len(splits) not in (1, len(entries)):
        message = (
            f"`{key}` has {len(splits)} entries for {sets} set(s): upstream wants 1, or "
            f"{len(entries)}, as many as `{data}` has entries"
        )
        yield say("error", "mixer-splits", key, message, _explain_splits(key, splits, sets))
        return
    if len(splits) > 1:
        unread = [index for index in range(1, len(splits), 2) if splits[index] != splits[index - 1]]
        for index in unread:
            message = (
                f"`{splits[index]}` is not read: it stands at the place of an amount of `{data}`"
            )
            help = f"the split of {entries[index - 1]} is the entry before, `{splits[index - 1]}`"
            yield say("warning", "mixer-splits", f"{key}[{index}]", message, help)
    yield from _check_splits_of_files(key, entries, splits)


def _check_one_split_a_set(key: str, entries: list[str], splits: list[str]) -> Iterator[Finding]:
    sets = len(entries) // 2
    if len(splits) not in (1, sets):
        message = (
            f"`{key}` has {len(splits)} entries for {sets} set(s): upstream wants 1, or {sets}, "
            "one for each set"
        )
        yield say("error", "mixer-splits", key, message, _explain_set_splits(key, splits, sets))
        return
    of_entries = splits
    if len(splits) > 1:
        of_entries = [split for split in splits for _ in range(2)]
    for fault in _check_splits_of_files(key, entries, of_entries):
        place = int(re.findall(r"\d+", str(fault.key))[-1])
        yield replace(fault, key=f"args.{key}[{place // 2}]")


def _explain_set_splits(key: str, splits: list[str], sets: int) -> str:
    pairs = zip(splits[::2], splits[1::2], strict=False)
    if len(splits) == 2 * sets and all(first == second for first, second in pairs):
        return (
            f"write each split once, as this commit reads them: `{key}: [{', '.join(splits[::2])}]`"
        )
    return f"write one split for all sets, such as `{key}: [train]`"


def _explain_splits(key: str, splits: list[str], sets: int) -> str:
    if len(splits) != sets:
        return f"write one split for all sets, such as `{key}: [train]`"
    if len(set(splits)) == 1:
        return f"write `{key}: [{splits[0]}]`: it holds for every set"
    doubled = ", ".join(f"{split}, {split}" for split in splits)
    return f"repeat each split, once for the name and once for the amount: `{key}: [{doubled}]`"


def _check_splits_of_files(key: str, entries: list[str], splits: list[str]) -> Iterator[Finding]:
    """dataset_transformation.py::DatasetConfig.__post_init__[for local jsonl],
    dataset_transformation.py::DatasetConfig.__post_init__[for local parquet]: a file is one split,
    and its name is train.
    """
    for index in range(0, len(entries), 2):
        place = 0
        if len(splits) > 1:
            place = index
        name = str(entries[index])
        if (
            name.endswith((".jsonl", ".parquet"))
            and splits[place] != "train"
            and exists(Path(name))
        ):
            message = (
                f"`{splits[place]}`: the file {shorten(name)} has the split train alone, upstream "
                "refuses another"
            )
            yield say("error", "mixer-splits", f"{key}[{place}]", message, "write `train`")


@cites(
    "dataset_transformation.py::get_cached_dataset_tulu_with_statistics[dcs = #2]",
    "dataset_transformation.py::LocalDatasetTransformationCache.load_or_transform_dataset[concatenate_datasets]",
    reviewed=("e6c3044aa620",),
)
def foreign_cache_key(values: Values) -> Iterator[Finding]:
    """No data are named beside such a key."""
    key = _choose_name(values, "dataset_config_hash", "config_hash")
    if values[key] is not None:
        message = (
            f"`{key}: {values[key]}` decides what is trained on: `{listed(values)}` is not read"
        )
        yield say("warning", "cache-key", key, message, f"leave out `{key}`")


@cites(
    "finetune.py::main[args.hf_repo_id = f]",
    "dpo_tune_cache.py::main[args.hf_repo_id = f]",
    reviewed=("e6c3044aa620",),
)
def entity_twice(values: Values) -> Iterator[Finding]:
    """`finetune.py` and `dpo_tune_cache.py` prefix `hf_entity`, or whoever is logged in."""
    repo = values["hf_repo_id"]
    if values["push_to_hub"] and isinstance(repo, str) and "/" in repo:
        entity, _, name = repo.rpartition("/")
        owner = values["hf_entity"] or "<you>"
        message = f"would be pushed to {owner}/{repo}: the entity is prefixed to `hf_repo_id`"
        help = f"write `hf_entity: {entity}` and `hf_repo_id: {name}`"
        yield say("error", "entity-twice", "hf_repo_id", message, help)


@cites(
    "finetune.py::main[wandb_tracker = accelerator.get_tracker]",
    "finetune.py::main[log_with]",
    reviewed=("e6c3044aa620",),
)
def tracker_without_wandb(values: Values) -> Iterator[Finding]:
    """`finetune.py` asks for wandb's tracker whatever `report_to` says."""
    reported = values["report_to"]
    if not values["with_tracking"] or {"wandb", "all"} & set(reported or ()):
        return
    # the parser drops the default `all` of a list that is none
    # (transformers/hf_argparser.py::HfArgumentParser._parse_dataclass_field[if field.default_factory is not #1])  # noqa: E501 - one citation
    what = "without `report_to`"
    if reported:
        what = f"with `report_to: {', '.join(reported)}`"
    message = f"`with_tracking` {what} crashes: upstream asks for wandb's tracker"
    help = "write `report_to: wandb`, or `with_tracking: false`"
    yield say("error", "tracking-needs-wandb", "report_to", message, help)


@cites(
    "finetune.py::main[if isinstance(checkpointing_steps]",
    "finetune.py::main[if checkpointing_steps ==]",
    reviewed=("e6c3044aa620",),
)
def no_checkpoints(values: Values) -> Iterator[Finding]:
    """SFT writes none without; short runs need none."""
    steps = values["max_train_steps"]
    counts = _count_rows(values)
    if values["checkpointing_steps"] is not None or (isinstance(steps, int) and steps <= 200):
        return
    if counts and max(counts) <= 2000:
        return
    message = "checkpointing is off: if the run stops, all progress is lost"
    help = "add `checkpointing_steps: epoch`, or a number of steps"
    yield say("warning", "no-checkpoints", "checkpointing_steps", message, help)


def _count_rows(values: Values) -> list[int]:
    """How many rows of each set are trained on; empty where one of them is a share."""
    words = values[listed(values)] or []
    amounts = [str(amount) for amount in words[1::2]]
    if not all(amount.isdecimal() for amount in amounts):
        return []
    return [int(amount) for amount in amounts]


@cites(
    "finetune.py::main[checkpointing_steps = int]",
    "finetune.py::main[if isinstance(checkpointing_steps]",
    "dpo_tune_cache.py::main[if isinstance(checkpointing_steps]",
    reviewed=("e6c3044aa620",),
)
def checkpoint_steps(values: Values) -> Iterator[Finding]:
    """Anything but SFT's `epoch` goes through int(). `finetune.py` and `dpo_tune_cache.py` divide
    by it, and the sign does not change what is divisible.
    """
    key = "checkpointing_steps"
    steps = values[key]
    if steps is None or steps == "epoch":
        return
    try:
        number = int(str(steps))
    except ValueError:
        number = 0
    if number == 0:
        epoch = " or `epoch`" * find_entry(values.schema).epoch_checkpoints
        message = f"`{key}` is a number of steps{epoch}, not `{shorten(steps)}`"
        yield say("error", "checkpoint-steps", key, message)
    elif number < 0:
        often = "every step"
        if number < -1:
            often = f"every {-number} steps"
        message = f"`{key}: {number}` saves a full checkpoint {often}"
        help = "for none, write a number that no step reaches"
        yield say("warning", "checkpoint-sign", key, message, help)


@cites(
    "dpo_tune_cache.py::main[original_dataset_size = len]",
    "dpo_utils.py::build_reference_logprobs_cache[Missing]",
    reviewed=("e6c3044aa620",),
)
def samples_crash(values: Values) -> Iterator[Finding]:
    """The reference cache is sized for the full set."""
    limit = values["max_train_samples"]
    # simpo alone needs no reference
    # (dpo_utils.py::DPOLossType.needs_reference_model[return self in])
    if limit is None or values["loss_type"] == "simpo":
        return
    counts = _count_rows(values)
    if counts and sum(counts) <= limit:
        return  # it leaves nothing out
    message = "`max_train_samples` crashes: the reference cache misses the samples left out"
    help = f"give a number of samples in `{listed(values)}` instead: [name, 200]"
    yield say("error", "max-train-samples", "max_train_samples", message, help)


# at the end of training the default uploads the model
push_by_default = warn(
    "finetune.py::FlatArguments[push_to_hub: bool], dpo_utils.py::HubConfig[push_to_hub: bool]",
    "push-by-default",
    "push_to_hub",
    lambda v: v["push_to_hub"] and not v.given("push_to_hub"),
    "the model will be uploaded to the hub: `push_to_hub` defaults to true",
    "write `push_to_hub: false` and `try_launch_beaker_eval_jobs: false`, or true to keep it",
)
_RANGES: Mapping[str, tuple[Range, ...]] = {
    # finetune.py::main[optimizer = torch.optim.AdamW],
    # dpo_tune_cache.py::main[optimizer = torch.optim.AdamW]
    "learning_rate": (
        Range(lambda n: n >= 0, "error", "the optimizer refuses it"),
        Range(lambda n: n != 0, "warning", "nothing is learnt"),
    ),
    # utils.py::get_optimizer_grouped_parameters[: weight_decay,]: as a group's own it is not looked
    # at by torch
    "weight_decay": (
        Range(
            lambda n: n >= 0, "warning", "the weights grow with every step, which nothing refuses"
        ),
    ),
    # finetune.py::main[if accelerator.sync_gradients and],
    # dpo_tune_cache.py::main[if accelerator.sync_gradients and],
    # dpo.py::main[max_grad_norm = args.max_grad_norm]
    **dict.fromkeys(
        ("clip_grad_norm", "max_grad_norm"),
        (Range(lambda n: n >= 0 or n == -1, "warning", "gradients are not clipped, as with -1"),),
    ),
    # finetune.py::_create_scheduler[num_warmup_steps = int],
    # dpo_tune_cache.py::main[num_warmup_steps]
    "warmup_ratio": (
        Range(
            lambda n: 0 <= n <= 1,
            "warning",
            "it is a share of all steps; above 1 the learning rate never gets to its value",
        ),
    ),
    # dataset_transformation.py::sft_tulu_tokenize_and_truncate_v1[max_length=max_seq_length],
    # dataset_transformation.py::sft_tulu_filter_v1[return any(x != MASKED_TOKEN_VALUE]
    "max_seq_length": (Range(lambda n: n > 0, "error", "it leaves nothing of any row"),),
    # finetune.py::main[r=args.lora_rank], dpo_tune_cache.py::main[r=args.lora_rank]
    "lora_rank": (Range(lambda n: n > 0, "error", "peft refuses it", needs="use_lora"),),
    # finetune.py::main[if args.logging_steps], finetune.py::main[total_fwd_passes =],
    # dpo_tune_cache.py::main[if args.logging_steps],
    # dpo_tune_cache.py::main[= args.gradient_accumulation_steps]
    "logging_steps": (
        Range(lambda n: n != 0, "warning", "no loss is ever printed"),
        Range(lambda n: n >= 0, "warning", "every loss is printed with the wrong sign"),
    ),
    # finetune.py::main[if completed_steps], dpo_tune_cache.py::main[if completed_steps]
    "max_train_steps": (Range(lambda n: n > 0, "warning", "the model is saved untrained"),),
    # finetune.py::main[= accelerator.num_processes]
    "sequence_parallel_size": (
        Range(lambda n: n != 0, "error", "upstream divides by it"),
        Range(lambda n: n >= 0, "warning", "nothing is shared, as with 1"),
    ),
    # utils.py::clean_last_n_checkpoints[if keep_last_n_checkpoints]
    "keep_last_n_checkpoints": (
        Range(lambda n: n != 0, "warning", "each checkpoint is deleted as soon as it is saved"),
    ),
    # dpo_utils.py::dpo_loss[losses = -F.logsigmoid], dpo_utils.py::wpo_loss[-F.logsigmoid(beta],
    # dpo_utils.py::simpo_loss[losses = -F.logsigmoid]
    "beta": (
        Range(math.isfinite, "error", "the loss is not a number"),
        Range(lambda n: not n < 0, "warning", "the rejected answers are preferred"),
        Range(
            lambda n: n != 0,
            "warning",
            "the loss does not tell chosen from rejected answers: no preference is learnt",
            code="zero-beta",
        ),
    ),
    "label_smoothing": (
        Range(
            lambda n: 0 <= n < 0.5,
            "warning",
            "it is a share of pairs; from 0.5 on the rejected answers weigh as much or more",
        ),
    ),
}


@asks(behaviour.GUARDS_NEGATIVE_CLIPPING)
@cites(
    "finetune.py::main[optimizer = torch.optim.AdamW]",
    "dpo_tune_cache.py::main[optimizer = torch.optim.AdamW]",
    reviewed=("e6c3044aa620",),
)
def out_of_range(values: Values) -> Iterator[Finding]:
    """Each number against the ranges of the table above.

    Where a negative limit of the gradient norm does not stand for none, `gradient` speaks of it.
    """
    unguarded = values.schema.does(behaviour.GUARDS_NEGATIVE_CLIPPING) is False
    for finding in outside(values, _RANGES, str):
        if not unguarded or finding.key != "args.max_grad_norm":
            yield finding


@cites(
    "finetune.py::main[args.max_train_steps #2]",
    "dpo_tune_cache.py::main[args.max_train_steps = args.num_epochs #1]",
    "finetune.py::main[args.num_train_epochs = math.ceil]",
    "dpo_tune_cache.py::main[args.num_epochs = math.ceil]",
    reviewed=("e6c3044aa620",),
)
def no_epochs(values: Values) -> Iterator[Finding]:
    """Read where no number of steps is given, and written over, which is why the reads of the
    source alone do not tell.
    """
    key = _choose_name(values, "num_epochs", "num_train_epochs")
    steps = values["max_train_steps"]
    if steps is None and isinstance(values[key], int) and values[key] < 1:
        message = f"`{key}: {values[key]}`: the model is saved untrained"
        yield say("warning", "out-of-range", key, message)
    elif steps is not None and values.given(key):
        message = f"`{key}` does nothing here: `max_train_steps`, which is {steps}, comes before it"
        yield say("warning", "conditional-key", key, message, "delete one of the two lines")


@cites(
    "dataset_transformation.py::get_tokenizer_tulu_v2_2[if tc.chat_template_name in]",
    "dataset_transformation.py::[GET_TOKENIZER_FN]",
    "dataset_transformation.py::get_tokenizer_tulu_v2_1[raise ValueError(f #2]",
    reviewed=("e6c3044aa620",),
)
def unknown_template(values: Values) -> Iterator[Finding]:
    """`dataset_transformation.py` has the functions: one reads no template, one refuses those that
    it does not know.
    """
    name = values["chat_template_name"]
    function = values["get_tokenizer_fn"]
    templates = values.schema.tables.get("CHAT_TEMPLATES", {})
    if name is None or not templates or name in templates or function == "get_tokenizer_simple_v1":
        return
    if chat_template.is_template(name):
        message = (
            "`chat_template_name` holds the text of a template, and upstream takes it for the "
            "name of one"
        )
        yield say(
            "error", "inline-template", "chat_template_name", message, chat_template.PUT_IT_BESIDE
        )
        return
    severity: Severity = "warning"
    what = "silently uses the tokenizer's own"
    if function == "get_tokenizer_tulu_v2_1":
        severity = "error"
        what = "refuses it"
    message = f"there is no chat template `{shorten(name)}`: upstream {what}"
    help = f"one of {', '.join(sorted(templates))}"
    yield say(severity, "unknown-template", "chat_template_name", message, help)


@cites(
    "dataset_transformation.py::TokenizerConfig.tokenizer[return GET_TOKENIZER_FN]",
    "dataset_transformation.py::get_dataset_v1[fn, fn_type = TRANSFORM_FNS]",
    reviewed=("e6c3044aa620",),
)
def unknown_function(values: Values) -> Iterator[Finding]:
    """Upstream looks them up by name."""
    key = _choose_name(values, "transform_fn", "dataset_transform_fn")
    names = [("GET_TOKENIZER_FN", "get_tokenizer_fn", values["get_tokenizer_fn"])]
    names += [
        ("TRANSFORM_FNS", f"{key}[{index}]", name) for index, name in enumerate(values[key] or ())
    ]
    for table, place, name in names:
        functions = values.schema.tables.get(table, {})
        if functions and name not in functions:
            message = f"there is no function `{shorten(name)}`"
            help = f"one of {', '.join(sorted(functions))}"
            yield say("error", "unknown-function", place, message, help)


@cites(
    "finetune.py::main[dtype=torch.bfloat16 #2]",
    "finetune.py::main[attn_implementation #3]",
    "dpo_tune_cache.py::main.load_model[dtype=torch.bfloat16 #2]",
    "dpo_tune_cache.py::main.load_model[attn_implementation #3]",
    reviewed=("e6c3044aa620",),
)
def model_arguments(values: Values) -> Iterator[Finding]:
    """What the model is loaded with wins over the mapping."""
    key = "additional_model_arguments"
    unread = {"attn_implementation"}
    # Liger's loader is given no precision
    if values["use_qlora"] or not values["use_liger_kernel"]:
        unread |= {"dtype", "torch_dtype"}
    for name in sorted(unread & model_config.parse_replacements(values[key]).keys()):
        message = (
            f"`{key}`: `{name}` is not read: attention and bfloat16 are chosen when the model is "
            "loaded"
        )
        help = f"leave out `{name}`"
        if name in values:
            help = f"write `{name}` beside it"
        yield say("warning", "model-arguments-unread", key, message, help)


@cites(
    "dpo_tune_cache.py::main[lr_scheduler = get_scheduler]",
    "transformers/optimization.py::get_scheduler[TYPE_TO_SCHEDULER_FUNCTION]",
    reviewed=("e6c3044aa620",),
)
def scheduler_type(values: Values) -> Iterator[Finding]:
    """`dpo_tune_cache.py`, once the model is loaded: `optimization.py` looks it up, and this
    script hands over numbers of steps alone.
    """
    name = values["lr_scheduler_type"]
    if name not in SCHEDULES and not values["cache_dataset_only"]:
        severity = severity_if_unknown(values)
        message = (
            f"`lr_scheduler_type: {shorten(name)}` crashes: it needs more than the number of steps"
        )
        yield say(
            severity,
            "scheduler-type",
            "lr_scheduler_type",
            message,
            f"one of {', '.join(SCHEDULES)}",
        )


@cites(
    "finetune.py::main[os.makedirs(args.output_dir]",
    "dpo_tune_cache.py::main[os.makedirs(args.output_dir]",
    "finetune.py::main[args.output_dir = os.path.join]",
    reviewed=("e6c3044aa620",),
)
def no_output(values: Values) -> Iterator[Finding]:
    """Without the switch a name is put behind it."""
    if values["output_dir"] == "" and values["do_not_randomize_output_dir"]:
        message = "`output_dir` is empty: a folder without a name cannot be made"
        yield say("error", "no-output", "output_dir", message, "name a folder, or delete the line")


@cites(
    "finetune.py::main[os.makedirs(args.output_dir]",
    "dpo_tune_cache.py::main[os.makedirs(args.output_dir]",
    "finetune.py::main[os.path.abspath]",
    "dpo_tune_cache.py::main[args.local_cache_dir = os.path.abspath]",
    reviewed=("e6c3044aa620",),
)
def unexpanded(values: Values) -> Iterator[Finding]:
    """Upstream takes these paths as they are."""
    cache = _choose_name(values, "dataset_local_cache_dir", "local_cache_dir")
    for key in ("output_dir", cache):
        text = str(values.get(key))
        if values.given(key) and _UNEXPANDED.match(text):
            folder = shorten(os.path.join(".", text))
            message = (
                f"`{key}: {shorten(text)}` would make a folder {folder}: neither `~` nor "
                "variables are expanded"
            )
            yield say("warning", "unexpanded-path", key, message, "write the path in full")


_REFUSED: tuple[Rule, ...] = (two_data_sources, beaker_without_push, json_mappings)
_NAMES: tuple[Rule, ...] = (
    entity_twice,
    push_by_default,
    no_epochs,
    unknown_template,
    unknown_function,
)
OF_THE_HUB: tuple[Rule, ...] = (beaker_without_push, entity_twice, push_by_default)
"""Of `OF_ALL_SCRIPTS` those about scripts that can upload the model."""
# dpo.py has these, too
OF_ALL_SCRIPTS: tuple[Rule, ...] = (
    *_REFUSED,
    no_data,
    mixer_amounts,
    mixer_splits,
    missing_data_files,
    *_NAMES,
)
_SHARED: tuple[Rule, ...] = (
    *OF_ALL_SCRIPTS,
    # with `config_name` upstream starts from random weights
    no_model(
        "finetune.py::main[You are instantiating], dpo_tune_cache.py::main[You are instantiating]",
        lambda v: (
            not v["model_name_or_path"] and not (v["config_name"] and v["tokenizer_name_or_path"])
        ),
        reviewed=("e6c3044aa620",),
    ),
    foreign_cache_key,
    no_checkpoints,
    out_of_range,
    checkpoint_steps,
    model_arguments,
    no_output,
    unexpanded,
    # see transformers/optimization.py::get_scheduler[return schedule_func(optimizer)]
    warn(
        "finetune.py::_create_scheduler[return get_scheduler], "
        "dpo_tune_cache.py::main[lr_scheduler = get_scheduler]",
        "warmup-unread",
        "warmup_ratio",
        lambda v: (
            v["lr_scheduler_type"] == "constant"
            and v.given("warmup_ratio")
            and v["warmup_ratio"] > 0
        ),
        "`warmup_ratio` is not read with `lr_scheduler_type: constant`",
        "write `lr_scheduler_type: constant_with_warmup`",
        reviewed=("e6c3044aa620",),
    ),
    # adapters come with `use_lora` alone
    warn(
        "finetune.py::main[if args.use_lora], dpo_tune_cache.py::main[if args.use_lora]",
        "qlora-without-lora",
        "use_qlora",
        lambda v: v["use_qlora"] and not v["use_lora"],
        "`use_qlora` without `use_lora` adds no adapter: the 4-bit weights are frozen, only "
        "embeddings, norms and the head are trained",
        "add `use_lora: true`",
        reviewed=("e6c3044aa620",),
    ),
    # the output folder is there by then (finetune.py::main[os.makedirs(args.output_dir],
    # dpo_tune_cache.py::main[os.makedirs(args.output_dir]), and wins
    warn(
        "utils.py::get_last_checkpoint_path[if args.output_dir]",
        "resume-unread",
        "resume_from_checkpoint",
        lambda v: v.given("resume_from_checkpoint"),
        "`resume_from_checkpoint` is not read: upstream resumes from what the output folder holds",
        "put the checkpoint, with its file COMPLETED, into the output folder",
    ),
)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (*_SHARED, final_lr_ratio, tracker_without_wandb),
    "dpo": (*_SHARED, scheduler_type, zero_stage, samples_crash),
}
