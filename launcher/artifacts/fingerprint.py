"""Data files, model folders and names on the hub -> `Fingerprint`: equal exactly where the content
is.

Neither where a file lies nor when it was written is part of a digest: a copy, a moved folder and a
touched file have the digest of the original.
"""

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from launcher import files
from launcher.artifacts import digest, model_config
from launcher.artifacts.model_config import is_path
from launcher.errors import NotReady, launch_finding
from launcher.lazy_dataclass import dataclass
from launcher.paths import exists, is_dir, is_file

Kind = Literal["file", "folder", "hub", "name"]

# what `from_pretrained` reads of a folder; README.md, logs and an optimizer's state are none of it
_WEIGHTS = "*.safetensors *.bin *.gguf *.index.json config.json adapter_config.json *.py".split()
_NO_WEIGHTS = ("training_args.bin", "optimizer*.bin", "scheduler*.bin", "random_states*")
_TEMPLATES = "additional_chat_templates/"
_TOKENIZER = f"""
    tokenizer* special_tokens_map.json added_tokens.json vocab* merges.txt spiece.model
    sentencepiece* *.tiktoken tekken.json chat_template* {_TEMPLATES}* config.json *.py
""".split()


_MARGIN_S = 2.0


class MissingContent(NotReady):
    """A file or folder whose content is needed and cannot be read (exit 5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePrint:
    """One file: its name below the fingerprinted path, its state when it was read, its digest as in
    `Content`.
    """

    name: str
    size: int
    mtime: float
    method: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What something holds. `name` is how the stage file calls it, and no part of the digest.

    `hub` is a name on the hub whose commit is known here (`revision`), `name` one of which nothing
    is known but what it is called.
    """

    name: str
    kind: Kind
    digest: str
    files: tuple[FilePrint, ...] = ()
    revision: str | None = None

    def digests(self) -> dict[str, str]:
        """The digest of each file, by its name."""
        return {file.name: file.digest for file in self.files}

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "files": list(map(asdict, self.files))}


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """Where launch keeps what can be made again: LAUNCH_CACHE, else `launch` in the user's cache
    folder.
    """
    if environ is None:
        environ = os.environ
    folder = environ.get("LAUNCH_CACHE")
    if not folder:
        # where there is no home at all, `~` stays: then there is nothing to be written there either
        home = os.path.join(environ.get("HOME") or "~", ".cache")
        folder = os.path.join(environ.get("XDG_CACHE_HOME") or home, "launch")
    return Path(os.path.expanduser(folder)).absolute()


def fingerprint_file(path: Path, *, name: str | None = None) -> FilePrint:
    """The fingerprint of one file, links followed; raises MissingContent where there is none to
    read.
    """
    try:
        status = path.stat()
        # a clock of a file system may be too coarse to tell a write of just now from the next one
        is_settled = time.time() - max(status.st_ctime, status.st_mtime) > _MARGIN_S
        if is_settled:
            content = _read_content(path, _identify_state(status))
        else:
            content, _ = digest.read_content(path)
    except (OSError, ValueError) as error:
        raise _report_missing(path, error) from None
    if name is None:
        name = path.name
    return FilePrint(
        name=name,
        size=content.size,
        mtime=round(status.st_mtime_ns / 1e9, 6),
        method=content.method,
        digest=content.digest,
    )


