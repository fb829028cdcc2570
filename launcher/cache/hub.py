"""What a stage reads of models, tokenizers and data, local or on the hub: downloaded, and checked.

This comes before anything is tokenised: upstream's key of tokenised data holds what is in the hub's
cache at that moment
(dataset_transformation.py::get_commit_hash[file = launch_utils.custom_cached_file]), so that a set
made before the download has another key than the same set made after it.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from launcher.artifacts import model_config, model_files
from launcher.dataset import mixture, sources
from launcher.errors import Finding, launch_finding, not_ready
from launcher.files import parse_line
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec, isolation, sizes
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
    result = getattr(importlib.import_module(module), name)(**words)
    answer = {"path": result if isinstance(result, str) else None}
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
    """A model, a tokenizer or a data set by its name, and whether it is here.

    `role` says how much of it is read: `whole` is every file, which SFT's `snapshot_download`
    takes; `card` the one file that open-instruct's key of tokenised data knows; `data` what TRL
    trains on, in its configuration `config`, of a mixture also from a `folder` of it, or from named
    `files`. `state` is `there`, `fetched`, `missing`, or `unknown` for a card: a data set may have
    none.
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
        if self.role == "whole":
            return "model"
        if self.role == "card":
            return "data"
        return self.role

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


@dataclass(frozen=True, slots=True)
class _HubAnswer:
    """Where the trainer's Python put what it downloaded, or why it could not."""

    path: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What the hub's cache holds of a model or a data set."""

    commit: str | None = None
    files: frozenset[Path] = frozenset()


def list_required_parts(plan: Plan) -> tuple[Part, ...]:
    """What the run reads, each once, whichever argument names it first."""
    parts: dict[Part, Part] = {}
    for part in _list_required_parts(plan):
        parts.setdefault(replace(part, key="", files=str(part.files)), part)
    return tuple(parts.values())


def _list_required_parts(plan: Plan) -> Iterator[Part]:
    values = plan.values
    revision = values.get("model_revision")
    role: Role = "whole" if plan.stage.entry.whole_model else "model"
    for key in ("model_name_or_path", "config_name"):
        name = values.get(key)
        # OLMo-core's names of shapes are not on the hub
        if isinstance(name, str) and name not in values.schema.configs:
            yield Part(role=role, name=name, key=key, revision=revision)
    yield from _list_tokenizer_parts(plan)
    yield from _list_data_parts(plan)


def _list_tokenizer_parts(plan: Plan) -> Iterator[Part]:
    """The tokenizer and the one whose chat template is taken, if they are not the model's own."""
    values = plan.values
    model = values.get(plan.stage.entry.names.model)
    own_revision = values.get("tokenizer_revision") or values.get("model_revision")
    revisions = {"tokenizer_name_or_path": own_revision, "chat_template_path": None}
    for key, revision in revisions.items():
        name = values.get(key)
        if not isinstance(name, str) or name == model or is_file(name):
            continue
        yield Part(role="tokenizer", name=name, key=key, revision=revision)


def _list_data_parts(plan: Plan) -> Iterator[Part]:
    values = plan.values
    key = plan.stage.entry.names.data
    mixed = mixture.read_mixture(values, os.environ)
    if mixed is not None:
        # a stream is read while it is trained on
        if values.get("streaming") is not True:
            yield from _list_mixture_parts(mixed)
        return
    data = values.get(key)
    if isinstance(data, list):
        # each name is followed by its amount
        for name in data[::2]:
            if isinstance(name, str):
                yield Part(role="card", name=name, key=key, revision="main")
    elif isinstance(data, str) and values.get("dataset_streaming") is not True:
        yield Part(role="data", name=data, key=key, config=values.get("dataset_config"))


def _list_mixture_parts(mixed: mixture.Mixture) -> Iterator[Part]:
    """The sets of a mixture, but those that a reader makes of files."""
    for mixed_set in mixed.sets:
        entry = mixed_set.entry
        if entry.path not in sources.LOADERS:
            yield Part(
                role="data",
                name=entry.path,
                key=f"{entry.key}.path",
                config=entry.name,
                folder=entry.data_dir,
                files=entry.data_files,
            )


def fetch(parts: Sequence[Part], trainer: Trainer, environ: Mapping[str, str]) -> tuple[Part, ...]:
    """Download what is on the hub, by the trainer's own packages; the result of each part.

    HF_HUB_OFFLINE is honoured, and without a network the hub's cache here has to do. Progress goes
    to stderr. Raises NotReady if the trainer's Python cannot do it at all.
    """
    fetched = []
    for part in parts:
        if part.local:
            fetched.append(_check_part(part))
        else:
            fetched.append(_download(part, trainer, environ))
    return tuple(fetched)


