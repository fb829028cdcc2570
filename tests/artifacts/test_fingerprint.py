"""Equal exactly where the content is: files, folders, checkpoints."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import REPOSITORY, Write
from hypothesis import given
from hypothesis import strategies as st

from launcher.artifacts import digest as content
from launcher.artifacts import fingerprint
from launcher.artifacts.fingerprint import MissingContent, of_data, of_file, of_model, of_tokenizer
from launcher.errors import Exit, NotReady


def digest(path: Path, **options: int) -> str:
    return content.read_content(path, **options)[0].digest


def safetensors(tensors: Mapping[str, bytes], metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, raw in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def regions(path: Path) -> list[tuple[int, int]]:
    with path.open("rb") as file:
        return content.sampled_regions(file.fileno(), path.stat().st_size) or []


@given(raw=st.binary(min_size=1, max_size=400), at=st.integers(0), flip=st.integers(1, 255))
def test_any_changed_byte_changes_a_data_file(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, at: int, flip: int
) -> None:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
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
    copy = tmp_path / "elsewhere" / "b.jsonl"
    copy.parent.mkdir()
    shutil.copy(path, copy)
    os.utime(copy, (1.0, 1.0))
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    assert digest(path) == digest(copy) == digest(link)
    first, second = (of_data(str(one)).digest for one in (path, copy))
    assert first == second


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor of many strata, one of few, one that is read whole, one empty."""
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    tensors = {"embed": bytes(20 * content.STRATUM + 77), "few": bytes(700_001)}
    tensors |= {"norm": bytes(3584), "none": b""}
    path.write_bytes(safetensors(tensors, {"format": "pt"}))
    return path


def changed(path: Path, at: int, raw: bytes) -> str:
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(len(raw))
        file.seek(at)
        file.write(raw)
        file.flush()
        found = digest(path, whole_below=0)
        file.seek(at)
        file.write(before)
    return found


@given(data=st.data())
def test_any_changed_byte_that_is_sampled_changes_a_checkpoint(
    checkpoint: Path, data: st.DataObject
) -> None:
    before = digest(checkpoint, whole_below=0)
    # the first region is the header, which is all text: a change there may make it unreadable, too
    offset, length = data.draw(st.sampled_from(regions(checkpoint)))
    place = offset + data.draw(st.integers(0, length - 1))
    assert changed(checkpoint, place, b"\xff") != before
    assert digest(checkpoint, whole_below=0) == before


@given(data=st.data())
def test_a_stretch_of_two_strata_never_escapes(checkpoint: Path, data: st.DataObject) -> None:
    """What the module promises: any run of that many changed bytes holds a whole block."""
    size = checkpoint.stat().st_size
    start = data.draw(st.integers(0, size - 2 * content.STRATUM))
    end = start + 2 * content.STRATUM
    assert any(start <= at and at + length <= end for at, length in regions(checkpoint))


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
)
def test_what_is_no_safetensors_file_is_read_whole(write: Write, raw: bytes) -> None:
    path = write("m.safetensors", raw)
    found, _ = content.read_content(path, whole_below=0)
    assert found.method == "whole"
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]) if raw else b"x")
    assert digest(path, whole_below=0) != found.digest


def model(folder: Path, weights: bytes = b"w" * 100) -> Path:
    """A model's folder as `save_pretrained` leaves it, with what a training leaves beside it."""
    (folder / "checkpoint-10").mkdir(parents=True)
    files = {
        "config.json": b'{"model_type": "qwen2"}', "model.safetensors": safetensors({"a": weights}),
        "tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "README.md": b"a model",
        "chat_template.jinja": b"{{ messages }}", "training_args.bin": b"args",
        "trainer_state.json": b"{}", "checkpoint-10/model.safetensors": b"older",
    }  # fmt: skip
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return folder


