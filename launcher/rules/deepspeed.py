"""Rules about DeepSpeed: its file, its stages, what it cannot train, which releases corrupt
gradients.

docs/gradients.md has what was measured with each release. Line numbers are those of the pins, of
the packages named in tests/agreement/test_upstream_facts.py, and of DeepSpeed 0.19.8.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.artifacts import architecture, model_config, model_files
from launcher.errors import Finding, Severity, shorten
from launcher.rules.context import Context, RuleTable, StageRule, caches_only, section
from launcher.rules.premises import asks, where
from launcher.rules.rule import cites, say, say_of_option
from launcher.rules.trl import resolved
from launcher.upstream import behaviour

OVERLAP = "overlap-corrupts"
SYNCHRONIZED = "0.17.5"  # DeepSpeed's PR 7371
UNSYNCHRONIZED = ("0.18.5", "0.19.0")  # from PR 7805 on, until PR 7965
ALL_STREAMS = "0.19.3"  # PR 8080
LOSES_MICRO_BATCHES = ("0.17.6", "0.18.3")  # until PR 7665
LARGEST_WEIGHT = 1e9  # elements; no gradient is then larger than the bucket, which is copied
_FORMATS = {
    "fp32": "no",
    "float32": "no",
    "fp16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_PASSES = "gradient_accumulation_steps"
_MICRO = "train_micro_batch_size_per_gpu"
# attention with biases whatever else their config says; `attention_bias` tells for the others
_BIASED = frozenset({"qwen2", "qwen2_moe"})
# families without a bias, unless their config asks for some
_UNBIASED = frozenset(
    (
        "cohere cohere2 gemma gemma2 gemma3 gemma3_text granite llama ministral mistral mixtral "
        "olmo olmo2 olmo3 olmoe phi3 qwen3 qwen3_moe smollm3"
    ).split()
)
# what both scripts look for in a parameter's name
_WITHOUT_DECAY = ("bias", "layer_norm.weight")
STRICT_SCHEDULES = "2.10"
"""The release of torch from which on a schedule refuses other groups than it was made for."""
# accelerate/utils/deepspeed.py::map_pytorch_optim_to_deepspeed[is_adaw = isinstance],
# accelerate/utils/deepspeed.py::map_pytorch_optim_to_deepspeed[if isinstance(optimizer, (bnb_opt.AdamW],  # noqa: E501 - one citation
# accelerate/utils/deepspeed.py::map_pytorch_optim_to_deepspeed[if is_bnb_available(min_version]:
# those that stay what they are where DeepSpeed offloads
_OFFLOADED = (
    "adamw_torch",
    "adamw_torch_fused",
    "paged_adamw_32bit",
    "adagrad",
    "lion_32bit",
    "paged_lion_32bit",
)


def engine_config(
    values: Mapping[str, Any], file: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The DeepSpeed config in use: DPO's own argument wins over `file`, launch's `deepspeed`.

    None without DeepSpeed. The caller knows whether a GPU is used.
    """
    stage = values.get("zero_stage")
    if not isinstance(stage, int) or isinstance(stage, bool):
        return file
    # as far as memory and gradients depend on it
    # (dpo_tune_cache.py::build_deepspeed_config[config =],
    # dpo_tune_cache.py::build_deepspeed_config[overlap_comm])
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "zero_hpz_partition_size": values.get("zero_hpz_partition_size"),
        }
    for name in ("offload_optimizer", "offload_param"):
        if values.get(name):
            zero[name] = {"device": "cpu"}
    return {"zero_optimization": zero}


def _report_in_file(code: str, message: str, help: str, severity: Severity = "error") -> Finding:
    return say_of_option(severity, code, "deepspeed", message, help)


