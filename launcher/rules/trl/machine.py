"""Rules for TRL that need the machine: its devices, packages and services.

Line numbers are those of the packages named in tests/agreement/test_upstream_facts.py. What was
seen to work is left alone: quantised models and paged optimizers on the CPU. Recompilations were
counted on the CPU with TRL 1.16 and torch 2.13, six steps of the demo's SFT with `torch_compile`:
12 with padded rows, 15 with packed ones, none with `pad_to_multiple_of: 256`.
"""

from collections.abc import Iterator, Mapping

from launcher.errors import Finding, shorten
from launcher.rules import services
from launcher.rules.context import Context, StageRule, section
from launcher.rules.rule import cites, needs, say, say_of_option
from launcher.rules.trl import resolved

# The distribution that an optimizer comes from, by what its name begins with
# (transformers/trainer_optimizer.py::[_OPTIMIZER_HANDLERS]).
_OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw_bnb", "adamw_8bit", "paged_", "ademamix", "lion", "rmsprop_bnb"), "bitsandbytes"
    ),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), "torchao"),
    **dict.fromkeys(("lomo", "adalomo"), "lomo-optim"),
    "adamw_torch_xla": "torch-xla",
    "adamw_torch_npu": "torch-npu",
    "adamw_anyprecision": "torchdistx",
    "adamw_apex": "apex",
    "apollo": "apollo-torch",
    "galore": "galore-torch",
    "grokadamw": "grokadamw",
    "schedule_free": "schedulefree",
    "stable_adamw": "torch-optimi",
}
# transformers/trainer_optimizer.py::_setup_low_rank_optimizer[if args.optim_target_modules]
_OF_MODULES = ("apollo", "galore")
# Distributions that each tracker needs one of
# (transformers/integrations/integration_utils.py::WandbCallback.__init__[raise RuntimeError] and
# the others).
_REPORTS: Mapping[str, tuple[str, ...]] = {
    "azure_ml": ("azureml-core", "azureml-sdk"),
    "clearml": ("clearml",),
    "codecarbon": ("codecarbon",),
    "comet_ml": ("comet-ml",),
    "dagshub": ("dagshub",),
    "dvclive": ("dvclive",),
    "flyte": ("flytekit",),
    "kubeflow": (),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "neptune": ("neptune", "neptune-client"),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardx"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}
_KUBEFLOW = "KUBEFLOW_TRAINER_SERVER_URL"


@cites(
    "transformers/training_args.py::TrainingArguments._validate_args[if not self.use_cpu]",
    "trl/trainer/base_config.py::_BaseConfig.__post_init__[self.bf16 = not]",
)
@needs("split")
def bf16_on_cpu(context: Context) -> Iterator[Finding]:
    """TRL's default asks for it.

    Before a run is planned it is open what launch itself sets on the CPU.
    """
    values = context.values
    if context.gpus != 0 or values["use_cpu"]:
        return
    if resolved.precision(values) == "bf16":
        key = "bf16"
    elif values["bf16_full_eval"]:
        key = "bf16_full_eval"
    else:
        return
    default = ""
    if not values.given(key):
        default = ", TRL's default,"
    help = f"add `{key}: false`, or `use_cpu: true` for bfloat16 on the CPU"
    yield say("error", "bf16-on-cpu", key, f"`{key}`{default} is refused without a GPU", help)


@cites("transformers/training_args.py::TrainingArguments._setup_devices[if self.use_cpu or]")
def cpu_beside_gpus(context: Context) -> Iterator[Finding]:
    if context.gpus and context.values["use_cpu"]:
        message = f"`use_cpu: true` trains on the CPU, and {context.gpus} GPU(s) are asked for"
        help = "delete the line, or start with --gpus 0"
        yield say("error", "cpu-beside-gpus", "use_cpu", message, help)


@cites("transformers/training_args.py::TrainingArguments.__post_init__[self.mixed_precision #3]")
def precision_option(context: Context) -> Iterator[Finding]:
    """`fp16` and `bf16` win over what accelerate was told."""
    option = context.named_precision
    precision = resolved.precision(context.values)
    if option is None or precision in (None, option):
        return
    default = ""
    if not context.values.given(precision):
        default = ", its default,"
    message = f"`mixed_precision: {option}` is not read: TRL's `{precision}`{default} decides"
    help = f"write `{option}: true` in its place"
    if option == "no":
        help = f"write `{precision}: false`"
    yield say_of_option("warning", "mixed-precision-unread", "mixed_precision", message, help)


@cites(
    "transformers/trainer_optimizer.py::_get_bitsandbytes_optimizer[You need to install]",
    "transformers/integrations/deepspeed.py::deepspeed_optim_sched[optimizer #7]",
)
@needs("packages")
def optimizer_package(context: Context) -> Iterator[Finding]:
    """A DeepSpeed file with an optimizer of its own decides."""
    name = str(context.values["optim"])
    if section(context.file or {}, "optimizer"):
        return
    for prefix, package in _OPTIMIZERS.items():
        if name.startswith(prefix) and context.lacks(package):
            message = f"`optim: {name}`: the trainer's Python has no {package}"
            help = f"pip install {package}, or write `optim: adamw_torch`"
            yield say("error", "optim-missing", "optim", message, help)


@cites("transformers/trainer_optimizer.py::_setup_low_rank_optimizer[if args.optim_target_modules]")
def optimizer_targets(context: Context) -> Iterator[Finding]:
    values = context.values
    name = str(values["optim"])
    if name.startswith(_OF_MODULES) and not values["optim_target_modules"]:
        message = f"`optim: {name}` needs `optim_target_modules`, the modules that it projects"
        yield say(
            "error", "optim-targets", "optim", message, "add `optim_target_modules: all-linear`"
        )


@cites(
    "transformers/quantizers/quantizer_bnb_4bit.py::Bnb4BitHfQuantizer.validate_environment[is_bitsandbytes_available]",
    "transformers/quantizers/quantizer_bnb_8bit.py::Bnb8BitHfQuantizer.validate_environment[is_bitsandbytes_available]",
)
@needs("packages")
def quantised_package(context: Context) -> Iterator[Finding]:
    for key in ("load_in_4bit", "load_in_8bit"):
        if context.values[key] and context.lacks("bitsandbytes"):
            message = f"`{key}`: the trainer's Python has no bitsandbytes"
            yield say(
                "error",
                "quantiser-missing",
                key,
                message,
                f"pip install bitsandbytes, or delete `{key}`",
            )


@cites("torch/_dynamo/config.py::[recompile_limit = 8]")
def lengths_compiled(context: Context) -> Iterator[Finding]:
    """A function is compiled for so many shapes, and then no more."""
    values = context.values
    padded = str(values["pad_to_multiple_of"]).lower() not in ("auto", "none", "null")
    if resolved.compiled(values) and not padded:
        keys = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
        key = next(filter(values.given, keys), keys[0])
        message = "batches differ in length, and each new one is compiled again: "
        message += "12 times in the first six steps measured"
        help = "add `pad_to_multiple_of: 512`, so that there are few lengths"
        yield say("warning", "compile-lengths", key, message, help)


@cites("torch/_inductor/cpp_builder.py::get_cpp_compiler[compiler = cpp_compiler_search]")
@needs("machine")
def no_compiler(context: Context) -> Iterator[Finding]:
    """Inductor writes C++ for a CPU, Triton a launcher in C."""
    values = context.values
    inductor = str(values["torch_compile_backend"] or "inductor").lower() == "inductor"
    if resolved.compiled(values) and inductor:
        yield from services.no_compiler(context, "torch_compile", cpp=not context.gpus)


def _list_reports(context: Context) -> list[str]:
    return resolved.words(context.values["report_to"])


@cites("transformers/integrations/integration_utils.py::WandbCallback.__init__[raise RuntimeError]")
def report_package(context: Context) -> Iterator[Finding]:
    """`integration_utils.py` and the other integrations."""
    for name in _list_reports(context):
        packages = _REPORTS.get(name, ())
        missing = []
        if packages and context.lacks(*packages):
            missing.append(packages[0])
        if name == "dagshub" and context.lacks(*_REPORTS["mlflow"]):
            missing.append("mlflow")
        if missing:
            message = f"`report_to: {name}`: the trainer's Python has no {' and no '.join(missing)}"
            help = f'pip install {" ".join(missing)}, or write `report_to: "none"`'
            yield say("error", "report-missing", "report_to", message, help)
        if name == "kubeflow" and not context.environ.get(_KUBEFLOW):
            message = f"`report_to: kubeflow` is for a TrainJob of Kubeflow: {_KUBEFLOW} is not set"
            yield say(
                context.at_start,
                "report-missing",
                "report_to",
                message,
                'write `report_to: "none"`',
            )


@cites(
    "transformers/integrations/integration_utils.py::"
    "get_reporting_integration_callbacks[if integration]",
    "transformers/training_args.py::TrainingArguments.__post_init__[if self.report_to #1]",
)
def unknown_report(context: Context) -> Iterator[Finding]:
    """`none` and `all` stand alone."""
    names = _list_reports(context)
    if not context.values.schema.tested or names in (["none"], ["all"], ["None"]):
        return
    for name in names:
        if name in _REPORTS:
            continue
        what = "is no tracker that transformers knows"
        help = f"one of {', '.join(_REPORTS)}"
        if name in ("none", "all"):
            what = "stands alone, not in a list"
            help = "leave the others out"
        yield say(
            "error", "report-unknown", "report_to", f"`report_to: {shorten(name)}` {what}", help
        )


@cites("transformers/integrations/integration_utils.py::WandbCallback.setup[self._wandb.init]")
def wandb_key(context: Context) -> Iterator[Finding]:
    """No one is there to answer its question."""
    reports = _list_reports(context)
    environ = context.environ
    # `all` stands for what is installed
    wanted = "wandb" in reports or ("all" in reports and "wandb" in (context.packages or {}))
    silent = environ.get("WANDB_MODE") in services.WITHOUT_WANDB
    if wanted and not silent and not services.has_wandb_key(environ):
        message = "`report_to: wandb` crashes: neither WANDB_API_KEY nor an entry in ~/.netrc"
        help = '`wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline, or `report_to: "none"`'
        yield say(context.at_start, "no-wandb-key", "report_to", message, help)


@cites(
    "trl/trainer/dpo_trainer.py::DPOTrainer.__init__[if is_peft_model(self.model) or]",
    "trl/trainer/dpo_trainer.py::DPOTrainer._precompute_ref_logps",
)
def reference_price(context: Context) -> Iterator[Finding]:
    """Measured with LoRA: Qwen2.5-7B on one GPU."""
    key = "precompute_ref_log_probs"
    if context.values.get(key):
        price = "no reference model is kept beside the trained one, which saves its weights"
        if context.values["use_peft"]:
            price = (
                "with LoRA no second model is saved; measured: 20 % faster, 63 % more memory (19 "
                "-> 31 GB)"
            )
        message = (
            f"`{key}`: all rows pass the reference before the first step, however few are "
            f"trained on; {price}"
        )
        yield say("note", "reference-price", key, message)


@cites("transformers/trainer.py::Trainer._prepare_input[if self.is_deepspeed_enabled]")
def rounded_reference(context: Context) -> Iterator[Finding]:
    """`trainer.py` casts every float of a batch, and these are sums over whole answers.

    Reproduced on the CPU with ZeRO 2 and 3, TRL 1.16, transformers 5.17, deepspeed 0.19.8:
    first losses of 0.62 to 0.91 instead of 0.6931; 0.6931 where the two columns are left in
    float32. Seen on two H100 as well: sums of -3,260.0 and -5,434.0 became -3,264 and -5,440.
    bfloat16 keeps 8 bits.
    """
    key = "precompute_ref_log_probs"
    if not context.values.get(key) or context.file is None:
        return
    precision = resolved.precision(context.values)
    for name in ("fp16", "bf16"):
        if section(context.file, name).get("enabled") is True:
            precision = name
    if precision not in ("bf16", "fp16"):
        return
    message = (
        f"`{key}` with DeepSpeed in {precision}: transformers rounds the reference log-probs to "
        f"{precision}, so that DPO's loss does not begin at ln 2 and every margin is off (bf16 "
        "rounds 3,000 nats to a multiple of 16)"
    )
    help = f"write `{key}: false`, or train without DeepSpeed (`deepspeed: none`, or FSDP)"
    yield say("warning", "reference-rounded", key, message, help)


RULES: tuple[StageRule, ...] = (
    bf16_on_cpu,
    cpu_beside_gpus,
    precision_option,
    optimizer_package,
    optimizer_targets,
    quantised_package,
    lengths_compiled,
    no_compiler,
    report_package,
    unknown_report,
    wandb_key,
    services.hub_token,
    services.remote_code,
    reference_price,
    rounded_reference,
)
