"""A new stage file: what it holds and how it is written, and the templates of `launch init`."""

import shlex
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from launcher.artifacts import chat_template, model_config
from launcher.dataset import sources
from launcher.errors import shorten, usage
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_dir, is_file
from launcher.stage import rows as data_rows
from launcher.stage.options import Batch
from launcher.upstream.trainers import BACKENDS
from launcher.upstream.trl import PIN as TRL_PIN


class Row(NamedTuple):
    """The value of an argument, and a comment beside it. One that is `off` is commented out."""

    value: Any
    comment: str = ""
    off: bool = False


Rows = dict[str, Row]
_ROWS = 32
"""Rows per optimizer step of a new file, or as near as the number of GPUs allows."""
_TOKENS = 2048


@dataclass(slots=True, kw_only=True)
class Draft:
    """A stage file to be written.

    Of a converted file `lost` is what the stage cannot say and `unneeded` what it need not say,
    each with its value as shown and the reason; `checks` is what a person has to look at; all under
    the names of that file. `files` are written beside the stage file. `remarks` are what a person
    should know about it. `gpus` are those of one machine.
    """

    stage: str
    backend: str
    origin: str
    script: str | None = None
    gpus: int | None = None
    nodes: int = 1
    deepspeed: str = "none"
    mixed_precision: str | None = None
    name: str | None = None
    slurm: dict[str, str | bool] = field(default_factory=dict)
    batch: Batch | None = None
    rows: Rows = field(default_factory=dict)
    lost: dict[str, tuple[str, str]] = field(default_factory=dict)
    unneeded: dict[str, tuple[str, str]] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def command(self, path: Path) -> str:
        """How the stage is started on the devices that it was written for."""
        gpus = 1 if self.gpus is None else self.gpus
        command = f"launch {self.stage} {path} --gpus {gpus}"
        if self.nodes != 1:
            command = f"{command} --nodes {self.nodes}"
        return command

    def add_file(self, name: str, text: str) -> str:
        """Have a file written beside the stage file; its name until `place_files` says where."""
        self.files[name] = text
        return name

    def place_files(self, path: Path) -> dict[Path, str]:
        """The files to write beside a stage file at `path`; rows and checks then name them."""
        placed: dict[Path, str] = {}
        for name, text in self.files.items():
            target = path.parent / f"{path.stem}.{name}"
            placed[target] = text
            for key, row in self.rows.items():
                if row.value == name:
                    self.rows[key] = row._replace(value=str(target))
            for key, why in self.checks.items():
                self.checks[key] = why.replace(name, str(target), 1)
        return placed

    def add_defaults(self, values: Mapping[str, Any], *, note: str = "the default there") -> None:
        """Write out defaults of the source that differ from those of the trainer."""
        for name, value in values.items():
            self.rows.setdefault(name, Row(value, note))

    def text(self, path: Path) -> str:
        """The file; `path` is where it will lie, for the command in its first lines."""
        lines = [
            f"# {self.stage.upper()} on {self.backend}, {self.origin}.",
            f"#   {self.command(path)}",
            f"stage: {self.stage}",
            _render_line("backend", Row(self.backend, "open_instruct or trl")),
            *self._render_options(),
            f"{'expect: {loss: finite}':<42}# what the verdict asks for: `launch explain expect`",
            f"{'args:':<42}# arguments of the trainer: `launch explain KEY {path}`",
        ]
        for name, row in self.rows.items():
            lines += _render_argument(name, row)
        if self.checks:
            lines += ["", "# Check by hand:"]
            lines += [_render_comment(f"{key}: {why}") for key, why in self.checks.items()]
        lines += _render_reasons("No counterpart", self.lost)
        lines += _render_reasons("Not needed", self.unneeded)
        return "\n".join(lines) + "\n"

    def _render_options(self) -> list[str]:
        """The lines of launch's own keys between `backend` and `expect`."""
        lines = []
        if self.script is not None:
            lines.append(_render_line("script", Row(self.script)))
        if self.name is not None:
            lines.append(_render_line("name", Row(self.name)))
        shards = "zero1, zero2, zero3, zero3_offload, a path, or none"
        lines.append(_render_line("deepspeed", Row(self.deepspeed, shards)))
        if self.mixed_precision is not None:
            lines.append(
                _render_line("mixed_precision", Row(self.mixed_precision, "bf16, fp16 or no"))
            )
        if self.batch is not None:
            batch = self.batch
            line = f"batch: {{global: {batch.total}, per_device: {batch.per_device}}}"
            lines.append(f"{line:<42}# rows per step; accumulation follows from --gpus")
        if self.slurm:
            lines.append(_render_line("slurm", Row(self.slurm, "for --slurm")))
        return lines


def _render_reasons(title: str, settings: Mapping[str, tuple[str, str]]) -> list[str]:
    """A paragraph of comments about keys of the source that the file does not have."""
    if not settings:
        return []
    lines = ["", f"# {title}:"]
    for key, (value, why) in settings.items():
        text = f"{key}: {why}"
        if value:
            text = f"{key}: {value}  ({why})"
        lines.append(_render_comment(text))
    return lines


