"""A new stage file: the templates of `launch init`, and what a file of TRL, Axolotl or LLaMA-Factory becomes.

The names of other tools are those of axolotl/utils/schemas/config.py and llamafactory/hparams. A key that TRL has
under the same name needs no row here. Defaults that differ from TRL's are written out.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from launcher.artifacts import chat_template, model_config
from launcher.config.document import Document, read_yaml
from launcher.config.keys import PAIRED, STAGES
from launcher.config.load import TOOLS, tool_of
from launcher.dataset import sources
from launcher.errors import Finding, InvalidConfig, Severity, brief, launch_finding, usage
from launcher.paths import is_dir, is_file
from launcher.redaction import redact
from launcher.stage import rows as data_rows
from launcher.upstream.locate import Locator
from launcher.upstream.schema import Field
from launcher.upstream.trainers import BACKENDS
from launcher.upstream.trl import PIN as TRL_PIN
from launcher.upstream.trl import STAGES as ENTRIES


class Row(NamedTuple):
    """The value of an argument, and a comment to write beside it. What is `off` is commented out itself."""

    value: Any
    comment: str = ""
    off: bool = False


Rows = dict[str, Row]
# the trainers' defaults
_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
_ROWS = 32
"""Rows per optimizer step of a new file, or as near as the number of GPUs allows."""
_TOKENS = 2048


@dataclass(slots=True, kw_only=True)
class Draft:
    """A stage file to be written.

    Of a converted file `lost` is what the stage cannot say, with the reason, and `checks` what a person has
    to look at, both under the names of that file. `remarks` are what a person should know of a new one.
    """

    stage: str
    backend: str
    origin: str
    gpus: int | None = None
    deepspeed: str = "none"
    batch: tuple[int, int] | None = None
    rows: Rows = field(default_factory=dict)
    lost: dict[str, tuple[Any, str]] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def text(self, path: Path) -> str:
        """The file; `path` is where it will lie, for the command in its first lines."""
        batch = []
        if self.batch is not None:
            rows = "batch: {{global: {}, per_device: {}}}".format(*self.batch)
            batch = [f"{rows:<42}# rows per step; accumulation follows from --gpus"]
        lines = [
            f"# {self.stage.upper()} on {self.backend}, {self.origin}.",
            f"#   launch {self.stage} {path} --gpus {1 if self.gpus is None else self.gpus}",
            f"stage: {self.stage}",
            _line("backend", Row(self.backend, "open_instruct or trl")),
            _line("deepspeed", Row(self.deepspeed, "zero1, zero2, zero3, zero3_offload, a path, or none")),
            *batch,
            f"{'expect: {loss: finite}':<42}# what the verdict asks for: `launch explain expect`",
            f"{'args:':<42}# arguments of the trainer: `launch explain KEY {path}`",
        ]
        for name, row in self.rows.items():
            lines += _argument(name, row)
        if self.checks:
            lines += ["", "# Check by hand:", *(f"#   {key}: {why}" for key, why in self.checks.items())]
        if self.lost:
            lines += ["", "# No counterpart:"]
        for key, (value, why) in self.lost.items():
            shown = brief(redact({key: value})[key])
            lines.append(f"#   {key}: {shown}".replace("\n", " ") + (f"  ({why})" if why else ""))
        return "\n".join(lines) + "\n"

    def use_batch(self) -> None:
        """Write `batch:` in the place of the two arguments, where the number of GPUs is known."""
        if self.gpus is None:
            return
        each, steps = (self.rows.pop(name, Row(usual)).value for name, usual in _BATCH.items())
        if isinstance(each, int) and isinstance(steps, int):
            self.batch = each * steps * max(1, self.gpus), each
        else:
            self.rows |= dict(zip(_BATCH, (Row(each), Row(steps)), strict=True))


def _argument(key: str, row: Row) -> list[str]:
    """The lines of one argument; of a list of mappings one line a key."""
    listed = row.value if isinstance(row.value, list) else []
    if row.off or not any(isinstance(item, dict) for item in listed):
        return [f"  {_line(key, row, 40)}"]
    block = yaml.safe_dump({key: row.value}, sort_keys=False, width=10**6, allow_unicode=True)
    return [f"  {line}" for line in block.splitlines()]


def _line(key: str, row: Row, width: int = 42) -> str:
    value = yaml.safe_dump(row.value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = f"{key}: {value.strip().removesuffix('...').strip()}"
    if row.off:
        text = f"# {text}"
    return f"{text:<{width - 1}} # {row.comment}" if row.comment else text


def new(
    stage: str, backend: str, *, model: str, data: str, gpus: int, environ: Mapping[str, str], is_pinned: bool = True
) -> Draft:
    """A first stage file for a model and a data set, each a name on the hub or a path.

    `is_pinned`: it is for the release of TRL whose templates launch knows.
    Raises UsageError of rows that have to be converted first, and of a file that TRL cannot load alone.
    """
    rows = data_rows.look(data, stage, backend, environ)
    if rows is not None:
        _require_readable(rows, stage, backend)
    draft = Draft(stage=stage, backend=backend, origin="written by `launch init`", gpus=gpus)
    if gpus > 1:
        draft.deepspeed = "zero2_fp32_comm"
    elif BACKENDS[backend].STAGES[stage].needs_process_group:
        # one GPU crashes without it, and the CPU leaves it out
        draft.deepspeed = "zero2"
    each = 4 if stage == "sft" else 2
    on_all = each * max(1, gpus)
    draft.batch = on_all * max(1, _ROWS // on_all), each
    draft.rows = {"model_name_or_path": Row(model, "a name on the hub, or a folder")}
    draft.rows |= _trl(stage, data) if backend == "trl" else _open_instruct(stage, data)
    length = "max_length" if backend == "trl" else "max_seq_length"
    draft.rows[length] = Row(_length(model, environ), "tokens; longer rows are cut")
    if stage == "sft" and backend == "trl":
        obstacle = _mask_obstacle(model, environ, is_pinned=is_pinned)
        _mask_questions(draft, data, rows, obstacle)
    return draft


def _length(model: str, environ: Mapping[str, str]) -> int:
    """Tokens of a row: as many as usual, or as the model was made for where it lies here and takes fewer."""
    config = model_config.text_part(model_config.read(model, environ))
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and 0 < positions < _TOKENS:
        return positions
    return _TOKENS


def _require_readable(rows: data_rows.Rows, stage: str, backend: str) -> None:
    """Raise UsageError with the command that converts rows which the trainer does not read."""
    form = rows.conversion
    if form is None:
        return
    trainer = "TRL" if backend == "trl" else "open-instruct"
    source = rows.convertible
    output = Path("converted/train.jsonl")
    message = f"{source} has rows of the form {form.name}, which {trainer}'s {stage.upper()} does not read"
    command = f"launch data convert {shlex.quote(str(source))} -o {output}"
    help = f"{command} writes {form.into}; then --data {output}"
    raise usage("bad-data", message, help)


_ANSWERS_ALONE = "the loss counts the answers alone, not the questions"
# the models whose templates TRL replaces, in the words of their families
_REPLACED = "Qwen 2.5 and 3, Llama 3.0, Gemma 1 to 3, Phi-3, Cohere, DeepSeek-V3, GLM-4, gpt-oss and others"


def _mask_questions(draft: Draft, data: str, rows: data_rows.Rows | None, obstacle: str | None) -> None:
    """Have the loss count answers alone, where the rows are chats and no obstacle stands against it.

    Without it every token of a chat is trained on
    (trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[is enabled. With]).
    """
    key = "assistant_only_loss"
    if rows is None:
        draft.rows[key] = Row(True, f"for chats: {_ANSWERS_ALONE}", off=True)
        remark = f"the rows of {brief(data)} were not looked at: of chats every token is trained on"
        draft.remarks = (f"{remark}, questions too, without `{key}: true`",)
        return
    if rows.kind != "chats":
        return
    if obstacle is None:
        draft.rows[key] = Row(True, _ANSWERS_ALONE)
        draft.remarks = (f"{key}: true: {_ANSWERS_ALONE}",)
    else:
        draft.rows[key] = Row(True, obstacle, off=True)
        draft.remarks = (f"every token of a chat is trained on, questions too: {obstacle}",)


def _mask_obstacle(model: str, environ: Mapping[str, str], *, is_pinned: bool) -> str | None:
    """Why TRL cannot, or perhaps cannot, tell answers from questions in what a model's template writes."""
    template = chat_template.read(model, environ)
    if template is None:
        return f"{brief(model)} is not here; `assistant_only_loss` works with unchanged templates of {_REPLACED}"
    if not template:
        return f"{brief(model)} has no chat template"
    if chat_template.has_marker(template):
        return None
    if not chat_template.is_replaced(template):
        return "the chat template has no {% generation %}, and TRL knows no other version of it"
    if not is_pinned:
        return f"the chat template has no {{% generation %}}; only of {TRL_PIN} it is known that TRL replaces it"
    return None