@cites("accelerate/utils/dataclasses.py::DeepSpeedPlugin.__post_init__[Please specify]")
def zero_section(context: Context) -> Iterator[Finding]:
    if context.file is not None and "zero_optimization" not in context.file:
        message = "the DeepSpeed file has no `zero_optimization`: accelerate refuses it"
        yield _report_in_file(
            "deepspeed-no-zero", message, 'add `"zero_optimization": {"stage": 2}`'
        )


@cites(
    "accelerate/utils/dataclasses.py::DeepSpeedPlugin.fill_match[not found in kwargs.]",
    "deepspeed/runtime/config.py::"
    "DeepSpeedConfig._set_batch_related_parameters[Either train_batch_size]",
)
def no_batch(context: Context) -> Iterator[Finding]:
    """An `auto` batch is filled from the micro-batch alone, but transformers fills in both."""
    file = context.file
    if not file or file.get(_MICRO) is not None:
        return
    batch = file.get("train_batch_size")
    if batch is None or (batch == "auto" and not context.entry.by_trainer):
        help = f'add `"{_MICRO}": "auto"` and `"train_batch_size": "auto"`'
        yield _report_in_file("deepspeed-no-batch", f"the DeepSpeed file has no `{_MICRO}`", help)


@cites(
    "model_utils.py::save_with_accelerate[state_dict = accelerator.get_state_dict]",
    "transformers/trainer.py::Trainer.save_model[=false. Saving]",
    "transformers/trainer.py::Trainer.save_model[exclude_frozen_parameters=True]",
)
def unsaved_weights(context: Context) -> Iterator[Finding]:
    """An adapter is gathered all the same."""
    file = context.file
    if file is None or context.zero_stage != 3 or caches_only(context):
        return
    if section(file, "zero_optimization").get(_GATHER) is True or context.values.get("use_peft"):
        return
    severity: Severity = "error"
    effect = "crashes when the trained model is saved"
    if context.entry.by_trainer:
        severity = "warning"
        effect = "saves no model, only DeepSpeed's own checkpoint"
    help = "add it to `zero_optimization` in the DeepSpeed file"
    yield _report_in_file(
        "zero3-unsaved", f"ZeRO-3 without `{_GATHER}: true` {effect}", help, severity
    )


@asks(behaviour.GUARDS_NEGATIVE_CLIPPING)
@cites(
    "finetune.py::main[if accelerator.sync_gradients and]",
    "dpo_tune_cache.py::main[if accelerator.sync_gradients and]",
    "accelerate/accelerator.py::Accelerator.clip_grad_norm_[DistributedType.DEEPSPEED]",
    "accelerate/accelerator.py::Accelerator._prepare_deepspeed[gradient_clipping]",
    reviewed=("e6c3044aa620",),
)
def clipping(context: Context) -> Iterator[Finding]:
    """`accelerator.py` leaves it to DeepSpeed; `auto` is 1.0.

    What is not above 0 asks for none.
    """
    values = context.values
    key = "clip_grad_norm" if "clip_grad_norm" in values else "max_grad_norm"
    limit = values[key]
    if not context.distributed or not values.given(key) or not isinstance(limit, int | float):
        return
    file = context.file
    of_file: Any = "auto"
    if file is not None:
        of_file = file.get("gradient_clipping", 0.0)
    # transformers fills in what is `auto`, and refuses another number
    if context.entry.by_trainer and of_file not in (None, 0.0):
        return
    if of_file == "auto":
        of_file = 1.0
    requested = _keep_positive(limit)
    applied = _keep_positive(of_file)
    if applied == requested:
        return
    effect = f"clips at {applied}" if applied else "does not clip"
    help = f'write `"gradient_clipping": {requested}` in the DeepSpeed file'
    if file is None:
        help += ", in place of `zero_stage`"
    message = f"`{key}: {limit}` is not read with DeepSpeed, which {effect}"
    yield say("warning", "clipping-unread", key, message, help)


def _keep_positive(limit: object) -> float:
    if isinstance(limit, int | float) and limit > 0:
        return limit
    return 0.0


