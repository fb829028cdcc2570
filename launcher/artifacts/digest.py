"""What a file holds, as one digest: read whole by several threads, or a large checkpoint by
samples.

A file that is read whole is cut into pieces of 8 MiB, which are hashed in parallel (sha256 lets go
of the interpreter); the digest is that of the size and of all pieces' digests. Any changed byte
changes it.

A `.safetensors` file above 64 MiB is not read whole: its digest is that of its size, its header
(names, shapes, dtypes, offsets) and one 4 KiB block out of each stratum of each tensor; a stratum
is at most 1 MiB long, and a tensor has at least 16 (a smaller tensor is read whole). For 15 GB that
is about 70 MB. What it may miss:

* a change of less than two strata in one stretch (2 MiB; an eighth of a tensor below 16 MiB), if it
  lies between the blocks: of a stretch of 2 MiB and more a whole block is always read;
* scattered changes of a share p of a tensor's elements, with a probability of (1 - p) ** n, where n
  is the number of sampled elements: 2,048 of two bytes for each MiB, at least 32,768. Training
  changes all elements, but a step that is too small for bfloat16 leaves most as they are. Already
  at p = 0.001 a single tensor escapes with a probability below 1e-14, and a checkpoint has
  hundreds.

An edit of single rows of an embedding by hand can escape: that is what `whole_below` is for.

Standard library only: the probe loads this file, too, under the trainer's Python.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PIECE = 8 * 2**20  # bytes that one thread hashes at a time
BLOCK = 4096  # bytes of one sample: a page, the least that a disk reads
STRATUM = 2**20  # bytes of a tensor that one block stands for, at most
STRATA = 16  # strata that a tensor has, at least
# bytes up to which a checkpoint's file is read whole: adapters and small models are
WHOLE_BELOW = 64 * 2**20
# what the safetensors library itself accepts
_LARGEST_HEADER = 100_000_000
CHECKPOINT = re.compile(r"(?:^|/)(?:step_|epoch_|global_step|(?:tmp-)?checkpoint-)\d+(?:/|$)")
"""A folder of checkpoints, by its path."""
_WEIGHTS = re.compile(r"(?:adapter_|pytorch_)?model[\w.-]*\.(?:safetensors|bin)\Z")
_READS = 256
_ATTEMPTS = 3


class Changing(OSError):
    """The file was written to while it was read, each time."""


@dataclass(frozen=True, slots=True)
class Content:
    """The digest of one file, and how it was come by: `whole` or `sampled`."""

    method: str
    digest: str
    size: int


def read_content(path: Path, *, whole_below: int = WHOLE_BELOW) -> tuple[Content, os.stat_result]:
    """The content of a file and the state in which it was read, links followed.

    Only `.safetensors` of `whole_below` bytes and more are sampled. Raises OSError where it cannot
    be read or is no regular file, `Changing` where it does not hold still.
    """
    # without ever waiting for a pipe
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        for _ in range(_ATTEMPTS):
            before = os.fstat(descriptor)
            sampled = path.suffix == ".safetensors" and before.st_size >= whole_below
            try:
                content = _digest_descriptor(descriptor, before.st_size, sampled)
            except Changing:
                continue
            if _identify_state(os.fstat(descriptor)) == _identify_state(before):
                return content, before
    finally:
        os.close(descriptor)
    raise Changing(None, "it is written to while it is read", str(path))


def _identify_state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest_descriptor(descriptor: int, size: int, sampled: bool) -> Content:
    if sampled:
        regions = choose_regions(descriptor, size)
        if regions is not None:
            return Content("sampled", _digest_sampled(descriptor, size, regions), size)
    return Content("whole", _digest_whole(descriptor, size), size)


def _digest_whole(descriptor: int, size: int) -> str:
    tree = hashlib.sha256(f"whole {PIECE} {size}\n".encode())

    def digest_piece(offset: int) -> bytes:
        length = min(PIECE, size - offset)
        raw = _read_exactly(descriptor, offset, length)
        return hashlib.sha256(raw).digest()

    if size <= PIECE:
        tree.update(digest_piece(0))
        return tree.hexdigest()
    # as many as this process may use processors
    threads = min(16, len(os.sched_getaffinity(0)))
    offsets = range(0, size, PIECE)
    for digest in _map_in_threads(threads, digest_piece, offsets):
        tree.update(digest)
    return tree.hexdigest()


def _map_in_threads(
    threads: int, digest_part: Callable[[int], bytes], places: Iterable[int]
) -> Iterator[bytes]:
    """The digest of each part, in the order of `places`."""
    # it imports logging, which most commands never need
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(digest_part, places)


def _digest_sampled(descriptor: int, size: int, regions: Sequence[tuple[int, int]]) -> str:
    tree = hashlib.sha256(f"sampled {BLOCK} {STRATUM} {STRATA} {size}\n".encode())

    def digest_batch(first: int) -> bytes:
        batch = hashlib.sha256()
        for offset, length in regions[first : first + _READS]:
            batch.update(_read_exactly(descriptor, offset, length))
        return batch.digest()

    # far apart: reading on from each block, as the kernel would, reads an eighth of the file
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    # these wait for the disk, not for a processor
    firsts = range(0, len(regions), _READS)
    for digest in _map_in_threads(16, digest_batch, firsts):
        tree.update(digest)
    return tree.hexdigest()


def _read_exactly(descriptor: int, offset: int, length: int) -> bytes:
    """Exactly these bytes; raises Changing where the file has become shorter."""
    raw = b""
    while len(raw) < length:
        more = os.pread(descriptor, length - len(raw), offset + len(raw))
        if not more:
            raise Changing
        raw += more
    return raw


def choose_regions(descriptor: int, size: int) -> list[tuple[int, int]] | None:
    """Offset and length of every stretch of a safetensors file that is read, the header first.

    None where the file is no safetensors file, or its tensors do not cover it: then all of it
    counts.
    """
    try:
        data, entries = read_header(descriptor, size)
        tensors: list[tuple[int, int, str]] = []
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            tensors.append((int(begin), int(end), name))
        # an empty tensor and the one behind it begin at the same byte
        tensors.sort(key=lambda tensor: tensor[:2])
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, EOFError, Changing):
        return None
    regions = [(0, data)]
    place = 0
    for begin, end, name in tensors:
        if begin != place or not begin <= end <= size:
            return None
        place = end
        regions += _pick_blocks(name, data + begin, data + end)
    if data + place != size:
        return None
    return regions


def _pick_blocks(name: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    length = end - begin
    if length <= 2 * BLOCK * STRATA:
        # at most 128 KiB: nearly as cheap as its samples
        if length:
            yield begin, length
        return
    count = max(STRATA, -(-length // STRATUM))
    for number in range(count):
        first = begin + length * number // count
        last = begin + length * (number + 1) // count
        # whole pages inside the stratum, so that one block costs one page
        first_page = -(-first // BLOCK)
        pages = last // BLOCK - first_page
        if pages < 1:
            yield first, last - first
            continue
        # not always the same place: tensors have rows, and rows have periods
        label = f"{name}:{number}".encode(errors="surrogatepass")
        page = first_page + zlib.crc32(label) % pages
        yield page * BLOCK, BLOCK


def read_header(descriptor: int, size: int) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begin, and what its header says of each tensor.

    Raises EOFError where the file is too short for its header, ValueError, TypeError or
    AttributeError where it is no safetensors file.
    """
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
        raise EOFError
    try:
        tensors = json.loads(_read_exactly(descriptor, 8, length))
    except RecursionError:
        raise ValueError("nested too deep") from None
    tensors.pop("__metadata__", None)
    return 8 + length, tensors


def list_weights(folder: str) -> list[str]:
    """The files of weights in a folder and (PEFT's further adapters) in those right below it."""
    prefixes = [entry.name + "/" for entry in os.scandir(folder) if entry.is_dir()]
    files: list[str] = []
    for prefix in ("", *sorted(prefixes)):
        if CHECKPOINT.search(prefix):
            continue
        names = os.listdir(os.path.join(folder, prefix))
        files += [prefix + name for name in sorted(names) if _WEIGHTS.match(name)]
    return files
