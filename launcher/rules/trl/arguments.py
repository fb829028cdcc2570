"""Rules for TRL: what parses and then stops, or does nothing, in its trainers, by the arguments
alone.

What its `__post_init__`s refuse is in `trl_parser_rules`. What a rehearsal shows, and is neither
common nor silent, has no rule: names of metrics, schedules, tasks, losses, modules. Line numbers
are those of the pinned pair; tests/agreement/test_upstream_facts.py holds them against it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from operator import itemgetter

from launcher.errors import Finding, shorten
from launcher.rules.rule import (
    Range,
    Rule,
    check,
    cites,
    no_model,
    number,
    outside,
    plain,
    say,
    unread,
    warn,
)
from launcher.rules.trl import mixture, parser
from launcher.rules.trl.resolved import inline, prepared, target_modules, words
from launcher.upstream.schema import Values

# names between commas or spaces: no module has either, and no pattern is made of such
_SEVERAL = re.compile(r"[\w.-]+(?:\s*,\s*|\s+)[\w.,\s-]*")

RANGES: Mapping[str, tuple[Range, ...]] = {
    # torch/optim/adam.py::Adam.__init__[if not 0.0 <= lr]
    "learning_rate": (
        Range(lambda n: n >= 0, "error", "torch's optimizers refuse it, and none learns with it"),
        Range(lambda n: n != 0, "warning", "nothing is learnt"),
    ),
    # transformers/trainer.py::Trainer.create_optimizer[: self.args.weight_decay]: as a group's own
    # it is not looked at by torch
    "weight_decay": (
        Range(
            lambda n: n >= 0, "warning", "the weights grow with every step, which nothing refuses"
        ),
    ),
    # transformers/trainer.py::Trainer._run_epoch[if self.args.max_grad_norm]
    "max_grad_norm": (Range(lambda n: n >= 0, "warning", "gradients are not clipped, as with 0"),),
    # torch/nn/modules/dropout.py::_DropoutNd.__init__[if p < 0 or p > 1],
    # peft/tuners/lora/layer.py::LoraLayer.update_layer[if lora_dropout]
    "lora_dropout": (
        Range(lambda n: n != 1, "warning", "nothing reaches the adapter", needs="use_peft"),
    ),
    "lora_alpha": (
        Range(lambda n: n != 0, "warning", "the adapter counts for nothing", needs="use_peft"),
    ),
    # trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[-F.logsigmoid(self.beta * delta_score]
    # and the other losses: the same as in open-instruct
    "beta": (
        Range(math.isfinite, "error", "the loss is not a number"),
        Range(lambda n: not -math.inf < n < 0, "warning", "the rejected answers are preferred"),
    ),
}


@cites("transformers/trainer.py::Trainer._run_epoch[if self.args.max_grad_norm]")
def out_of_range(values: Values) -> Iterator[Finding]:
    """Each number against the ranges of the table above."""
    for finding in outside(values, RANGES):
        if finding.key != "args.beta" or _has_comparing_loss(values):
            yield finding


@cites(
    "transformers/trainer.py::Trainer.set_initial_training_values[epoch_based = max_steps]",
    "transformers/trainer.py::Trainer._inner_training_loop[for epoch in range]",
)
def no_steps(values: Values) -> Iterator[Finding]:
    """Below 0 epochs are counted; `trainer.py` goes through them."""
    key = "num_train_epochs"
    steps = number(values["max_steps"])
    epochs = number(values[key])
    if steps is None or epochs is None:
        return
    if steps <= 0 and epochs <= 0:
        message = f"`{key}: {plain(epochs)}`: the model is saved untrained"
        yield say("warning", "out-of-range", key, message)
    elif steps == 0:
        message = "`max_steps: 0`: one step is trained, and no more"
        yield say(
            "warning", "out-of-range", "max_steps", message, f"delete the line, and `{key}` decides"
        )
    elif steps > 0 and values.given(key):
        message = (
            f"`{key}` does nothing here: `max_steps`, which is {plain(steps)}, comes before it"
        )
        yield say("warning", "conditional-key", key, message, "delete one of the two lines")


@cites("transformers/training_args.py::TrainingArguments.get_warmup_steps[int(self.warmup_steps]")
def endless_warmup(values: Values) -> Iterator[Finding]:
    """From 1 on it is a number of steps."""
    warmup = number(values["warmup_steps"])
    steps = number(values["max_steps"])
    if warmup is None or steps is None or values["lr_scheduler_type"] == "constant":
        return
    if warmup >= 1 and 0 < steps < warmup + 1:
        message = f"`warmup_steps: {plain(warmup)}`: with `max_steps: {plain(steps)}` "
        message += "the learning rate never gets to its value"
        help = "below 1 it is a share of all steps: `warmup_steps: 0.1`"
        yield say("warning", "out-of-range", "warmup_steps", message, help)


@cites(
    "trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[sl = slice(None]",
    "trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[sl = slice(-args.max_length]",
    "trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[dataset = pack_dataset]",
    "trl/trainer/dpo_trainer.py::DataCollatorForPreference.torch_call[sl = slice(None]",
    "trl/trainer/dpo_trainer.py::DataCollatorForPreference.torch_call[sl = slice(-self.max_length]",
    "trl/trainer/dpo_trainer.py::DPOTrainer._prepare_dataset[dataset = dataset.filter]",
)
def no_length(values: Values) -> Iterator[Finding]:
    length = number(values["max_length"])
    if length is not None and length <= 0 and not prepared(values):
        message = (
            f"`max_length: {plain(length)}` leaves nothing of a row, or cuts its end off, however "
            "long it is"
        )
        yield say(
            "error",
            "out-of-range",
            "max_length",
            message,
            'write `max_length: "none"` for rows as they are',
        )


@cites("trl/scripts/sft.py::main[model_init_kwargs.update]")
def model_set_twice(values: Values) -> Iterator[Finding]:
    """The mapping wins over what the other arguments say of the model's loading."""
    key = "model_init_kwargs"
    kwargs = inline(values[key]) or {}
    for name in ("model_revision", "dtype", "attn_implementation", "trust_remote_code"):
        inner = name.removeprefix("model_")
        if inner in kwargs and values.given(name) and kwargs[inner] != values[name]:
            message = f"`{name}` does nothing here: `{key}` has a `{inner}` of its own"
            yield say("warning", "conditional-key", name, message, "keep one of them")
    # transformers/modeling_utils.py::PreTrainedModel.from_pretrained[torch_dtype = kwargs.pop]: the
    # old name counts without the new one, which is always given
    if "torch_dtype" in kwargs and "dtype" not in kwargs:
        message = f"`{key}`: `torch_dtype` is not read beside `dtype`, which is {values['dtype']}"
        yield say("warning", "conditional-key", key, message, "write `dtype` in its place")