@cites(
    "accelerate/accelerator.py::Accelerator._prepare_deepspeed[You cannot specify an]",
    "accelerate/accelerator.py::Accelerator._prepare_deepspeed[You cannot specify a scheduler]",
    "accelerate/utils/dataclasses.py::DeepSpeedPlugin.set_mixed_precision[--mixed_precision]",
)
def refused_file(context: Context) -> Iterator[Finding]:
    """The scripts bring their own optimizer.

    A wrong precision comes to light once the data are tokenised.
    """
    file = context.file
    if file is None:
        return
    for key in ("optimizer", "scheduler"):
        if key in file:
            message = (
                f"the DeepSpeed file sets `{key}`, and so does upstream: accelerate refuses both"
            )
            help = f"delete `{key}` from the file; the arguments decide"
            yield _report_in_file("deepspeed-optimizer", message, help)
    other = {"bf16": "fp16", "fp16": "bf16"}.get(context.mixed_precision or "", "")
    if str(section(file, other).get("enabled", False)).lower() == "true":
        message = (
            f"the DeepSpeed file enables {other}, `mixed_precision` is {context.mixed_precision}"
        )
        help = f'set `mixed_precision: {other}`, or `"enabled": "auto"` in the file'
        yield _report_in_file("deepspeed-precision", message, help)


@cites(
    "finetune.py::main[num_update_steps_per_epoch = math.ceil #1]",
    "accelerate/accelerator.py::Accelerator._prepare_deepspeed[DeepSpeed config has]",
    "accelerate/accelerator.py::Accelerator._prepare_deepspeed[config_kwargs #3]",
    reviewed=("e6c3044aa620",),
)
def batch_of_the_file(context: Context) -> Iterator[Finding]:
    """The file's accumulation wins, a missing one is 1, and upstream goes on counting with its own
    argument. `accelerator.py` fills in what is `auto`; DeepSpeed asserts that the batch
    multiplies.
    """
    file = context.file
    accumulation = context.accumulation
    if file is None or accumulation is None:
        return
    passes = file.get(_PASSES, 1)
    if isinstance(passes, int) and passes != accumulation:
        verb = "sets" if _PASSES in file else "is silent, which means"
        effect = f"{accumulation} would not be used, and the steps be counted wrongly"
        message = f"the DeepSpeed file {verb} `{_PASSES}: {passes}`: {effect}"
        help = f'write `"{_PASSES}": "auto"` in the file'
        yield _report_in_file("deepspeed-accumulation", message, help, "warning")
    if passes in ("auto", None):
        passes = accumulation
    rows = file.get(_MICRO)
    if rows in ("auto", None):
        rows = context.per_device
    devices = (context.gpus or 0) // max(1, context.values.get("sequence_parallel_size") or 1)
    factors = (rows, passes, devices)
    if not all(isinstance(factor, int) and factor for factor in factors):
        return
    total = file.get("train_batch_size")
    if isinstance(total, int) and total != math.prod(factors):
        product = f"{rows} rows x {passes} passes x {devices} devices is {math.prod(factors)}"
        message = f"the DeepSpeed file sets `train_batch_size: {total}`, but {product}"
        yield _report_in_file(
            "deepspeed-batch", message, 'write `"train_batch_size": "auto"` in the file'
        )


@cites("dpo_tune_cache.py::main[deepspeed_plugin = DeepSpeedPlugin]", reviewed=("e6c3044aa620",))
def two_zero_stages(context: Context) -> Iterator[Finding]:
    """`dpo_tune_cache.py` builds a config of its own, and accelerate then reads no file."""
    own = context.values["zero_stage"]
    if own is None or context.deepspeed is None or context.gpus == 0:
        return
    message = f"`zero_stage: {own}` replaces `deepspeed:`: nothing of that file is read"
    unread = section(context.deepspeed, "zero_optimization").get("stage", 0)
    if unread != own:
        message += f", and its stage {unread} is not {own}"
    help = "keep one: `deepspeed:` for a file, `zero_stage` for upstream's own settings"
    yield say("warning", "two-zero-stages", "zero_stage", message, help)


