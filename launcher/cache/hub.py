"""What a stage reads of models, tokenizers and data, local or on the hub: brought here, and looked through.

Before anything is tokenised: upstream's key of tokenised data holds what is in the hub's cache at that
moment (dataset_transformation.py::get_commit_hash[file = launch_utils.custom_cached_file]), so that a set made before
the download has another key than the same set made after it.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from launcher.artifacts import model_config, model_files
from launcher.dataset import mixture, sources
from launcher.errors import Finding, launch_finding, not_ready
from launcher.files import parse_line
from launcher.machine import isolation, sizes
from launcher.machine.python import Trainer
from launcher.paths import exists, is_dir, is_file
from launcher.plan.plan import Plan
from launcher.redaction import redact

Role = Literal["whole", "model", "tokenizer", "card", "data"]

# under the trainer's Python, whose packages training uses
_CALL = (
    isolation.HEAD
    + """
import importlib, json
module, name, words = json.loads(sys.argv[1])
try:
    found = getattr(importlib.import_module(module), name)(**words)
    answer = {"path": found if isinstance(found, str) else None}
except Exception as error:
    answer = {"error": (" ".join(str(error).split()) or type(error).__name__)[:500]}
print(json.dumps(answer))
"""
)
# what no PyTorch model is loaded from
_OTHERS = tuple("*.h5 *.msgpack *.onnx *.ot *.tflite *.gguf *.pth original/* onnx/*".split())
_TOKENIZER = tuple(
    """
    tokenizer* special_tokens_map.json added_tokens.json vocab* merges.txt *.model *.tiktoken
    tekken.json chat_template* additional_chat_templates/* config.json *.py
    preprocessor_config.json processor_config.json
""".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A model, a tokenizer or a data set by its name, and what became of it.

    `role` says how much of it is read: `whole` is every file, which SFT's `snapshot_download` takes;
    `card` the one file that open-instruct's key of tokenised data knows; `data` what TRL trains on, in its
    configuration `config`, of a mixture also from a `folder` of it, or from named `files`. `state` is
    `there`, `fetched`, `missing`, or `unknown` for a card: a data set may have none.
    """

    role: Role
    name: str
    key: str
    revision: str | None = None
    state: str = ""
    place: Path | None = None
    size: int = 0
    seconds: float = 0.0
    commit: str | None = None
    error: str | None = None
    config: str | None = None
    folder: str | None = None
    files: Any = None

    @property
    def local(self) -> bool:
        return exists(self.name) or model_config.is_path(self.name)

    @property
    def kind(self) -> str:
        return {"whole": "model", "card": "data"}.get(self.role, self.role)

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "state": self.state,
            "place": None if self.place is None else str(self.place),
            "bytes": self.size,
            "seconds": round(self.seconds, 2),
            "commit": self.commit,
        }


def required_parts(plan: Plan) -> tuple[Part, ...]:
    return tuple(
        {
            (one.role, one.name, one.revision, one.config, one.folder, str(one.files)): one
            for one in _required_parts(plan)
        }.values()
    )


def _required_parts(plan: Plan) -> Iterator[Part]:
    values, entry = plan.values, plan.stage.entry
    names = entry.names
    revision = values.get("model_revision")
    role: Role = "whole" if entry.whole_model else "model"
    for key in ("model_name_or_path", "config_name"):
        # OLMo-core's names of shapes are nothing of the hub's
        if isinstance(values.get(key), str) and values[key] not in values.schema.configs:
            yield Part(role=role, name=values[key], key=key, revision=revision)
    for key, at in (
        ("tokenizer_name_or_path", values.get("tokenizer_revision") or revision),
        ("chat_template_path", None),
    ):
        name = values.get(key)
        if isinstance(name, str) and name != values.get(names.model) and not is_file(name):
            yield Part(role="tokenizer", name=name, key=key, revision=at)
    mixed = mixture.of_values(values, os.environ)
    if mixed is not None:
        yield from _parts_of_mixture(mixed, values)
        return
    listed = values.get(names.data)
    if isinstance(listed, str) and values.get("dataset_streaming") is not True:
        yield Part(role="data", name=listed, key=names.data, config=values.get("dataset_config"))
    for name in listed[::2] if isinstance(listed, list) else []:
        if isinstance(name, str):
            yield Part(role="card", name=name, key=names.data, revision="main")


def _parts_of_mixture(mixed: mixture.Mixture, values: Mapping[str, Any]) -> Iterator[Part]:
    """The sets of a mixture that are on the hub; a stream is read while it is trained on."""
    if values.get("streaming") is True:
        return
    for one in mixed.sets:
        entry = one.entry
        if entry.path in sources.LOADERS:
            continue
        key = f"{entry.key}.path"
        yield Part(
            role="data", name=entry.path, key=key, config=entry.name, folder=entry.data_dir, files=entry.data_files
        )


def fetch(parts: Sequence[Part], trainer: Trainer, environ: Mapping[str, str]) -> tuple[Part, ...]:
    """Bring what is on the hub, by the trainer's own packages; say of each what came of it.

    HF_HUB_OFFLINE is honoured, and without a network what is here has to do. Progress goes to stderr.
    Raises NotReady where the trainer's Python cannot do it at all.
    """
    return tuple(_looked(one) if one.local else _brought(one, trainer, environ) for one in parts)


def _brought(part: Part, trainer: Trainer, environ: Mapping[str, str]) -> Part:
    before, began = _snapshot(part), time.monotonic()
    answer = _call(part, trainer, environ)
    error, now = answer.get("error"), _snapshot(part)
    place = Path(answer["path"]) if answer.get("path") else None
    part = replace(part, place=place, seconds=time.monotonic() - began, commit=now[0], error=error)
    if part.role in ("card", "data"):
        failed = "unknown" if part.role == "card" else "missing"
        return replace(part, state=failed if error else "there")
    if place is None:
        return replace(part, state="missing")
    return _looked(replace(part, state="there" if now == before else "fetched"))


def _call(part: Part, trainer: Trainer, environ: Mapping[str, str]) -> dict[str, Any]:
    if part.role == "data":
        words: dict[str, Any] = {"path": part.name, "name": part.config}
        if part.folder is not None or part.files is not None:
            words |= {"data_dir": part.folder, "data_files": part.files}
        call: list[Any] = ["datasets", "load_dataset", words]
    else:
        of_role: dict[str, dict[str, Any]] = {
            "card": {"repo_type": "dataset", "allow_patterns": ["README.md"]},
            "tokenizer": {"allow_patterns": list(_TOKENIZER)},
            "model": {"ignore_patterns": list(_OTHERS)},
        }
        words = {"repo_id": part.name, "revision": part.revision, **of_role.get(part.role, {})}
        call = ["huggingface_hub", "snapshot_download", words]
    argv = [str(trainer.python), "-c", _CALL, json.dumps(call)]
    ended = subprocess.run(argv, stdout=subprocess.PIPE, env=isolation.isolated(environ), check=False)
    answer = parse_line(ended.stdout.strip().rpartition(b"\n")[2])
    if not answer:
        message = f"{trainer.python} cannot download from the hub: it ended with {ended.returncode}"
        raise not_ready("not-fetched", message, "launch doctor", file=str(trainer.python))
    return answer


def _looked(part: Part) -> Part:
    place = part.place or Path(part.name)
    if part.role in ("card", "data"):
        error, state = part.error, "there" if exists(place) else "missing"
    else:
        error = part.error or lacking(place, part.role)
        state = "missing" if error else part.state or "there"
    return replace(part, place=place, state=state, size=sizes.size_below(place, links=True), error=error)


def lacking(folder: Path, role: Role) -> str | None:
    """What a model's or a tokenizer's folder lacks to be loaded; None where nothing is missed."""
    if not is_dir(folder):
        return f"there is no folder {folder}"
    if role == "tokenizer":
        fault = model_files.tokenizer_fault(folder)
    else:
        fault = model_files.config_fault(folder) or model_files.weights_fault(folder)
    return None if fault is None else f"{folder}: {fault}"


def _snapshot(part: Part) -> tuple[str | None, set[Path]]:
    """The commit that the hub's cache here holds for a part now, and its files."""
    kind = "datasets" if part.role in ("card", "data") else "models"
    folder = model_config.snapshot(part.name, os.environ, part.revision, kind)
    if folder is None:
        return None, set()
    return folder.name, {path for path in folder.rglob("*") if is_file(path)}


def findings(parts: Sequence[Part], plan: Plan, *, offline: bool) -> Iterator[Finding]:
    for one in parts:
        if one.state != "missing" or one.role == "card":
            continue
        origin = plan.stage.config.origin(f"args.{one.key}")
        if one.local or one.place is not None:
            code, what = "incomplete-model", str(one.error)
            again = "finish the run that makes it, or copy it again"
            help = again if one.local else f"hf download {one.name}"
        else:
            code = "not-fetched"
            why = "HF_HUB_OFFLINE is set" if offline else redact(one.error or "no answer")
            what = f"not in the hub's cache, and cannot be fetched: {why}"
            first = "unset HF_HUB_OFFLINE for this" if offline else "check the name and the network"
            help = f"{first}, or bring the hub's cache of a machine that has it (HF_HOME)"
        message = f"`{one.key}: {one.name}`: {what}"
        yield launch_finding("error", code, message, help, key=f"args.{one.key}", **origin.place)
