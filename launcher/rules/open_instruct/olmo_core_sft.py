"""Rules for open-instruct's olmo_core_finetune.py: SFT of OLMo-core models under FSDP, on packed
rows.

What it shares with dpo.py stands in `olmo_core`. Line numbers are those of the pin.
"""

from collections.abc import Iterator
from pathlib import Path

from launcher.errors import Finding, shorten
from launcher.paths import is_dir, is_file
from launcher.rules import services
from launcher.rules.context import Context, StageRule, caches_only
from launcher.rules.embedding import beyond_olmo_core
from launcher.rules.model import beyond_positions, impossible_name
from launcher.rules.open_instruct import olmo_core
from launcher.rules.open_instruct.arguments import OF_ALL_SCRIPTS, OF_THE_HUB
from launcher.rules.open_instruct.tokenizer import olmo_tokenizer
from launcher.rules.places import unintended_output
from launcher.rules.rule import Rule, cites, needs, no_model, say
from launcher.upstream.schema import Values

_SCHEDULERS = ("linear", "cosine", "constant")
# olmo_core/nn/attention/backend.py: what these strategies need
_RING = ("llama3", "zig_zag")
_RING_PACKAGE = "ring-flash-attn"
_PER_DEVICE = "per_device_train_batch_size"


@cites("olmo_core_utils.py::build_scheduler[raise ValueError]", reviewed=("e6c3044aa620",))
def refused_schedule(values: Values) -> Iterator[Finding]:
    """A schedule that is not known is refused once the model is built."""
    name = str(values["lr_scheduler_type"])
    if name in _SCHEDULERS or values["cache_dataset_only"]:
        return
    message = (
        f"`lr_scheduler_type: {shorten(name)}` crashes: the script knows {', '.join(_SCHEDULERS)}"
    )
    help = f"write `{olmo_core.nearest_schedule(name)}`"
    yield say("error", "scheduler-type", "lr_scheduler_type", message, help)


@cites("olmo_core_finetune.py::main[if effective_steps < 1]", reviewed=("e6c3044aa620",))
def no_steps(values: Values) -> Iterator[Finding]:
    """A limit of no step is refused, once the rows are packed."""
    limit = values["max_train_steps"]
    if isinstance(limit, int) and limit < 1 and not values["cache_dataset_only"]:
        message = (
            f"`max_train_steps: {limit}` crashes once the rows are packed: there is nothing to "
            "train"
        )
        yield say(
            "error", "out-of-range", "max_train_steps", message, "1 or more, or delete the line"
        )


@cites(
    "olmo_core_finetune.py::main[sequence_length=args.training.max_seq_length]",
    reviewed=("e6c3044aa620",),
)
def row_length(values: Values) -> Iterator[Finding]:
    """OLMo-core keeps the room of packed rows in a tree of so many leaves
    (olmo_core/data/utils.py::SegmentTree).
    """
    length = values["max_seq_length"]
    if not isinstance(length, int) or values["cache_dataset_only"]:
        return
    if length < 1 or length & (length - 1):
        message = (
            f"`max_seq_length: {length}` crashes when the rows are packed: OLMo-core wants a power "
            "of 2"
        )
        below = 1 << max(0, length.bit_length() - 1)
        yield say(
            "error", "out-of-range", "max_seq_length", message, f"write {below} or {2 * below}"
        )


@cites(
    "olmo_core_utils.py::"
    "save_state_dict_as_hf[hf_config = transformers.AutoConfig.from_pretrained]",
    reviewed=("e6c3044aa620",),
)
def unexported(values: Values) -> Iterator[Finding]:
    """Launch writes the weights for transformers after the training, if there is a way."""
    named, key = olmo_core.shape_of(values)
    if values["cache_dataset_only"] or not named.startswith(olmo_core.NOT_EXPORTED):
        return
    message = (
        f"OLMo-core cannot write {named} as transformers reads it: only its own checkpoint is left"
    )
    yield say("warning", "no-hf-export", key, message, olmo_core.trains_instead(values))