@cites(
    "finetune.py::main[device_map =]",
    "dpo_tune_cache.py::main.load_model[device_map =]",
    "finetune.py::FlatArguments[Use qLoRA training]",
    "dpo_utils.py::DPOExperimentConfig[Use qLoRA training]",
    "transformers/integrations/accelerate.py::check_and_set_device_map[DeepSpeed Zero]",
    reviewed=("e6c3044aa620",),
)
def quantised(context: Context) -> Iterator[Finding]:
    """Quantised weights are placed by a device_map.

    Upstream calls DeepSpeed incompatible.
    """
    if not context.values["use_qlora"] or not context.distributed or caches_only(context):
        return
    severity: Severity = "warning"
    message = "`use_qlora` is not compatible with DeepSpeed, upstream says"
    if context.zero_stage == 3:
        severity = "error"
        message = "`use_qlora` with ZeRO-3 crashes: a quantised model is placed by a device_map"
    help = "write `deepspeed: none`, or leave out `use_qlora`"
    yield say(severity, "qlora-deepspeed", "use_qlora", message, help)


@where(behaviour.KEEPS_EMPTY_GROUPS)
@cites(
    "finetune.py::main[no_decay =]",
    "dpo_tune_cache.py::main[no_decay =]",
    "deepspeed/runtime/zero/stage_1_and_2.py::"
    "DeepSpeedZeroOptimizer.__init__[param_dtype = self.bit16_groups]",
    reviewed=("e6c3044aa620",),
)
def frozen_biases(context: Context) -> Iterator[Finding]:
    """`finetune.py` and `dpo_tune_cache.py` put biases into a group of their own; with LoRA none
    of it is trained, and ZeRO-1 and 2 cannot take an empty group.
    """
    values = context.values
    if not values["use_lora"] or context.zero_stage not in {1, 2} or caches_only(context):
        return
    config = model_config.build_config(values, context.environ)
    family = str(config.get("model_type"))
    if family in _BIASED or _asks_for_biases(config):
        crash = f"LoRA on a {family} model crashes with ZeRO-{context.zero_stage}"
        message = f"{crash}: frozen biases are an empty group"
        help = "write `deepspeed: none`, or `deepspeed: zero3` without gradient checkpointing"
        yield say("error", "lora-biases", "use_lora", message, help)


def _asks_for_biases(config: Mapping[str, Any]) -> bool:
    return config.get("attention_bias") is True or config.get("mlp_bias") is True


@where(behaviour.KEEPS_EMPTY_GROUPS)
@cites(
    "finetune.py::main[no_decay =]",
    "dpo_tune_cache.py::main[no_decay =]",
    "deepspeed/runtime/engine.py::DeepSpeedEngine._configure_optimizer[basic_optimizer.param_groups]",
    "torch/optim/lr_scheduler.py::LRScheduler._update_lr[strict=True]",
    reviewed=("e6c3044aa620",),
)
def no_biases(context: Context) -> Iterator[Finding]:
    """Both scripts put biases into a second group of the optimizer, which is empty in most models.

    DeepSpeed leaves an empty group out. The schedule was made for two groups, and from torch 2.10
    on it refuses to step with one. Measured: Llama-3.1-8B, ZeRO-3, torch 2.11, first step.
    """
    if not context.distributed or caches_only(context) or not _has_no_bias(context):
        return
    torch = (context.packages or {}).get("torch")
    if torch is not None and _is_before(torch, STRICT_SCHEDULES):
        return
    message = (
        "this model has no biases, and with DeepSpeed its first step fails with a ValueError: "
        f"DeepSpeed drops the optimizer's empty group of biases, and torch {STRICT_SCHEDULES} and "
        "later refuse a schedule made with it"
    )
    later = "check out a later open-instruct, such as the pin (`launch pin status`)"
    help = f"{later}, or write `deepspeed: none`"
    yield say("error", "empty-group", "model_name_or_path", message, help)