def test_a_model_is_its_weights_and_configs(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    before = of_model(str(folder))
    assert [one.name for one in before.files] == ["config.json", "model.safetensors"]
    others = ("README.md", "training_args.bin", "checkpoint-10/model.safetensors", "tokenizer.json")
    for name in others:
        (folder / name).write_bytes(b"other")
    assert of_model(str(folder)).digest == before.digest
    moved = tmp_path / "deeper" / "n"
    shutil.copytree(folder, moved)
    assert of_model(str(moved)).digest == before.digest
    (folder / "model.safetensors").write_bytes(safetensors({"a": b"w" * 99 + b"v"}))
    assert of_model(str(folder)).digest != before.digest


@pytest.mark.parametrize("name", ["merges.txt", "additional_chat_templates/tools.jinja"])
def test_every_file_of_a_tokenizer_counts(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path / "m")
    before = of_tokenizer(str(folder)).digest
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"another")
    assert of_tokenizer(str(folder)).digest != before
    # retrained weights leave the tokenizer what it is
    before = of_tokenizer(str(folder)).digest
    (folder / "model.safetensors").write_bytes(b"other")
    assert of_tokenizer(str(folder)).digest == before


def test_an_adapter_counts_with_its_base(tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (adapter / "adapter_model.safetensors").write_bytes(safetensors({"lora": b"1" * 10}))
    before = of_model(str(adapter)).digest
    (base / "model.safetensors").write_bytes(safetensors({"a": b"v" * 100}))
    assert of_model(str(adapter)).digest != before


def test_a_folder_of_data_counts_with_everything_below_it(write: Write, tmp_path: Path) -> None:
    write("data/train-0.jsonl", "a")
    write("data/more/train-1.jsonl", "b")
    write("data/.hidden", "c")
    write("real/rows.jsonl", "a")
    folder = tmp_path / "data"
    # links are followed, and circles end
    (folder / "part").symlink_to(tmp_path / "real")
    (folder / "back").symlink_to(folder)
    before = of_data(str(folder))
    assert [one.name for one in before.files] == [
        "more/train-1.jsonl",
        "part/rows.jsonl",
        "train-0.jsonl",
    ]
    found = {before.digest}
    # a name says to which split a file belongs
    (folder / "train-0.jsonl").rename(folder / "test-0.jsonl")
    found.add(of_data(str(folder)).digest)
    for name in ("data/more/train-1.jsonl", "data/README.md", "real/rows.jsonl"):
        write(name, "x")
        found.add(of_data(str(folder)).digest)
    assert len(found) == 5
    (folder / ".hidden").unlink()
    assert of_data(str(folder)).digest in found


def test_a_name_on_the_hub_is_known_by_the_commit_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    unknown = of_model("Org/name")
    assert (unknown.kind, unknown.revision) == ("name", None)
    refs = tmp_path / "models--Org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("c1\n")
    first = of_model("Org/name")
    assert (first.kind, first.revision) == ("hub", "c1")
    (refs / "main").write_text("c2")
    second = of_tokenizer("Org/name")
    (tmp_path / "models--Org--name" / "snapshots" / "c1").mkdir(parents=True)
    asked = of_model("Org/name", revision="c1")
    assert len({unknown.digest, first.digest, second.digest}) == 3
    assert asked.digest == first.digest
    assert of_model("Org/name", revision="../x").kind == "name"


def test_what_is_not_there_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(MissingContent) as caught:
        of_data(str(tmp_path / "none.jsonl"))
    assert isinstance(caught.value, NotReady)
    assert caught.value.exit_code == Exit.NOT_READY
    assert caught.value.findings[0].code == "missing-file"
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(MissingContent):
            of_data(name)
    # a pipe is refused and not waited for
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(MissingContent) as caught:
        of_data(str(tmp_path / "rows.jsonl"))
    assert caught.value.findings[0].code == "unreadable-file"


def test_a_change_that_hides_behind_size_and_time_is_seen(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("a.jsonl", b"row\n")
    # it has been still for long enough
    monkeypatch.setattr(fingerprint, "_MARGIN_S", -1e9)
    before, was = of_file(path).digest, path.stat()
    with monkeypatch.context() as without:
        without.setattr(content, "read_content", None)
        assert of_file(path).digest == before
    path.write_bytes(b"RUW\n")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert path.stat().st_mtime_ns == was.st_mtime_ns
    assert of_file(path).digest != before


def test_the_digests_are_those_of_every_other_machine(write: Write) -> None:
    """A cache on a shared disk is found from all of them: number of processors and threads are no part."""
    path = write("a.jsonl", bytes(range(256)) * 80_000)
    code = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from launcher.artifacts.fingerprint import *; print(of_file(Path(sys.argv[1])).digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    assert done.stdout.strip() == digest(path)
    assert digest(path) == "6a65e87d5ac4ee8eedac85c84026eb567c5bdec57e4cb55b64f9ba9d115dc0bc"