@cites("trl/trainer/sft_trainer.py::SFTTrainer.__init__[and args.dataset_kwargs.get]")
def dataset_names(values: Values) -> Iterator[Finding]:
    """`sft_trainer.py` reads a single one."""
    key = "dataset_kwargs"
    others = sorted((inline(values[key]) or {}).keys() - {"skip_prepare_dataset"})
    if values.schema.tested and others:
        message = f"`{key}`: `{shorten(others[0])}` is not read, only `skip_prepare_dataset`"
        yield say("warning", "conditional-key", key, message, "leave it out")


@cites(
    "trl/trainer/model_config.py::ModelConfig.__post_init__[if hasattr(self.lora_target_modules]"
)
def lora_targets(values: Values) -> Iterator[Finding]:
    """A single word is a pattern, and peft wants it to match a module.

    Which modules the model has is PEFT's to say, in a rehearsal.
    """
    key = "lora_target_modules"
    targets = target_modules(values)
    if not values["use_peft"]:
        return
    # a word without dots or stars is the name of no module inside of another
    # but the output layer of most models stands outside of all others
    inner = len(targets) == 1 and targets[0] != "lm_head" and re.fullmatch(r"\w+", targets[0])
    if inner and not values["lora_target_parameters"]:
        message = (
            f"`{key}: {shorten(targets[0])}`: a single word is a pattern for whole names, and "
            "matches none"
        )
        yield say(
            "error",
            "lora-targets",
            key,
            message,
            f"write `{key}: .*{targets[0]}`, or a list of several",
        )
    for target in targets:
        if _SEVERAL.fullmatch(target):
            names = ", ".join(filter(None, re.split(r"[,\s]+", target)))
            message = (
                f"`{key}: {shorten(target)}` is one name, which no module has: nothing is trained "
                "for it"
            )
            yield say("error", "lora-targets", key, message, f"write a list: `{key}: [{names}]`")
            return