def _has_no_bias(context: Context) -> bool:
    """Whether no parameter is a bias: by the weights that lie here, or by the family."""
    values = context.values
    name = values["model_name_or_path"]
    path = model_config.find_config_file(name, context.environ, values.get("model_revision"))
    if path is not None:
        weights = model_files.read_sizes(path.parent)
        if weights:
            return not any(mark in weight for weight in weights for mark in _WITHOUT_DECAY)
    config = model_config.build_config(values, context.environ)
    if not config:
        config = architecture.load_known_shapes().get(str(name).lower(), {})
    return config.get("model_type") in _UNBIASED and not _asks_for_biases(config)


@cites(
    "finetune.py::main[model.gradient_checkpointing_enable #1]",
    "transformers/modeling_utils.py::"
    "PreTrainedModel.gradient_checkpointing_enable[gradient_checkpointing_kwargs =]",
    reviewed=("e6c3044aa620",),
)
def frozen_released(context: Context) -> Iterator[Finding]:
    """`finetune.py` checkpoints as transformers does by itself, not reentrant: when a layer is
    computed again, ZeRO-3 has released its frozen weights, and torch compares their shapes with
    those of the forward pass (CheckpointError).
    """
    values = context.values
    lora = values["use_lora"] and not values["use_qlora"]
    zero3 = context.distributed and context.zero_stage == 3
    if lora and zero3 and values["gradient_checkpointing"]:
        key = "gradient_checkpointing"
        cause = "frozen weights are gone when a layer runs again"
        message = f"`{key}` with LoRA and ZeRO-3 crashes: {cause}"
        small = "`deepspeed: none` has LoRA's small optimizer state on each GPU"
        help = f"leave out one of the three: {small}"
        yield say("error", "lora-zero3-checkpointing", key, message, help)


@cites(
    "transformers/integrations/deepspeed.py::HfTrainerDeepSpeedConfig.fill_match[self.mismatches.append]",
    "transformers/integrations/deepspeed.py::"
    "HfTrainerDeepSpeedConfig.trainer_config_finalize[Please correct]",
    "accelerate/utils/dataclasses.py::DeepSpeedPlugin.__post_init__[self.hf_ds_config.config #2]",
)
def mismatches(context: Context) -> Iterator[Finding]:
    """Raised when training begins. What a file leaves out is not compared, but for the
    accumulation: accelerate fills in 1.
    """
    if not context.file:
        return
    file = {_PASSES: 1, **context.file}
    differing = []
    for name, key, expected in _list_expected(context):
        entry = _find_entry(file, name)
        if expected is not None and entry not in (None, "auto", expected):
            differing.append(f"`{name}: {shorten(entry)}` is not `{key}: {shorten(expected)}`")
    if differing:
        message = f"transformers refuses the DeepSpeed file: {'; '.join(differing)}"
        yield _report_in_file(
            "deepspeed-mismatch", message, 'write "auto" for what the arguments say'
        )