def _render_comment(text: str) -> str:
    for character in set(text):
        if not character.isprintable():
            text = text.replace(character, " ")
    return f"#   {text}"


def _render_argument(key: str, row: Row) -> list[str]:
    """The lines of one argument; of a list of mappings one line a key."""
    is_list = isinstance(row.value, list)
    if row.off or not is_list or not any(isinstance(item, dict) for item in row.value):
        return [f"  {_render_line(key, row, 40)}"]
    block = yaml.safe_dump({key: row.value}, sort_keys=False, width=10**6, allow_unicode=True)
    return [f"  {line}" for line in block.splitlines()]


def _render_line(key: str, row: Row, width: int = 42) -> str:
    value = yaml.safe_dump(row.value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = f"{key}: {value.strip().removesuffix('...').strip()}"
    if row.off:
        text = f"# {text}"
    if row.comment:
        text = f"{text:<{width - 1}} # {row.comment}"
    return text


def draft_stage(
    stage: str,
    backend: str,
    *,
    model: str,
    data: str,
    gpus: int,
    output: str,
    environ: Mapping[str, str],
    lora: bool = False,
    is_pinned: bool = True,
) -> Draft:
    """A first stage file for a model and a data set, each a name on the hub or a path.

    `output` is the folder for the trained model. `lora`: train an adapter instead of all weights.
    `is_pinned`: it is for the release of TRL whose templates launch knows. Raises UsageError if the
    rows have to be converted first, or if TRL cannot load the file alone.
    """
    rows = data_rows.read_rows(data, stage, backend, environ)
    if rows is not None:
        _require_readable(rows, stage, backend)
    draft = Draft(stage=stage, backend=backend, origin="written by `launch init`", gpus=gpus)
    if gpus > 1:
        draft.deepspeed = "zero2_fp32_comm"
    elif BACKENDS[backend].STAGES[stage].needs_process_group:
        # one GPU crashes without it, and the CPU leaves it out
        draft.deepspeed = "zero2"
    elif backend == "open_instruct" and not lora:
        # open-instruct has copies of the weights in float32 only under DeepSpeed; without them
        # steps of this learning rate round to nothing
        draft.deepspeed = "zero2"
    per_device = _PER_DEVICE[stage]
    on_all = per_device * max(1, gpus)
    total = on_all * max(1, _ROWS // on_all)
    draft.batch = Batch(total=total, per_device=per_device)
    draft.rows = {"model_name_or_path": Row(model, "a name on the hub, or a folder")}
    length = _choose_length(model, environ)
    if backend == "trl":
        draft.rows |= _draft_trl(stage, data, output, length)
    else:
        draft.rows |= _draft_open_instruct(stage, data, output, length)
    if lora:
        draft.rows |= _LORA[backend]
        # dpo_tune_cache.py reads it only without LoRA
        draft.rows.pop("activation_memory_budget", None)
        draft.rows["learning_rate"] = Row(_LORA_RATE[stage], "LoRA needs about ten times more")
    if gpus > 0 and backend == "trl":
        draft.rows["dtype"] = Row("bfloat16", "TRL loads in float32 otherwise")
        if not lora and draft.deepspeed == "none":
            why = "half the memory, but steps of this learning rate are lost in rounding"
            draft.rows["dtype"] = Row("bfloat16", why, off=True)
    if stage == "sft" and backend == "trl":
        obstacle = _find_mask_obstacle(model, environ, is_pinned=is_pinned)
        _mask_questions(draft, data, rows, obstacle)
    return draft


_LORA: Mapping[str, Rows] = {
    "trl": {
        "use_peft": Row(True, "LoRA: trains an adapter, needs far less memory"),
        "lora_r": Row(16),
        "lora_alpha": Row(32),
        "lora_dropout": Row(0.05),
        "lora_target_modules": Row(["all-linear"]),
    },
    "open_instruct": {
        "use_lora": Row(True, "trains an adapter, needs far less memory"),
        "lora_rank": Row(16),
        "lora_alpha": Row(32),
        "lora_dropout": Row(0.05),
    },
}
"""The arguments of LoRA, by trainer."""
_LORA_RATE = {"sft": 2e-4, "dpo": 2e-5}
_PER_DEVICE = {"sft": 4, "dpo": 2}


def _choose_length(model: str, environ: Mapping[str, str]) -> Row:
    """The longest row in tokens: the model's own maximum if its config is here."""
    config = model_config.take_text_part(model_config.read_model_config(model, environ))
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and positions > 0:
        return Row(positions, "tokens, the model's maximum; longer rows are cut")
    return Row(_TOKENS, "tokens; longer rows are cut")


def _require_readable(rows: data_rows.Rows, stage: str, backend: str) -> None:
    """Raise UsageError, with the command that converts them, for rows the trainer does not read."""
    form = rows.conversion
    if form is None:
        return
    trainer = "TRL" if backend == "trl" else "open-instruct"
    source = str(rows.convertible)
    unread = f"which {trainer}'s {stage.upper()} does not read"
    message = f"{source} has rows of the form {form.name}, {unread}"
    output = "converted/train.jsonl"
    command = f"launch data convert {shlex.quote(source)} -o {output}"
    raise usage("bad-data", message, f"{command} writes {form.into}; then --data {output}")


_ANSWERS_ALONE = "the loss counts the answers alone, not the questions"
# the models whose templates TRL replaces
_REPLACED = (
    "Qwen 2.5 and 3, Llama 3.0, Gemma 1 to 3, Phi-3, Cohere, DeepSeek-V3, GLM-4, gpt-oss and others"
)


def _mask_questions(
    draft: Draft, data: str, rows: data_rows.Rows | None, obstacle: str | None
) -> None:
    """Count answers alone in the loss, if the rows are chats and there is no obstacle.

    Without it every token of a chat is trained on
    (trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[is enabled. With]).
    """
    key = "assistant_only_loss"
    if rows is None:
        draft.rows[key] = Row(True, f"for chats: {_ANSWERS_ALONE}", off=True)
        remark = (
            f"the rows of {shorten(data)} were not looked at: of chats every token is trained on"
        )
        draft.remarks = (f"{remark}, questions too, without `{key}: true`",)
    elif rows.kind == "chats" and obstacle is None:
        draft.rows[key] = Row(True, _ANSWERS_ALONE)
        draft.remarks = (f"{key}: true: {_ANSWERS_ALONE}",)
    elif rows.kind == "chats":
        draft.rows[key] = Row(True, obstacle or "", off=True)
        draft.remarks = (f"TRL trains on every token of a chat, including questions: {obstacle}",)


def _find_mask_obstacle(model: str, environ: Mapping[str, str], *, is_pinned: bool) -> str | None:
    """Why TRL cannot, or perhaps cannot, tell answers from questions with a model's template."""
    template = chat_template.read_template(model, environ)
    if template is None:
        works = f"`assistant_only_loss` works with unchanged templates of {_REPLACED}"
        return f"{shorten(model)} is not here; {works}"
    if not template:
        return f"{shorten(model)} has no chat template"
    if chat_template.has_marker(template):
        return None
    unmarked = "the chat template has no {% generation %}"
    if not chat_template.is_replaced(template):
        return f"{unmarked}, and TRL knows no other version of it"
    if not is_pinned:
        return f"{unmarked}; only of {TRL_PIN} it is known that TRL replaces it"
    return None


def _draft_trl(stage: str, data: str, output: str, length: Row) -> Rows:
    if stage == "dpo":
        columns = "`chosen` and `rejected`"
        learning_rate = 5e-7
        of_stage = {"beta": Row(0.1, "how far the model may go from where it started")}
    else:
        columns = "`messages`, or `prompt` and `completion`, or `text`"
        learning_rate = 2e-5
        faster = "true: several rows in one sequence, faster for short rows"
        of_stage = {"packing": Row(False, faster)}
    comment = f"rows with {columns}"
    if is_dir(data):
        data = _name_folder(data)
    elif is_file(data):
        # TRL loads a folder of files, not one of them
        folder = Path(data).parent
        if any(path.suffix != Path(data).suffix for path in folder.iterdir()):
            message = f"TRL loads a folder of data, and {folder.absolute()} holds more than data"
            raise usage("bad-data", message, f"mkdir data && mv {data} data/, then --data data")
        data = _name_folder(str(folder))
        comment = f"all data files of this folder: {comment}"
    return {
        "dataset_name": Row(data, comment),
        "output_dir": Row(output),
        "max_length": length,
        **of_stage,
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


def _name_folder(folder: str) -> str:
    """A folder as `load_dataset` takes it for one: `json` alone is the name of a reader."""
    if folder in sources.LOADERS:
        return f"./{folder}"
    return folder


def _draft_open_instruct(stage: str, data: str, output: str, length: Row) -> Rows:
    amount = 'the data set and its share: 0.5 is half of it, "200" are 200 rows'
    data_row = Row([data, 1.0], amount)
    if stage == "sft":
        data_key = "dataset_mixer_list"
        training = {
            "num_train_epochs": Row(1),
            "learning_rate": Row(5e-6),
            "lr_scheduler_type": Row("linear"),
            "warmup_ratio": Row(0.03),
            "gradient_checkpointing": Row(True, "less memory, slower"),
            "checkpointing_steps": Row("epoch"),
        }
    else:
        data_key = "mixer_list"
        training = {
            "loss_type": Row("dpo_norm"),
            "beta": Row(5.0),
            "num_epochs": Row(1),
            "learning_rate": Row(5e-7),
            "lr_scheduler_type": Row("linear"),
            "warmup_ratio": Row(0.03),
            "activation_memory_budget": Row(0.5, "below 1: less memory, slower"),
            "checkpointing_steps": Row(500),
        }
    return {
        "chat_template_name": Row("tulu"),
        data_key: data_row,
        "max_seq_length": length,
        "output_dir": Row(output),
        "do_not_randomize_output_dir": Row(True, "or upstream appends its exp_name"),
        **training,
        "logging_steps": Row(1),
        "with_tracking": Row(False, "true: wandb"),
        "push_to_hub": Row(False),
        "try_launch_beaker_eval_jobs": Row(False),
    }