# numbers that all losses read but that of SFT
# (trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[-F.logsigmoid(self.beta * delta_score]), and
# those that few do: trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[epsilon = torch.tensor],
# trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[per_sequence_loss = (clean_loss_term],
# trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[-F.logsigmoid(self.beta * delta) * (1 #1],
# trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[log_ratio_modulation = torch.sigmoid],
# trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[batch_loss = -chosen_per_token_logps]
_READ_BY: Mapping[str, frozenset[str] | None] = {
    **dict.fromkeys(("beta", "ld_alpha", "f_divergence_type")),
    "label_smoothing": frozenset({"exo_pair", "robust", "aot", "aot_unpaired"}),
    "discopop_tau": frozenset({"discopop"}),
}


def _list_losses(values: Values) -> list[str]:
    return words(values["loss_type"])


def _has_comparing_loss(values: Values) -> bool:
    return any(loss != "sft" for loss in _list_losses(values))


@cites("trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[for loss_type, loss_weight]")
def unread_numbers(values: Values) -> Iterator[Finding]:
    """Each loss reads its own numbers, and the others do nothing."""
    if not values.schema.tested:
        return
    losses = {*_list_losses(values)}
    for key, readers in _READ_BY.items():
        if readers is None:
            is_read = _has_comparing_loss(values)
            by = "any loss of pairs"
        else:
            is_read = not losses.isdisjoint(readers)
            by = " or ".join(sorted(readers))
        if (
            values.given(key)
            and values[key] not in (values.schema.fields[key].default, None)
            and not is_read
        ):
            message = (
                f"`{key}` does nothing here: the loss {', '.join(sorted(losses))} does not read it"
            )
            help = f"it is read by {by}: delete the line, or name another `loss_type`"
            yield say("warning", "conditional-key", key, message, help)


@cites(
    "trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[per_sequence_loss = (ipo_delta]",
    "trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[winner_margin_error = (chosen_logratios]",
)
def zero_beta(values: Values) -> Iterator[Finding]:
    """`dpo_trainer.py` divides by it; the others multiply what they compare with it."""
    if values["beta"] != 0 or not _has_comparing_loss(values):
        return
    for loss in _list_losses(values):
        if loss in ("ipo", "sppo_hard"):
            yield say("error", "zero-beta", "beta", f"`beta: 0` divides by zero in the loss {loss}")
            return
    message = (
        "`beta: 0`: the loss does not tell chosen from rejected answers: no preference is learnt"
    )
    yield say("warning", "zero-beta", "beta", message)


def _make_switch_rule(cited: str, switch: str, key: str) -> Rule:
    help = f"add `{switch}: true`, or delete the line"
    return unread(cited, key, itemgetter(switch), f"where `{switch}` is set", help)


_EVALUATION = """
    do_eval eval_steps eval_delay eval_packing per_device_eval_batch_size load_best_model_at_end
    metric_for_best_model greater_is_better
""".split()


@cites("trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[When packing is]")
def packing_without_length(values: Values) -> Iterator[Finding]:
    """Sets that are ready are not packed."""
    if values["max_length"] is not None or prepared(values):
        return
    if values["packing"]:
        key = "packing"
    elif values["eval_strategy"] != "no" and values["eval_packing"]:
        key = "eval_packing"
    else:
        return
    message = f"`{key}` fills rows up to `max_length`, which is none"
    yield say("error", "packing-without-length", key, message, "add `max_length: 4096`")


def _streams_without_steps(values: Values, key: str) -> bool:
    """trl/scripts/sft.py::main[elif dataset_args.datasets]: `datasets` wins over `dataset_name`,
    and each has a switch of its own.
    """
    switch = "dataset_streaming"
    if values.get("datasets"):
        switch = "streaming"
    return key == switch and bool(values.get(key)) and not (number(values["max_steps"]) or -1) > 0


