"""Equal exactly where the content is: files, folders, checkpoints."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, Write
from hypothesis import given
from hypothesis import strategies as st

from launcher.artifacts import digest as content
from launcher.artifacts import fingerprint
from launcher.artifacts.fingerprint import (
    MissingContent,
    fingerprint_data,
    fingerprint_file,
    fingerprint_model,
    fingerprint_tokenizer,
)
from launcher.errors import Exit


def digest(path: Path) -> str:
    return content.read_content(path)[0].digest


def sampled_digest(path: Path) -> str:
    """The digest of a checkpoint that is too large to be read whole."""
    return content.read_content(path, whole_below=0)[0].digest


def safetensors(tensors: dict[str, bytes]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, raw in tensors.items():
        begin = len(data)
        data += raw
        header[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    size = struct.pack("<Q", len(text))
    return size + text + data


@given(raw=st.binary(min_size=1, max_size=400), at=st.integers(0), flip=st.integers(1, 255))
def test_any_changed_byte_changes_a_data_file(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, at: int, flip: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    path.write_bytes(raw)
    before = digest(path)
    other = bytearray(raw)
    other[at % len(raw)] ^= flip
    path.write_bytes(other)
    assert digest(path) != before
    path.write_bytes(raw)
    assert digest(path) == before


def test_neither_place_nor_time_nor_name_is_part_of_it(write: Write, tmp_path: Path) -> None:
    path = write("a.jsonl", b"row\n" * 100)
    copy = write("elsewhere/b.jsonl", path.read_bytes())
    os.utime(copy, (1.0, 1.0))
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    assert digest(path) == digest(copy) == digest(link)
    assert fingerprint_data(str(path)).digest == fingerprint_data(str(copy)).digest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor of many strata, one of few, one that is read whole, one empty."""
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    tensors = {
        "embed": bytes(40 * content.STRATUM + 77),
        "few": bytes(700_001),
        "norm": bytes(3584),
        "none": b"",
    }
    path.write_bytes(safetensors(tensors))
    return path


def sampled_regions(path: Path) -> list[tuple[int, int]]:
    with path.open("rb") as file:
        return content.choose_regions(file.fileno(), path.stat().st_size) or []


@given(data=st.data())
def test_any_changed_byte_that_is_sampled_changes_a_checkpoint(
    checkpoint: Path, data: st.DataObject
) -> None:
    before = sampled_digest(checkpoint)
    # the first region is the header, which is all text: a change there may make it unreadable, too
    offset, length = data.draw(st.sampled_from(sampled_regions(checkpoint)))
    place = offset + data.draw(st.integers(0, length - 1))
    with checkpoint.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(b"\xff")
        file.flush()
        assert sampled_digest(checkpoint) != before
        file.seek(place)
        file.write(byte)
    assert sampled_digest(checkpoint) == before


@given(data=st.data())
def test_a_stretch_of_two_strata_never_escapes(checkpoint: Path, data: st.DataObject) -> None:
    """What the module promises: any run of that many changed bytes holds a whole block."""
    longest = 2 * content.STRATUM
    start = data.draw(st.integers(0, checkpoint.stat().st_size - longest))
    blocks = 0
    for offset, length in sampled_regions(checkpoint):
        blocks += start <= offset and offset + length <= start + longest
    assert blocks


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"{}" + b"left over",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 30) + b'{"a":{"data_offsets":[0,"x"]}}',
        safetensors({"a": b"x" * 50})[:-1],
    ],
    ids=["empty", "no header", "left over", "no JSON", "no offset", "cut"],
)
def test_what_is_no_safetensors_file_is_read_whole(write: Write, raw: bytes) -> None:
    path = write("m.safetensors", raw)
    before, _ = content.read_content(path, whole_below=0)
    assert before.method == "whole"
    path.write_bytes(raw[:-1] + b"!")
    assert sampled_digest(path) != before.digest


def write_model(folder: Path) -> Path:
    """A model's folder as `save_pretrained` leaves it, with what a training leaves beside it."""
    (folder / "checkpoint-10").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(safetensors({"a": b"w" * 100}))
    for name in """
        config.json tokenizer.json tokenizer_config.json README.md chat_template.jinja
        training_args.bin trainer_state.json checkpoint-10/model.safetensors
    """.split():
        (folder / name).write_text("{}")
    return folder


