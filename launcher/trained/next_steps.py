"""Command lines to paste for a trained model: chat, serve, push, merge."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from launcher import files
from launcher.artifacts import layout, model_files
from launcher.errors import LaunchError
from launcher.lazy_dataclass import dataclass
from launcher.runs.rundir import RunFolder
from launcher.trained import card, merge
from launcher.trained.model import TrainedModel, describe_path, find_of_run

_OWNER = "YOU"
"""What a command names in the place of the user's own name on the hub."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for (vllm/config/lora.py, MaxLoRARanks)."""
_VLLM_KINDS = ("LORA",)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextSteps:
    """Command lines about a model. `merge` is None for a whole model."""

    model: str
    chat: str
    serve: str
    push: str
    merge: str | None = None

    def as_json(self) -> dict[str, str | None]:
        return asdict(self)

    def lines(self) -> list[str]:
        steps = {"chat": self.chat, "merge": self.merge, "serve": self.serve, "push": self.push}
        lines = [f"model: {self.model}"]
        for name, command in steps.items():
            if command is not None:
                lines.append(f"  {name:<6} {command}")
        return lines


def describe_finished(run: RunFolder) -> NextSteps | None:
    """The next steps with the final model of a run; None if it has none."""
    # of a damaged folder only these lines are missing, not the whole answer
    with contextlib.suppress(LaunchError, OSError):
        return describe_model(find_of_run(run))
    return None


def describe_model(model: TrainedModel) -> NextSteps:
    target = shlex.quote(model.name)
    merging: str | None = None
    if model.is_adapter:
        merging = f"launch merge {target}"
    return NextSteps(
        model=describe_path(model.path),
        chat=f"launch chat {target}",
        merge=merging,
        serve=_format_serve_command(model, target),
        push=f"{_format_card_command(model, target)} && {format_upload_command(model)}",
    )


def _format_card_command(model: TrainedModel, target: str) -> str:
    """The command that writes the card; a card of somebody else, such as TRL's, is moved aside."""
    command = f"launch card {target}"
    if card.is_foreign(model.path / card.NAME):
        command += " --replace"
    return command


def format_upload_command(model: TrainedModel) -> str:
    """The command that pushes a model to the hub, without checkpoints and an earlier card."""
    name = _UNSAFE.sub("-", model.path.name).strip("-.") or "model"
    words = ["hf", "upload", f"{_OWNER}/{name}", describe_path(model.path), "."]
    names = files.list_names(model.path)
    left_out = set()
    for name in names:
        if layout.is_checkpoint(name):
            # one pattern for each kind of folder that holds training states
            left_out.add(re.sub(r"\d+\Z", "*", name))
    if card.ASIDE in names or card.is_foreign(model.path / card.NAME):
        left_out.add(card.ASIDE)
    for pattern in sorted(left_out):
        words += ["--exclude", pattern]
    return shlex.join(words)


def _format_serve_command(model: TrainedModel, target: str) -> str:
    path = describe_path(model.path)
    if not model.is_adapter or model.base is None:
        return _format_vllm_command(path)
    config = files.read_json(model.path / model_files.ADAPTER)
    rank = _choose_rank_limit(config)
    if rank is None:
        merged = describe_path(merge.choose_output(model))
        return f"launch merge {target} && {_format_vllm_command(merged)}"
    base = model.base.name
    if model.base.is_folder:
        base = describe_path(Path(base))
    adapter = ("--lora-modules", f"{model.path.name}={path}")
    return _format_vllm_command(base, "--enable-lora", "--max-lora-rank", str(rank), *adapter)


def _format_vllm_command(model: str, *options: str) -> str:
    return shlex.join(["vllm", "serve", model, *options])


def _choose_rank_limit(config: Mapping[str, object]) -> int | None:
    """The value of --max-lora-rank; None if vLLM cannot serve the adapter (DoRA, whole layers)."""
    rank = config.get("r")
    if config.get("peft_type") not in _VLLM_KINDS or not isinstance(rank, int):
        return None
    if config.get("use_dora") or config.get("modules_to_save") or config.get("rank_pattern"):
        return None
    for size in _RANKS:
        if rank <= size:
            return size
    return None