_SHARED: tuple[Rule, ...] = (
    *parser.RULES,
    *mixture.RULES,
    *(
        check(
            "transformers/trainer.py::Trainer._validate_args[not has_length]: a stream has no "
            "length.",
            "stream-without-steps",
            key,
            partial(_streams_without_steps, key=key),
            f"`{key}` gives no number of rows: the number of steps must be given",
            "add `max_steps: <number of steps>`",
        )
        for key in ("dataset_streaming", "streaming")
    ),
    check(
        "transformers/trainer.py::Trainer.__init__[os.makedirs(self.args.output_dir] makes this "
        "folder.",
        "no-output",
        "output_dir",
        lambda v: v["output_dir"] == "",
        "`output_dir` is empty: a folder without a name cannot be made",
        "name a folder, or delete the line",
    ),
    out_of_range,
    no_steps,
    endless_warmup,
    no_length,
    model_set_twice,
    lora_targets,
    no_model(
        "trl/scripts/sft.py::main[model=model_args.model_name_or_path] hands the trainer None."
    ),
    check(
        (
            "trl/scripts/sft.py::main[raise ValueError], "
            "trl/scripts/dpo.py::main[raise ValueError]: one of both must be there."
        ),
        "no-data",
        "dataset_name",
        lambda v: not v["dataset_name"] and not v.get("datasets"),
        "no data named",
        "add `dataset_name: <hub name or folder>`, or `datasets:` with a `path` each",
    ),
    warn(
        "Measured: 29.2 s against 15.2 s for the same steps (Qwen2.5-7B, one GPU).",
        "liger-with-lora",
        "use_liger_kernel",
        lambda v: v["use_liger_kernel"] and v["use_peft"],
        "Liger on a LoRA model was measured at half the speed",
        "write `use_liger_kernel: false`",
    ),
    warn(
        "transformers/trainer.py::Trainer._maybe_log_save_evaluate[if self.args.save_strategy]",
        "best-without-eval",
        "save_strategy",
        lambda v: v["save_strategy"] == "best" and v["eval_strategy"] == "no",
        "`save_strategy: best` saves no checkpoint: `eval_strategy` is no",
        "add `eval_strategy: steps`",
    ),
    warn(
        "transformers/trainer_callback.py::DefaultFlowCallback.on_step_end[and state.save_steps]",
        "out-of-range",
        "save_steps",
        lambda v: (
            v["save_strategy"] == "steps"
            and number(v["save_steps"]) is not None
            and v["save_steps"] <= 0
        ),
        "`save_steps: {save_steps}`: there is no checkpoint before the end of training",
        'write a number of steps, or `save_strategy: "no"`',
    ),
    warn(
        "transformers/optimization.py::get_scheduler[return schedule_func(optimizer)]",
        "warmup-unread",
        "warmup_steps",
        lambda v: v["lr_scheduler_type"] == "constant" and v["warmup_steps"],
        "`warmup_steps` is not read with `lr_scheduler_type: constant`",
        "write `lr_scheduler_type: constant_with_warmup`",
    ),
    check(
        (
            "transformers/trainer.py::Trainer.train[if isinstance(resume_from_checkpoint], "
            "transformers/trainer.py::Trainer._load_from_checkpoint[Can]: as a flag, "
            "true is the name of a folder."
        ),
        "resume-word",
        "resume_from_checkpoint",
        lambda v: str(v["resume_from_checkpoint"]).lower() in ("true", "false"),
        "`resume_from_checkpoint: {resume_from_checkpoint}` would be looked up as a folder",
        "name the checkpoint's folder, or delete the line",
    ),
    check(
        "transformers/trainer_utils.py::validate_quantization_for_training[You cannot perform]",
        "quantised-whole",
        "load_in_4bit",
        # both at once is refused earlier
        lambda v: bool(v["load_in_4bit"]) != bool(v["load_in_8bit"]) and not v["use_peft"],
        "`load_in_4bit` and `load_in_8bit` need `use_peft`: quantised weights cannot be trained "
        "themselves",
        "add `use_peft: true`",
    ),
    check(
        (
            "accelerate/utils/dataclasses.py::DeepSpeedPlugin.__post_init__[zero_optimization #1] "
            "reads both: launch's is checked, planned with and started."
        ),
        "own-deepspeed",
        "deepspeed",
        itemgetter("deepspeed"),
        "TRL's own `deepspeed` is not taken: launch reads DeepSpeed's config from `deepspeed:` "
        "beside `args:`",
        "move the line out of `args:`",
        layer="launch",
    ),
    warn(
        "transformers/trainer.py::Trainer.save_model[FULL_STATE_DICT]",
        "fsdp-unsaved",
        "fsdp_config",
        lambda v: v["fsdp"] and "SHARDED_STATE_DICT" in str(v["fsdp_config"]).upper(),
        "with `state_dict_type: SHARDED_STATE_DICT` no model is saved when training has ended, "
        "checkpoints apart",
        "write `state_dict_type: FULL_STATE_DICT`",
    ),
    unread(
        "transformers/optimization.py::get_scheduler[return schedule_func(optimizer)]",
        "lr_scheduler_kwargs",
        lambda v: not str(v["lr_scheduler_type"]).startswith("constant"),
        "with another `lr_scheduler_type` than a constant one",
    ),
    _make_switch_rule(
        "transformers/trainer.py::Trainer.train[every_n_layers = gc_kwargs.pop]",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
    ),
    check(
        (
            "transformers/trainer.py::Trainer._inner_training_loop[if args.eval_on_start], "
            "transformers/trainer.py::Trainer.get_eval_dataloader[raise ValueError]; "
            "trl/scripts/sft.py::main[eval_dataset=dataset], "
            "trl/scripts/dpo.py::main[eval_dataset=dataset]: without a strategy there is no set."
        ),
        "eval-without-data",
        "eval_on_start",
        lambda v: v["eval_on_start"] and v["eval_strategy"] == "no",
        "`eval_on_start` with `eval_strategy: no` crashes: TRL hands the trainer no set to "
        "evaluate",
        "add `eval_strategy: steps` and `eval_steps: <number>`, or delete the line",
    ),
    # without a strategy the scripts hand over no set to evaluate
    *(
        unread(
            "trl/scripts/sft.py::main[eval_dataset=dataset]",
            key,
            lambda v: v["eval_strategy"] != "no",
            "with another `eval_strategy` than no",
            "add `eval_strategy: steps`, or delete the line",
        )
        for key in _EVALUATION
    ),
)