def test_a_model_is_its_weights_and_configs(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    before = fingerprint_model(str(folder))
    assert [file.name for file in before.files] == ["config.json", "model.safetensors"]

    for name in ("README.md", "checkpoint-10/model.safetensors", "tokenizer.json"):
        (folder / name).write_text("other")
    assert fingerprint_model(str(folder)).digest == before.digest
    moved = shutil.copytree(folder, tmp_path / "deeper" / "n")
    assert fingerprint_model(str(moved)).digest == before.digest

    other_weights = safetensors({"a": b"w" * 99 + b"v"})
    (folder / "model.safetensors").write_bytes(other_weights)
    assert fingerprint_model(str(folder)).digest != before.digest


@pytest.mark.parametrize("name", ["merges.txt", "additional_chat_templates/tools.jinja"])
def test_every_file_of_a_tokenizer_counts(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m")
    before = fingerprint_tokenizer(str(folder)).digest
    # retrained weights leave the tokenizer what it is
    (folder / "model.safetensors").write_bytes(b"other")
    assert fingerprint_tokenizer(str(folder)).digest == before
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("another")
    assert fingerprint_tokenizer(str(folder)).digest != before


def test_an_adapter_counts_with_its_base(write: Write, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    config = json.dumps({"base_model_name_or_path": str(base)})
    adapter = write("adapter/adapter_config.json", config).parent
    write("adapter/adapter_model.safetensors", safetensors({"lora": b"1" * 10}))
    before = fingerprint_model(str(adapter)).digest

    other_weights = safetensors({"a": b"v" * 100})
    (base / "model.safetensors").write_bytes(other_weights)

    assert fingerprint_model(str(adapter)).digest != before


def test_a_folder_of_data_counts_with_everything_below_it(write: Write, tmp_path: Path) -> None:
    write("data/train-0.jsonl", "a")
    write("data/more/train-1.jsonl", "b")
    write("data/.hidden", "c")
    write("real/rows.jsonl", "a")
    folder = tmp_path / "data"
    # links are followed, and circles end
    (folder / "part").symlink_to(tmp_path / "real")
    (folder / "back").symlink_to(folder)
    before = fingerprint_data(str(folder))
    names = [file.name for file in before.files]
    assert names == ["more/train-1.jsonl", "part/rows.jsonl", "train-0.jsonl"]

    digests = [before.digest]
    # a name says to which split a file belongs
    (folder / "train-0.jsonl").rename(folder / "test-0.jsonl")
    digests.append(fingerprint_data(str(folder)).digest)
    for name in ("data/more/train-1.jsonl", "data/README.md", "real/rows.jsonl"):
        write(name, "x")
        digests.append(fingerprint_data(str(folder)).digest)
    assert len(set(digests)) == 5
    (folder / ".hidden").unlink()
    assert fingerprint_data(str(folder)).digest == digests[-1]


def test_a_name_on_the_hub_is_known_by_the_commit_that_is_here(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    unknown = fingerprint_model("Org/name")
    assert (unknown.kind, unknown.revision) == ("name", None)
    write("models--Org--name/refs/main", "c1\n")
    first = fingerprint_model("Org/name")
    assert (first.kind, first.revision) == ("hub", "c1")
    write("models--Org--name/refs/main", "c2")
    second = fingerprint_tokenizer("Org/name")
    assert len({unknown.digest, first.digest, second.digest}) == 3
    (tmp_path / "models--Org--name" / "snapshots" / "c1").mkdir(parents=True)
    assert fingerprint_model("Org/name", revision="c1").digest == first.digest
    assert fingerprint_model("Org/name", revision="../x").kind == "name"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    # a pipe is not waited for
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    for name, code in (
        ("none.jsonl", "missing-file"),
        ("a\0b", "unreadable-file"),
        ("x" * 5000, "unreadable-file"),
        (str(pipe), "unreadable-file"),
    ):
        with pytest.raises(MissingContent) as caught:
            fingerprint_data(name)
        assert caught.value.findings[0].code == code
        assert caught.value.exit_code == Exit.NOT_READY


def test_a_change_that_hides_behind_size_and_time_is_seen(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("a.jsonl", b"row\n")
    # it has been still for long enough
    monkeypatch.setattr(fingerprint, "_MARGIN_S", -1e9)
    before = fingerprint_file(path).digest
    with monkeypatch.context() as without:
        without.setattr(content, "read_content", None)
        assert fingerprint_file(path).digest == before
    times = path.stat()
    path.write_bytes(b"RUW\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns
    assert fingerprint_file(path).digest != before


ON_ONE_PROCESSOR = """
import os, sys
from launcher.artifacts.fingerprint import *
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(fingerprint_file(Path(sys.argv[1])).digest)
"""


def test_the_digests_are_those_of_every_other_machine(write: Write) -> None:
    """A cache on a shared disk is found from all of them, whatever processors they have."""
    path = write("a.jsonl", bytes(range(256)) * 80_000)
    command = [sys.executable, "-c", ON_ONE_PROCESSOR, str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert ran.stdout.strip() == digest(path)
    assert digest(path) == "6a65e87d5ac4ee8eedac85c84026eb567c5bdec57e4cb55b64f9ba9d115dc0bc"