def _trl(stage: str, data: str) -> Rows:
    columns, learning_rate = "`messages`, or `prompt` and `completion`, or `text`", 2e-5
    own = {"packing": Row(False, "true: several rows in one sequence, faster for short rows")}
    if stage == "dpo":
        columns, learning_rate = "`chosen` and `rejected`", 5e-7
        own = {"beta": Row(0.1, "how far the model may go from where it started")}
    data_row = Row(data, f"rows with {columns}")
    if is_dir(data):
        data_row = Row(_folder_name(data), f"rows with {columns}")
    elif is_file(data):
        # TRL loads a folder of files, not one of them; `datasets` takes the files of a folder for data by their names
        folder = Path(data).parent
        if any(path.suffix != Path(data).suffix for path in folder.iterdir()):
            message = f"TRL loads a folder of data, and {folder.absolute()} holds more than data"
            raise usage("bad-data", message, f"mkdir data && mv {data} data/, then --data data")
        data_row = Row(_folder_name(str(folder)), f"all data files of this folder: rows with {columns}")
    return {
        "dataset_name": data_row,
        "output_dir": Row(f"output/{stage}"),
        "max_length": Row(_TOKENS, "tokens; longer rows are cut"),
        **own,
        "num_train_epochs": Row(1),
        "learning_rate": Row(learning_rate),
        "lr_scheduler_type": Row("cosine"),
        "warmup_steps": Row(0.03, "below 1: a share of all steps"),
        "gradient_checkpointing": Row(True, "less memory, slower"),
        "logging_steps": Row(1),
        "save_strategy": Row("epoch"),
        "report_to": Row("none", "wandb, trackio, mlflow"),
        "seed": Row(42),
    }