@cites(
    "olmo_core_utils.py::is_hf_checkpoint[return os.path.isfile]",
    "olmo_core_utils.py::setup_model[--config_name]",
    reviewed=("e6c3044aa620",),
)
def own_checkpoint(context: Context) -> Iterator[Finding]:
    """A folder without a config.json is OLMo-core's own checkpoint: nobody knows its shape."""
    values = context.values
    name = str(values["model_name_or_path"] or "")
    is_own = is_dir(name) and not is_file(Path(name) / "config.json")
    if not is_own or caches_only(context):
        return
    if not values["config_name"]:
        message = (
            f"{shorten(name)} has no config.json: OLMo-core takes it for its own checkpoint, and "
            "asks for its shape"
        )
        yield say(
            "error", "unsupported-model", "config_name", message, "add `config_name: <its shape>`"
        )
        return
    message = (
        f"{shorten(name)} has no config.json: without one of transformers' no weights for it can "
        "be written"
    )
    help = (
        "afterwards: upstream's scripts/train/convert_olmo_core_to_hf.py with the name of a "
        "model of this shape"
    )
    yield say("warning", "no-hf-export", "model_name_or_path", message, help)


@cites("olmo_core_finetune.py::main[generate_doc_lengths=True]", reviewed=("e6c3044aa620",))
def documents_without_flash(context: Context) -> Iterator[Finding]:
    """Rows are always packed, and OLMo-core keeps samples apart with flash-attn alone.

    `model_utils.py` takes flash-attn where it is installed and none is named. On a CPU the probe
    supplies a way.
    """
    why = olmo_core.why_joined(context)
    if why is None or caches_only(context) or not context.gpus:
        return
    message = f"crashes in the first step: rows are always packed, and {why}"
    help = "`pip install flash-attn`, and leave this argument out"
    yield say("error", "packing-refused", "attn_implementation", message, help)


@cites(
    "olmo_core_utils.py::build_cp_config[TransformerContextParallelConfig.llama3]",
    reviewed=("e6c3044aa620",),
)
def context_parallel(context: Context) -> Iterator[Finding]:
    """A row is cut over `cp_degree` GPUs: one row a micro-batch, and what the strategy needs."""
    values = context.values
    degree = values["cp_degree"]
    if not isinstance(degree, int) or caches_only(context):
        return
    code = "context-parallel"
    key = "cp_degree"
    if degree < 1:
        yield say(
            "error",
            code,
            key,
            f"`{key}: {degree}` is no number of GPUs",
            "1 or more, or delete the line",
        )
        return
    if (context.per_device or 1) > 1:
        message = (
            f"`{key}` crashes: packed rows are cut one by one, and a micro-batch has "
            f"{context.per_device}"
        )
        help = f"write `{_PER_DEVICE}: 1` and more accumulation"
        yield say("error", code, _PER_DEVICE, message, help)
    strategy = values["cp_strategy"]
    if strategy in _RING and context.lacks(_RING_PACKAGE):
        message = f"`cp_strategy: {strategy}` crashes: the trainer's Python has no {_RING_PACKAGE}"
        yield say(
            "error",
            code,
            "cp_strategy",
            message,
            f"`pip install {_RING_PACKAGE}`, or `cp_strategy: ulysses`",
        )


@cites("olmo_core_finetune.py::main[dp_shard_degree = gpus_per_node]", reviewed=("e6c3044aa620",))
@needs("split")
def laid_out(context: Context) -> Iterator[Finding]:
    """The GPUs of a machine are divided by `cp_degree`, whatever is left over."""
    degree = context.values["cp_degree"]
    if context.split is None or not isinstance(degree, int) or degree < 1 or caches_only(context):
        return
    processes = context.split.processes
    if processes % degree:
        message = f"`cp_degree: {degree}` does not divide {processes} processes"
        yield say(
            "error", "context-parallel", "cp_degree", message, olmo_core.one_divisor(processes)
        )


RULES: tuple[Rule, ...] = (
    *(rule for rule in OF_ALL_SCRIPTS if rule not in OF_THE_HUB),
    olmo_core.model,
    no_model(
        "olmo_core_utils.py::ModelConfig[model_name_or_path: str]", reviewed=("e6c3044aa620",)
    ),
    olmo_core.ranges,
    olmo_core.kept_checkpoints,
    olmo_core.checkpoint_intervals,
    olmo_core.unread_recomputing,
    olmo_core.budget_without_compile,
    olmo_core.unsaved_scaling,
    refused_schedule,
    no_steps,
    row_length,
    unexported,
)

STAGE_RULES: tuple[StageRule, ...] = (
    unintended_output,
    impossible_name,
    own_checkpoint,
    olmo_core.no_deepspeed,
    olmo_core.unbuildable,
    documents_without_flash,
    olmo_tokenizer,
    olmo_core.precision,
    olmo_core.other_shape,
    olmo_core.goes_on,
    olmo_core.no_compiler,
    olmo_core.wandb_key,
    context_parallel,
    laid_out,
    beyond_positions,
    beyond_olmo_core,
    olmo_core.offline_model,
    services.remote_code,
)