def _download(part: Part, trainer: Trainer, environ: Mapping[str, str]) -> Part:
    before = _find_snapshot(part)
    began = time.monotonic()
    answer = _call_hub(part, trainer, environ)
    now = _find_snapshot(part)
    error = answer.error
    seconds = time.monotonic() - began
    part = replace(part, seconds=seconds, commit=now.commit, error=error)
    if answer.path is not None:
        part = replace(part, place=Path(answer.path))
    if part.role == "card" and error:
        return replace(part, state="unknown")
    if part.role in ("card", "data"):
        return replace(part, state="missing" if error else "there")
    if part.place is None:
        return replace(part, state="missing")
    return _check_part(replace(part, state="there" if now == before else "fetched"))


def _call_hub(part: Part, trainer: Trainer, environ: Mapping[str, str]) -> _HubAnswer:
    """Have the trainer's Python download a part; raises NotReady."""
    module = "huggingface_hub"
    function = "snapshot_download"
    arguments: dict[str, object] = {"repo_id": part.name, "revision": part.revision}
    if part.role == "data":
        module = "datasets"
        function = "load_dataset"
        arguments = {"path": part.name, "name": part.config}
        if part.folder is not None or part.files is not None:
            arguments["data_dir"] = part.folder
            arguments["data_files"] = part.files
    elif part.role == "card":
        arguments["repo_type"] = "dataset"
        arguments["allow_patterns"] = ["README.md"]
    elif part.role == "tokenizer":
        arguments["allow_patterns"] = _TOKENIZER
    elif part.role == "model":
        arguments["ignore_patterns"] = _OTHERS
    call = json.dumps([module, function, arguments])
    argv = [str(trainer.python), "-c", _CALL, call]
    env = isolation.isolate(environ)
    ended = subprocess.run(argv, stdout=subprocess.PIPE, env=env, check=False)
    _, _, last_line = ended.stdout.strip().rpartition(b"\n")
    answer = parse_line(last_line)
    if not answer:
        message = f"{trainer.python} cannot download from the hub: it ended with {ended.returncode}"
        raise not_ready("not-fetched", message, "launch doctor", file=str(trainer.python))
    return codec.read_record(_HubAnswer, answer)


def _check_part(part: Part) -> Part:
    """Fill in the size of what a run reads, and whether it is complete on this disk."""
    place = part.place or Path(part.name)
    size = sizes.measure_size(place, links=True)
    part = replace(part, place=place, size=size)
    if part.role in ("card", "data"):
        return replace(part, state="there" if exists(place) else "missing")
    error = part.error or find_load_fault(place, part.role)
    if error:
        return replace(part, state="missing", error=error)
    return replace(part, state=part.state or "there", error=None)


def find_load_fault(folder: Path, role: Role) -> str | None:
    """What a model's or a tokenizer's folder lacks to be loaded; None if it is complete."""
    if not is_dir(folder):
        return f"there is no folder {folder}"
    if role == "tokenizer":
        fault = model_files.find_tokenizer_fault(folder)
    else:
        fault = model_files.find_config_fault(folder) or model_files.find_weights_fault(folder)
    return None if fault is None else f"{folder}: {fault}"


def _find_snapshot(part: Part) -> _Snapshot:
    kind = "datasets" if part.role in ("card", "data") else "models"
    folder = model_config.find_snapshot(part.name, os.environ, part.revision, kind)
    if folder is None:
        return _Snapshot()
    files = frozenset(path for path in folder.rglob("*") if is_file(path))
    return _Snapshot(folder.name, files)


def check_parts(parts: Sequence[Part], plan: Plan, *, offline: bool) -> Iterator[Finding]:
    for part in parts:
        if part.state != "missing" or part.role == "card":
            continue
        code = "incomplete-model"
        fault = str(part.error)
        if part.local:
            help = "finish the run that makes it, or copy it again"
        elif part.place is not None:
            help = f"hf download {part.name}"
        else:
            code = "not-fetched"
            why = redact(part.error or "no answer")
            first = "check the name and the network"
            if offline:
                why = "HF_HUB_OFFLINE is set"
                first = "unset HF_HUB_OFFLINE for this"
            fault = f"not in the hub's cache, and cannot be fetched: {why}"
            help = f"{first}, or bring the hub's cache of a machine that has it (HF_HOME)"
        key = f"args.{part.key}"
        place = plan.stage.config.origin(key).place
        message = f"`{part.key}: {part.name}`: {fault}"
        yield launch_finding("error", code, message, help, key=key, **place)