def _folder_name(folder: str) -> str:
    """A folder as `load_dataset` takes it for one: `json` alone is the name of a reader."""
    return f"./{folder}" if folder in sources.LOADERS else folder


def _open_instruct(stage: str, data: str) -> Rows:
    is_sft = stage == "sft"
    memory = {"activation_memory_budget": Row(0.5, "below 1: less memory, slower")}
    if is_sft:
        memory = {"gradient_checkpointing": Row(True, "less memory, slower")}
    amount = 'the data set and its share: 0.5 is half of it, "200" are 200 rows'
    return {
        "chat_template_name": Row("tulu"),
        "dataset_mixer_list" if is_sft else "mixer_list": Row([data, 1.0], amount),
        "max_seq_length": Row(_TOKENS, "tokens; longer rows are cut"),
        "output_dir": Row(f"output/{stage}"),
        "do_not_randomize_output_dir": Row(True, "or upstream appends its exp_name"),
        **({} if is_sft else {"loss_type": Row("dpo_norm"), "beta": Row(5.0)}),
        "num_train_epochs" if is_sft else "num_epochs": Row(1),
        "learning_rate": Row(5e-6 if is_sft else 5e-7),
        "lr_scheduler_type": Row("linear"),
        "warmup_ratio": Row(0.03),
        **memory,
        "checkpointing_steps": Row("epoch" if is_sft else 500),
        "logging_steps": Row(1),
        "with_tracking": Row(False, "true: wandb"),
        "push_to_hub": Row(False),
        "try_launch_beaker_eval_jobs": Row(False),
    }


Values = Mapping[str, Any]
Part = tuple[str, str, Any, str]
"""Their key, TRL's key, its value, and what to check by hand (empty: nothing)."""