def _identify_state(status: os.stat_result) -> tuple[int, ...]:
    """What no write leaves as it is: the time of change is the kernel's own and cannot be set."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@functools.lru_cache(maxsize=4096)
def _read_content(path: Path, _: tuple[int, ...]) -> digest.Content:
    """One start asks for the same files several times, under each role."""
    return digest.read_content(path)[0]


def fingerprint_data(name: str, revision: str | None = None) -> Fingerprint:
    """A data file, or a folder of data with everything below it; raises MissingContent.

    Hidden files count for nothing; a folder's README.md does, since `datasets` reads settings from
    it.
    """
    path = Path(name)
    if exists(path) and is_dir(path):
        return _fingerprint_folder(name, path, _list_files_below(path))
    return _fingerprint_single(name, path)


def fingerprint_model(name: str, revision: str | None = None) -> Fingerprint:
    """A model folder by its weights, their index, its configs and its own code; or a name on the
    hub.

    An adapter's folder counts together with its base model. Raises MissingContent where a file of
    the folder cannot be read.
    """
    model = _fingerprint_pretrained(name, _WEIGHTS, revision)
    config = files.read_json(Path(name) / "adapter_config.json")
    base_name = config.get("base_model_name_or_path")
    if model.kind != "folder" or not isinstance(base_name, str) or base_name == name:
        return model
    base_revision = str(config.get("revision") or "")
    base = _fingerprint_pretrained(base_name, _WEIGHTS, base_revision or None)
    prints = [*model.files]
    for file in base.files:
        prints.append(replace(file, name=f"{base_name}/{file.name}"))
    both = f"adapter {model.digest} {base.digest}\n"
    return replace(model, digest=_hash_text(both), files=tuple(prints))


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def fingerprint_tokenizer(name: str, revision: str | None = None) -> Fingerprint:
    """The tokenizer of a model folder, its chat templates included; or a name on the hub."""
    return _fingerprint_pretrained(name, _TOKENIZER, revision)


def fingerprint_config(name: str, revision: str | None = None) -> Fingerprint:
    if is_dir(name):
        return fingerprint_data(str(Path(name) / "config.json"))
    return fingerprint_hub(name, revision)


READERS: Mapping[str, Callable[[str, str | None], Fingerprint]] = {
    "data": fingerprint_data,
    "model": fingerprint_model,
    "tokenizer": fingerprint_tokenizer,
    "template": fingerprint_tokenizer,
    "config": fingerprint_config,
}
"""How what has a role is read, by its name and revision."""


def _fingerprint_pretrained(
    name: str, patterns: Sequence[str], revision: str | None
) -> Fingerprint:
    path = Path(name)
    if exists(path) and is_dir(path):
        return _fingerprint_folder(name, path, _list_top_files(path, patterns))
    if is_file(path):
        return _fingerprint_single(name, path)
    return fingerprint_hub(name, revision)


def _fingerprint_single(name: str, path: Path) -> Fingerprint:
    file = fingerprint_file(path)
    return Fingerprint(name=name, kind="file", digest=file.digest, files=(file,))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    for pattern in patterns:
        # `*` of fnmatch takes slashes too: a pattern speaks of its own depth only
        if fnmatch(name, pattern) and name.count("/") == pattern.count("/"):
            return True
    return False


def _fingerprint_folder(name: str, path: Path, files: Iterable[tuple[str, Path]]) -> Fingerprint:
    try:
        listed = sorted(files)
    except OSError as error:
        raise _report_missing(path, error) from None
    prints = []
    tree = "folder\n"
    for below, place in listed:
        file = fingerprint_file(place, name=below)
        prints.append(file)
        tree += f"{file.name}\0{file.digest}\n"
    return Fingerprint(name=name, kind="folder", digest=_hash_text(tree), files=tuple(prints))


def _list_top_files(folder: Path, patterns: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Name and path of the files that match, in a model's folder and in its folder of templates."""
    for prefix in ("", _TEMPLATES):
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            entries += os.scandir(folder / prefix)
        for entry in entries:
            name = prefix + entry.name
            is_read = _matches(name, patterns) and not _matches(name, _NO_WEIGHTS)
            if is_read and not entry.is_dir():
                yield name, Path(entry.path)


def _list_files_below(
    folder: Path, prefix: str = "", above: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Path]]:
    """Name and path of every file below a folder, links followed, hidden ones left out."""
    real = os.path.realpath(folder)
    if real in above:
        # a link that leads back up
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = Path(entry.path)
            if entry.is_dir():
                yield from _list_files_below(path, f"{prefix}{entry.name}/", above | {real})
            elif entry.is_file() or entry.is_symlink():
                # a link to nothing is a file that cannot be read: report it
                yield prefix + entry.name, path


def _report_missing(path: Path, error: OSError | ValueError) -> MissingContent:
    if isinstance(error, FileNotFoundError):
        code = "missing-file"
        message = f"there is no {path}"
    else:
        code = "unreadable-file"
        message = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
    help = "without its content nobody can say which cache belongs to it"
    return MissingContent(launch_finding("error", code, message, help, file=str(path)))


def fingerprint_hub(name: str, revision: str | None = None) -> Fingerprint:
    """A model on the hub by its commit in the hub's cache, else by name; no network."""
    commit = None
    if not is_path(name):
        commit = model_config.find_commit(name, os.environ, revision)
    if commit:
        digest = _hash_text(f"hub {name} {commit}")
        return Fingerprint(name=name, kind="hub", revision=commit, digest=digest)
    digest = _hash_text(f"name {name} {revision or 'main'}")
    return Fingerprint(name=name, kind="name", digest=digest)