def _list_expected(context: Context) -> Iterator[tuple[str, str, Any]]:
    """What a config must say, under which name, and the argument that says it; None if unknown."""
    values = context.values
    rows = context.per_device
    passes = context.accumulation
    yield _MICRO, "per_device_train_batch_size", rows
    yield _PASSES, _PASSES, passes
    if rows is not None and passes is not None and context.gpus:
        total = rows * passes * context.gpus
        yield "train_batch_size", "rows x passes x devices", total
    yield "gradient_clipping", "max_grad_norm", values["max_grad_norm"]
    rate = values["learning_rate"]
    yield "optimizer.params.lr", "learning_rate", rate
    betas = [values["adam_beta1"], values["adam_beta2"]]
    if None not in betas:
        yield "optimizer.params.betas", "adam_beta1, adam_beta2", betas
    yield "optimizer.params.eps", "adam_epsilon", values["adam_epsilon"]
    yield "optimizer.params.weight_decay", "weight_decay", values["weight_decay"]
    yield "scheduler.params.warmup_max_lr", "learning_rate", rate
    warmup = values["warmup_steps"]
    # a share below 1 is one of steps that are not known here
    if isinstance(warmup, int | float) and (1 <= warmup < math.inf or warmup == 0):
        yield "scheduler.params.warmup_num_steps", "warmup_steps", int(warmup)
    precision = resolved.precision(values)
    for name in ("bf16", "fp16"):
        yield f"{name}.enabled", name, precision == name or bool(values[f"{name}_full_eval"])


def _find_entry(config: Mapping[str, Any], name: str) -> Any:
    node: Any = config
    for part in name.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


@cites(
    "transformers/trainer.py::Trainer.__init__[Using --fsdp xxx]",
    "accelerate/utils/dataclasses.py::"
    "DeepSpeedPlugin.__post_init__[self.hf_ds_config = os.environ.get]",
)
def fsdp_too(context: Context) -> Iterator[Finding]:
    """accelerate reads launch's file."""
    if context.file is not None and context.values["fsdp"]:
        message = "`fsdp` beside `deepspeed:`: transformers refuses both"
        yield say("error", "two-engines", "fsdp", message, "write `deepspeed: none`")


@cites(
    "transformers/integrations/deepspeed.py::deepspeed_optim_sched[optimizer #7]",
    "accelerate/accelerator.py::Accelerator._prepare_deepspeed[map_pytorch_optim_to_deepspeed]",
)
def optimizer_unread(context: Context) -> Iterator[Finding]:
    """A config that has one decides; one that offloads makes DeepSpeed's own
    Adam of what was asked for.
    """
    file = context.file
    if not file or not context.values.given("optim"):
        return
    name = str(context.values["optim"])
    kind = section(file, "optimizer").get("type")
    if kind is not None:
        message = f"`optim: {name}` is not read: the DeepSpeed file has its own, {shorten(kind)}"
        yield say("warning", "optim-unread", "optim", message, "delete one of them")
    if "optimizer" in file or file.get("zero_force_ds_cpu_optimizer") is False:
        return
    offloaded = section(section(file, "zero_optimization"), "offload_optimizer").get("device")
    if offloaded not in (None, "none") and name not in _OFFLOADED:
        instead = "DeepSpeed's Adam on the CPU, with 32-bit states"
        message = f"`optim: {name}` becomes {instead}: its file offloads the optimizer"
        help = "write `optim: adamw_torch`, or a `deepspeed:` that does not offload"
        yield say("warning", "optim-replaced", "optim", message, help)


