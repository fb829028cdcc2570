"""A new stage file: the templates of `launch init`, and how one is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from launcher.errors import brief
from launcher.redaction import redact


class Row(NamedTuple):
    """The value of an argument, and a comment to write beside it."""

    value: Any
    comment: str = ""


Rows = dict[str, Row]
# the trainers' defaults
_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
_ROWS = 32
"""Rows per optimizer step of a new file, or as near as the number of GPUs allows."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """A stage file to be written.

    Of a converted file `lost` is what the stage cannot say, with the reason, and `checks` what a person has
    to look at, both under the names of that file.
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
            *(f"  {_line(name, row, 40)}" for name, row in self.rows.items()),
        ]
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


def _line(key: str, row: Row, width: int = 42) -> str:
    value = yaml.safe_dump(row.value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = f"{key}: {value.strip().removesuffix('...').strip()}"
    return f"{text:<{width - 1}} # {row.comment}" if row.comment else text


def new(stage: str, backend: str, *, model: str, data: str, gpus: int) -> Draft:
    """A first stage file for a model and a data set, each a name on the hub or a path."""
    each = 4 if stage == "sft" else 2
    devices = max(1, gpus)
    rows = _trl(stage, data) if backend == "trl" else _open_instruct(stage, data)
    return Draft(
        stage=stage,
        backend=backend,
        origin="written by `launch init`",
        gpus=gpus,
        deepspeed="zero2_fp32_comm" if gpus > 1 else "none",
        batch=(each * devices * max(1, _ROWS // (each * devices)), each),
        rows={"model_name_or_path": Row(model, "a name on the hub, or a folder"), **rows},
    )


def _trl(stage: str, data: str) -> Rows:
    columns, learning_rate = "`messages`, or `prompt` and `completion`, or `text`", 2e-5
    own = {"packing": Row(False, "true: several rows in one sequence, faster for short rows")}
    if stage == "dpo":
        columns, learning_rate = "`chosen` and `rejected`", 5e-7
        own = {"beta": Row(0.1, "how far the model may go from where it started")}
    data_row = Row(data, f"rows with {columns}")
    if Path(data).is_file():
        # TRL loads a folder of files, not one of them
        data_row = Row(str(Path(data).parent), f"all data files of this folder: rows with {columns}")
    return {
        "dataset_name": data_row,
        "output_dir": Row(f"output/{stage}"),
        "max_length": Row(2048, "tokens; longer rows are cut"),
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


def _open_instruct(stage: str, data: str) -> Rows:
    is_sft = stage == "sft"
    memory = {"activation_memory_budget": Row(0.5, "below 1: less memory, slower")}
    if is_sft:
        memory = {"gradient_checkpointing": Row(True, "less memory, slower")}
    amount = 'the data set and its share: 0.5 is half of it, "200" are 200 rows'
    return {
        "chat_template_name": Row("tulu"),
        "dataset_mixer_list" if is_sft else "mixer_list": Row([data, 1.0], amount),
        "max_seq_length": Row(2048, "tokens; longer rows are cut"),
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