_FURTHER_SETS = "several sets are entries of `datasets`, with a `path` each, in the place of `dataset_name`"
_NO_SPLIT = "name a split with `dataset_test_split`; `datasets` with `test_split_size` splits off a part"
_TEMPLATE = "TRL takes the template of the tokenizer; `chat_template_path` names another one"
_COLUMNS = {"sft": "rows need `messages`, or `prompt` and `completion`", "dpo": "rows need `chosen` and `rejected`"}
_SPLITS = frozenset({"val_set_size", "val_size", "test_datasets", "eval_dataset"})
_EVALUATION = ("eval_", "evals_", "do_eval", "per_device_eval")
_VARIABLE = "set WANDB_PROJECT and WANDB_ENTITY where it runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One tool's files: what its keys are called in TRL, and how those are read that are not renamed.

    `switches` are what a key sets that is on, `without` the reasons why keys have no counterpart, and
    `defaults` those that differ from TRL's, under TRL's names.
    """

    keys: Mapping[str, str]
    read: Callable[[Values, str], Iterator[Part]]
    switches: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)
    dropped: str = ""


def _axolotl(given: Values, stage: str) -> Iterator[Part]:
    yield from _data_sets(given, stage)
    first = _first(given.get("datasets"))
    kind = str(first.get("type") or "")
    if given.get("train_on_inputs"):
        yield "train_on_inputs", "completion_only_loss", False, ""
    elif stage not in PAIRED and kind in {"chat_template", "sharegpt"}:
        yield "train_on_inputs", "assistant_only_loss", True, ""
    if kind == "completion":
        yield "datasets", "dataset_text_field", first.get("field", "text"), ""
    adapter = given.get("adapter")
    if adapter in ("lora", "qlora"):
        yield "adapter", "use_peft", True, ""
        yield "lora_dropout", "lora_dropout", given.get("lora_dropout") or 0.0, ""
    if adapter == "qlora":
        yield "adapter", "load_in_4bit", True, ""
        yield "adapter", "use_bnb_nested_quant", True, ""
    if given.get("bf16") in (True, "auto", "full"):
        yield "bf16", "bf16", True, ""
        yield "bf16", "dtype", "bfloat16", ""
    if "liger" in str(given.get("plugins")).lower():
        yield "plugins", "use_liger_kernel", True, ""
    if given.get("saves_per_epoch") == 1:
        yield "saves_per_epoch", "save_strategy", "epoch", ""
    if given.get("wandb_project"):
        yield "wandb_project", "report_to", "wandb", _VARIABLE
    tokens = given.get("special_tokens")
    for name, token in tokens.items() if isinstance(tokens, Mapping) else ():
        yield "special_tokens", name, token, ""


def _llama_factory(given: Values, stage: str) -> Iterator[Part]:
    first, *others = str(given.get("dataset") or "").replace(" ", "").split(",")
    if first:
        advice = f"a name of dataset_info.json: write its name on the hub, or its folder; {_COLUMNS[stage]}"
        yield "dataset", "dataset_name", first, advice
    if others:
        yield "dataset", "", others, _FURTHER_SETS
    if given.get("finetuning_type", "lora") == "lora":
        rank = given.get("lora_rank", 8)
        yield "finetuning_type", "use_peft", True, ""
        yield "lora_rank", "lora_r", rank, ""
        if isinstance(rank, int):
            yield "lora_alpha", "lora_alpha", given.get("lora_alpha") or 2 * rank, ""
        yield "lora_dropout", "lora_dropout", given.get("lora_dropout") or 0.0, ""
        target = str(given.get("lora_target") or "all")
        modules = ["all-linear"] if target == "all" else target.replace(" ", "").split(",")
        yield "lora_target", "lora_target_modules", modules, ""
        yield "finetuning_type", "dtype", "bfloat16", ""
    elif given.get("finetuning_type") != "full":
        yield "finetuning_type", "", given["finetuning_type"], "TRL trains all weights, or LoRA"
    if (bits := given.get("quantization_bit")) in (4, 8):
        yield "quantization_bit", f"load_in_{bits}bit", True, ""
        if bits == 4 and given.get("double_quantization", True):
            yield "double_quantization", "use_bnb_nested_quant", True, ""
    names = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}
    if (attention := names.get(str(given.get("flash_attn")))) is not None:
        yield "flash_attn", "attn_implementation", attention, ""


def _first(data: Any) -> Values:
    listed = data if isinstance(data, list) else [data]
    return listed[0] if listed and isinstance(listed[0], Mapping) else {}


def _trl_data(given: Values, stage: str) -> Iterator[Part]:
    """The sets of TRL's own file as they are; a single whole one as `dataset_name`, which says the same."""
    data = given.get("datasets")
    if data is None:
        return
    is_mixed = given.keys() & {"test_split_size", "streaming"} or not isinstance(data, list) or len(data) != 1
    keys = set(_first(data))
    if is_mixed or not keys or keys - {"path", "name"}:
        yield "datasets", "datasets", data, ""
    else:
        yield from _data_sets(given, stage)