def fault(
    config: Mapping[str, Any],
    version: str | None,
    *,
    precision: str | None = None,
    accumulation: int | None = None,
) -> tuple[Severity, str, str, str] | None:
    """What DeepSpeed is known to do to gradients: severity, code, message, help; None for nothing.

    `precision` is accelerate's word (bf16, fp16, no), `accumulation` the micro-batches of a step.
    """
    zero = section(config, "zero_optimization")
    stage = zero.get("stage", 0)
    overlaps = zero.get("overlap_comm") is True
    if stage not in (1, 2):
        return None
    release = _parse_release(version)
    wire = _FORMATS.get(str(config.get("communication_data_type")).lower())
    bucket = zero.get("reduce_bucket_size")
    whole = isinstance(bucket, int | float) and bucket >= LARGEST_WEIGHT
    converts = wire is not None and wire != (precision or "bf16")
    if stage == 2 and overlaps and converts and not whole:
        # stage_1_and_2.py, allreduce_and_copy_with_multiple_ranks: only the converted copy is
        # recorded on the stream of the reduction, so the gradient's memory is used again before it
        # was read
        message = (
            "ZeRO-2 with `overlap_comm` and a `communication_data_type` of its own trains on "
            "corrupt gradients: every release up to 0.19.8 reuses the memory of gradients larger "
            "than `reduce_bucket_size` before they were sent"
        )
        help = "set `overlap_comm: false` in the DeepSpeed file, or use ZeRO-1 or ZeRO-3"
        return "error", OVERLAP, message, help
    accumulates = (accumulation or 1) > 1
    if stage == 2 and accumulates and release and _is_within(release, LOSES_MICRO_BATCHES):
        message = f"DeepSpeed {version} keeps only the last micro-batch of a step under ZeRO-2"
        return (
            "error",
            "accumulation-lost",
            message,
            "install deepspeed 0.19.8, or do not accumulate",
        )
    if not overlaps:
        return None
    corrupts = "trains on corrupt gradients: buffers are reused before their reduction is done"
    serial = "or set `overlap_comm: false` in the DeepSpeed file"
    if release is None:
        message = (
            f"ZeRO 1 and 2 with `overlap_comm` {corrupts}, with DeepSpeed 0.18.5 to 0.18.9 and "
            "before 0.17.5; the installed version is not known here"
        )
        return "warning", OVERLAP, message, f"install deepspeed 0.19.8 where it trains, {serial}"
    described = f"DeepSpeed {version} with ZeRO-{stage} and `overlap_comm`"
    help = f"install deepspeed 0.19.8, {serial}"
    if _is_before(release, SYNCHRONIZED) or _is_within(release, UNSYNCHRONIZED):
        return "error", OVERLAP, f"{described} {corrupts}", help
    if _is_within(release, (UNSYNCHRONIZED[1], ALL_STREAMS)):
        streams = "where several streams compute them, as under torch.compile"
        message = f"{described} may send gradients before they are complete {streams}"
        return "warning", OVERLAP, message, help
    return None


def _parse_release(version: str | None) -> str | None:
    """The version if it is one that can be compared with others."""
    if version is None:
        return None
    # importing it takes longer than all rules of this module together
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(version))
    except InvalidVersion:
        return None


def _is_within(version: str, span: tuple[str, str]) -> bool:
    first, beyond = span
    return not _is_before(version, first) and _is_before(version, beyond)


def _is_before(version: str, later: str) -> bool:
    from packaging.version import Version

    return Version(version) < Version(later)


@cites(
    "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.allreduce_and_copy_with_multiple_ranks"
)
def true_gradients(context: Context) -> Iterator[Finding]:
    """The probe compares gradients in each run."""
    values = context.values
    config = engine_config(values, context.file)
    if context.gpus == 0 or not config:
        return
    version = (context.packages or {}).get("deepspeed")
    precision = context.mixed_precision
    if context.entry.own_precision:
        precision = resolved.precision(values) or "no"
    defect = fault(config, version, precision=precision, accumulation=context.accumulation)
    if defect is None:
        return
    severity, code, message, help = defect
    key = "deepspeed"
    if values.get("zero_stage") is not None:
        key = "args.zero_stage"
        help = "leave out `zero_stage` and set launch's `deepspeed: zero2`, which does not overlap"
    yield say_of_option(severity, code, key, message, help)


_SHARED: tuple[StageRule, ...] = (zero_section, no_batch, unsaved_weights, clipping, true_gradients)
_OWN_LOOP = (*_SHARED, refused_file, batch_of_the_file, quantised, frozen_biases, no_biases)

RULES: RuleTable = {
    "open_instruct": {"sft": (*_OWN_LOOP, frozen_released), "dpo": (*_OWN_LOOP, two_zero_stages)},
    "trl": dict.fromkeys(("sft", "dpo"), (*_SHARED, mismatches, fsdp_too, optimizer_unread)),
}