_SFT: tuple[Rule, ...] = (
    dataset_names,
    packing_without_length,
    check(
        "trl/trainer/sft_trainer.py::SFTTrainer.__init__[without packing]",
        "padding-free-length",
        "padding_free",
        lambda v: v["padding_free"] and not v["packing"] and v["max_length"] is not None,
        "`padding_free` without `packing` cannot cut rows, and `max_length` is {max_length}",
        'add `packing: true`, or `max_length: "none"` for rows that are short enough',
    ),
    unread(
        "trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[dataset = pack_dataset]",
        "packing_strategy",
        lambda v: v["packing"] or v["eval_packing"],
        "where `packing` is set",
        "add `packing: true`, or delete the line",
    ),
)

_DPO: tuple[Rule, ...] = (
    zero_beta,
    unread_numbers,
    unread(
        "trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[if abs(self.f_alpha_divergence_coef]",
        "f_alpha_divergence_coef",
        lambda v: v["f_divergence_type"] == "alpha_divergence",
        "with `f_divergence_type: alpha_divergence`",
    ),
    warn(
        "trl/trainer/dpo_trainer.py::DPOTrainer.__init__[padding_free=True]",
        "padding-free-off",
        "padding_free",
        lambda v: v["padding_free"],
        "`padding_free` does nothing for DPO in this release: the batches are padded",
        "delete the line",
        tested=True,
    ),
    # its losses are its own
    unread(
        "trl/trainer/dpo_trainer.py::DPOTrainer._compute_loss[for loss_type, loss_weight]",
        "label_smoothing_factor",
        lambda v: not v.schema.tested,
        "by other trainers than DPO's",
        "delete the line: some losses read `label_smoothing`",
    ),
    _make_switch_rule(
        "trl/trainer/dpo_trainer.py::DPOTrainer.__init__[if args.precompute_ref_log_probs #3]",
        "precompute_ref_log_probs",
        "precompute_ref_batch_size",
    ),
    _make_switch_rule(
        "trl/trainer/dpo_trainer.py::DPOTrainer.__init__[if args.sync_ref_model]",
        "sync_ref_model",
        "ref_model_sync_steps",
    ),
    _make_switch_rule(
        "trl/trainer/dpo_trainer.py::DPOTrainer.__init__[if args.sync_ref_model]",
        "sync_ref_model",
        "ref_model_mixup_alpha",
    ),
)

RULES: Mapping[str, tuple[Rule, ...]] = {"sft": (*_SHARED, *_SFT), "dpo": (*_SHARED, *_DPO)}