def _data_sets(given: Values, stage: str) -> Iterator[Part]:
    """The first data set as TRL's arguments; other tools' entries say more of how rows are read."""
    key, data = "datasets", given.get("datasets")
    first = _first(data)
    kind = str(first.get("type") or "")
    fits = kind in {"", "chat_template", "completion"} and not first.get("field_messages")
    advice = "" if fits else f"`type: {kind}` is not applied: {_COLUMNS[stage]}"
    for theirs, ours in (("name", "dataset_config"), ("split", "dataset_train_split")):
        if first.get(theirs):
            yield key, ours, first[theirs], ""
    if first.get("path"):
        yield key, "dataset_name", first["path"], advice
    if first.get("data_files"):
        yield key, "", first["data_files"], "TRL loads a name of the hub, or a folder of files"
    if isinstance(data, list) and len(data) > 1:
        rest = [one.get("path") if isinstance(one, Mapping) else one for one in data[1:]]
        yield key, "", rest, _FURTHER_SETS


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


FORMATS = {
    "axolotl": Format(
        read=_axolotl,
        keys=_pairs(
            "base_model=model_name_or_path revision_of_model=model_revision sequence_len=max_length "
            "sample_packing=packing micro_batch_size=per_device_train_batch_size "
            "eval_batch_size=per_device_eval_batch_size num_epochs=num_train_epochs lr_scheduler=lr_scheduler_type "
            "optimizer=optim warmup_ratio=warmup_steps peft_use_dora=use_dora peft_use_rslora=use_rslora "
            "dpo_beta=beta rl_beta=beta dpo_label_smoothing=label_smoothing dataset_processes=dataset_num_proc "
            "wandb_name=run_name torch_dtype=dtype hub_model_id=hub_model_id"
        ),
        switches={
            "flash_attention": ("attn_implementation", "flash_attention_2"),
            "sdp_attention": ("attn_implementation", "sdpa"),
            "eager_attention": ("attn_implementation", "eager"),
            "lora_target_linear": ("lora_target_modules", ["all-linear"]),
            "hub_model_id": ("push_to_hub", True),
        },
        defaults=dict(lr_scheduler_type="cosine", num_train_epochs=1, max_length=512, gradient_checkpointing=False),
        without={
            "chat_template": _TEMPLATE,
            "wandb_entity": _VARIABLE,
            "pad_to_sequence_len": "TRL pads to the longest row of a batch",
            "fsdp": "use `deepspeed:`",
            "fsdp_config": "use `deepspeed:`",
        },
        dropped="strict model_type tokenizer_type dataset_prepared_path rl local_rank debug liger_rope liger_rms_norm "
        "liger_glu_activation liger_fused_linear_cross_entropy",
    ),
    "llama_factory": Format(
        read=_llama_factory,
        keys=_pairs(
            "cutoff_len=max_length preprocessing_num_workers=dataset_num_proc warmup_ratio=warmup_steps "
            "pref_beta=beta pref_loss=loss_type dpo_label_smoothing=label_smoothing "
            "enable_liger_kernel=use_liger_kernel additional_target=lora_modules_to_save "
            "evaluation_strategy=eval_strategy"
        ),
        switches={"pure_bf16": ("dtype", "bfloat16"), "neat_packing": ("packing", True)},
        defaults={"learning_rate": 5e-5, "max_length": 2048},
        without={
            "template": _TEMPLATE,
            "max_samples": "a part of a set is a slice: `datasets` with `split: train[:1000]`",
        },
        dropped="stage do_train overwrite_cache overwrite_output_dir plot_loss dataset_dir",
    ),
    "trl": Format(
        read=_trl_data,
        keys=_pairs(
            "max_seq_length=max_length warmup_ratio=warmup_steps torch_dtype=dtype "
            "evaluation_strategy=eval_strategy use_liger=use_liger_kernel"
        ),
        without={"env": "set the variables where it runs"},
        dropped="config_file",
    ),
}


