"""Files that somebody else may have written, read within bounds: only regular files, of bounded
size, line length, nesting depth and numbers.

Whatever reads a file of a run reads it through here. A FIFO or a device in its place would block
for ever, and a single line of brackets or a number of 400 digits would end a whole command.
"""

import contextlib
import errno
import json
import math
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 64 * 2**20  # bytes of a file that is read as a whole
MAX_LINE = 2**20  # bytes of a line of JSON
MAX_LINES = 2**30  # bytes of a file that is read line by line
MAX_DEPTH = 64  # lists and mappings inside each other
_BLOCK = 2**16
_DIGITS = 20  # of a whole number: an inode has 64 bits


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """A regular file, opened for reading without waiting. Raises OSError for other kinds too."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:
        # a NUL, or a lone surrogate, in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb", buffering)


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """What a regular file holds. Raises OSError, also where that is more than `most` bytes."""
    with open_regular(path) as stream:
        # to ask for `most` bytes at once allocates as many
        raw = stream.read(min(_BLOCK, most + 1))
        if len(raw) == _BLOCK:
            raw += stream.read(most + 1 - len(raw))
    if len(raw) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return raw


def read_raw_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of a longer one than `parse_line` takes, as much as shows that."""
    left = MAX_LINES
    at_begin = True
    while left > 0:
        raw = stream.readline(MAX_LINE + 1)
        if not raw:
            return
        left -= len(raw)
        if at_begin:
            yield raw
        at_begin = len(raw) <= MAX_LINE or raw.endswith(b"\n")


def list_names(folder: Path | None) -> list[str]:
    """What lies in a folder, sorted; nothing where there is none, or it cannot be read."""
    if folder is None:
        return []
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The mappings in the lines of a JSONL file, without torn ones; none if it is unreadable."""
    rows = []
    try:
        with open_regular(path) as stream:
            for line in read_raw_lines(stream):
                row = parse_line(line)
                if row:
                    rows.append(row)
    except OSError:
        return []
    return rows


def parse_json(raw: bytes) -> Any:
    """A JSON value, numbers of over 20 digits as infinite. Raises ValueError, also where it is
    nested too deep.

    A character that no text or path can hold (NUL, half a surrogate pair) is replaced.
    """
    decoder = _PLAIN
    # the hook makes ten times slower what has no such number in it
    if _LONG_NUMBER in raw.translate(_DIGITS_AS_0):
        decoder = _BOUNDED
    try:
        value = decoder.decode(raw.decode())
    except RecursionError:
        raise ValueError("nested too deep") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise ValueError("nested too deep")
    if _IMPOSSIBLE_ESCAPE.search(raw):
        return _replace_impossible(value)
    return value


def _replace_impossible(value: Any) -> Any:
    if isinstance(value, str):
        return _IMPOSSIBLE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        members = {}
        for key, below in value.items():
            members[_replace_impossible(key)] = _replace_impossible(below)
        return members
    if isinstance(value, list):
        return [_replace_impossible(below) for below in value]
    return value


def _parse_whole(digits: str) -> int | float:
    if len(digits) <= _DIGITS:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf


_CONTAINERS = (dict, list)
_PLAIN = json.JSONDecoder()
_BOUNDED = json.JSONDecoder(parse_int=_parse_whole)
_IMPOSSIBLE_ESCAPE = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
# the halves from dc80 on stand for the bytes of a path that is no UTF-8
_IMPOSSIBLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
_DIGITS_AS_0 = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * _DIGITS


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            below += [value for value in values if isinstance(value, _CONTAINERS)]
        if not below:
            return False
        level = below
    return True


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none to be had."""
    try:
        return parse_line(read_bytes(path), MAX_BYTES)
    except OSError:
        return {}


def parse_line(raw: bytes, most: int = MAX_LINE) -> dict[str, Any]:
    """One line of a JSONL file as a mapping; empty where it is torn, too long, or none."""
    if len(raw) > most:
        return {}
    try:
        data = parse_json(raw)
    except ValueError:
        return {}
    if not isinstance(data, dict):
        return {}
    return data


def write_json(path: Path, data: Any) -> None:
    """Write atomically: a reader sees the old file or the new one, never a half."""
    write_bytes(path, _encode_json(data))


def write_private_json(path: Path, data: Any) -> None:
    """The same for the owner alone: what names processes decides what a stop ends."""
    write_bytes(path, _encode_json(data), mode=0o600)


def _encode_json(data: Any) -> bytes:
    try:
        raw = json.dumps(data, indent=2, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        # a path that is no UTF-8: escaped, it is still JSON
        raw = json.dumps(data, indent=2, default=str).encode()
    return raw + b"\n"


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, raw: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write atomically, by renaming a finished file over the old one; `durable` also after a power
    cut.

    A device or a pipe is written to: renaming a file over `/dev/null` would take it from every
    process. A pipe that nobody reads is an OSError, for nobody may ever read it.
    """
    if path.exists() and not path.is_file():
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(raw)
        return
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, mode), "wb") as stream:
            stream.write(raw)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def find_other_writer(path: Path) -> str | None:
    """Why somebody else may have written a file, or put another in its place as a link; None where
    nobody can have.
    """
    try:
        status = path.lstat()
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others: chmod go-w {shlex.quote(str(path))}"
    return None


def remove_tree(path: Path) -> str | None:
    """Remove a folder with all that is in it; why not, where that fails."""
    # whoever reads a run need not wait for this import
    import shutil

    # out of the way at once: what starts meanwhile makes a folder anew
    aside = path.with_name(f".{path.name}.removed-{os.urandom(4).hex()}")
    try:
        os.rename(path, aside)
        shutil.rmtree(aside)
    except OSError as error:
        left = aside if aside.exists() else path
        return f"it cannot be removed: {error.strerror} ({left})"
    return None