def convert(path: Path, *, stage: str | None, gpus: int | None, locator: Locator) -> tuple[Draft, list[Finding]]:
    """The stage that a foreign file describes, and a finding for all that it does not carry over.

    Raises InvalidConfig where the file cannot be read or its stage is neither SFT nor DPO, and UsageError
    where it is none of the three formats.
    """
    document = read_yaml(path)
    given = {key: value for key, value in document.value.items() if value not in (None, "", [])}
    kind = tool_of(given)
    if kind is None:
        message = f"{path} is not a file of TRL, Axolotl or LLaMA-Factory"
        raise usage("unknown-format", message, f"launch validate-config {path}")
    stage = _stage(path, kind, document, stage, locator)
    draft = Draft(stage=stage, backend="trl", origin=f"from {path.name} ({TOOLS[kind]})", gpus=gpus)
    _convert_keys(draft, FORMATS[kind], locator.schema("trl", stage).fields, given)
    first = [name for name in _FIRST if name in draft.rows]
    draft.rows = {name: draft.rows[name] for name in dict.fromkeys([*first, *draft.rows])}
    draft.use_batch()
    return draft, [*_findings(path, document, draft)]


_FIRST = (
    "model_name_or_path",
    "datasets",
    "test_split_size",
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "output_dir",
)


def _convert_keys(draft: Draft, form: Format, fields: Mapping[str, Field], given: Values) -> None:
    """Read every key of the file into rows for TRL, what is lost with the reason, and what a person has to check."""
    parts = [(key, *form.switches[key], "") for key in given if key in form.switches and given[key]]
    parts += form.read(given, draft.stage)
    done = ({key for key, *_ in parts} | {*form.dropped.split()}) - form.keys.keys()
    no_split = bool(given.keys() & _SPLITS)
    moved = ENTRIES[draft.stage].moved
    for key, value in given.items():
        if key in done:
            continue
        known = form.keys.get(key, key)
        if known not in fields and known in moved:
            known = moved[known].to or known
        if key in {"deepspeed", "accelerate_config"} and (deepspeed := _deepspeed(value)) is not None:
            draft.deepspeed = deepspeed
        elif key in {"deepspeed", "accelerate_config"}:
            parts.append((key, "", value, "write `deepspeed:` with one of launch's names, or a path"))
        elif key in form.without or key in _SPLITS or (no_split and known.startswith(_EVALUATION)):
            parts.append((key, "", value, form.without.get(key, _NO_SPLIT)))
        else:
            parts.append((key, known, value, ""))
    for key, name, value, advice in parts:
        if (field := fields.get(name)) is None:
            # what is switched off is missing without a loss
            if value is not False and value != 0:
                draft.lost[key] = value, advice
        elif value is not False or field.default is not False:
            draft.rows[name] = Row(value, "" if key == name else key)
            if advice:
                draft.checks[key] = advice
    for name, value in form.defaults.items():
        draft.rows.setdefault(name, Row(value, "the default there"))


def _deepspeed(named: Any) -> str | None:
    """launch's name for a DeepSpeed file of the other tools, where its name says which it is."""
    match = re.search(r"(?:zero|z)_?([0123])", str(named).lower())
    if match is None or match[1] == "0":
        return None if match is None else "none"
    return f"zero{match[1]}{'_offload' if match[1] == '3' and 'offload' in str(named) else ''}"


def _findings(path: Path, document: Document, draft: Draft) -> Iterator[Finding]:
    for key, advice in draft.checks.items():
        yield _finding(path, document, "note", "converted", key, f"`{key}` is converted in part", advice)
    reasons: dict[str, list[str]] = {}
    for key, (_, why) in draft.lost.items():
        reasons.setdefault(why, []).append(key)
    for why, keys in reasons.items():
        verb = "has" if len(keys) == 1 else "have"
        message = f"{', '.join(f'`{key}`' for key in keys)} {verb} no counterpart in a stage for TRL"
        yield _finding(path, document, "warning", "no-counterpart", keys[0], message, why or None)


def _stage(path: Path, kind: str, document: Document, stage: str | None, locator: Locator) -> str:
    key = {"axolotl": "rl", "llama_factory": "stage", "trl": ""}[kind]
    named = document.value.get(key)
    if named is None and kind == "trl":
        sft, dpo = (set(locator.schema("trl", one).fields) for one in STAGES)
        named = "dpo" if document.value.keys() & (dpo - sft) else None
    if named not in (None, *STAGES):
        message = f"`{named}` is not a stage of launch, which trains {' and '.join(STAGES)}"
        raise InvalidConfig(_finding(path, document, "error", "bad-stage", key or "stage", message))
    return stage or named or "sft"


def _finding(
    path: Path, document: Document, severity: Severity, code: str, key: str, message: str, help: str | None = None
) -> Finding:
    origin = document.origins.get(key)
    line = origin.line if origin else None
    return launch_finding(severity, code, message, help, key=key, file=str(path), line=line)
