"""What is seen of all rows, and how it is remembered."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY, Write
from row_files import chats, lines, texts

from launcher.artifacts.fingerprint import cache_home
from launcher.dataset import reading, survey
from launcher.dataset.reading import Numbered

Environment = pytest.MonkeyPatch


@pytest.fixture
def files_read(monkeypatch: Environment) -> list[Path]:
    """The files whose rows were read, in their order."""
    paths: list[Path] = []
    read_rows = reading.read_rows

    def record(path: Path) -> Iterator[Numbered]:
        paths.append(path)
        return read_rows(path)

    monkeypatch.setattr(reading, "read_rows", record)
    return paths


@pytest.fixture
def remembering(monkeypatch: Environment) -> None:
    """Remember surveys of files that were written just now: the time of a change cannot be set."""
    monkeypatch.setattr(survey, "_SETTLED_S", -3600.0)


@pytest.fixture
def data(write: Write) -> Path:
    """Three rows, in a file that was last written to a minute ago."""
    path = write("a.jsonl", lines(texts(3)))
    earlier = time.time() - 60
    os.utime(path, (earlier, earlier))
    return path


def look(*paths: Path) -> survey.Survey:
    """Look as another process would: only the cache folder remembers."""
    survey._look.cache_clear()
    return survey.look(paths)


def memories() -> list[Path]:
    return sorted((cache_home() / "surveys").glob("*"))


@pytest.mark.usefixtures("remembering")
def test_a_second_look_reads_no_rows(write: Write, files_read: list[Path]) -> None:
    path = write("a.jsonl", lines([*chats(), [1], {"messages": "x"}]))

    first = look(path)

    assert look(path) == first
    assert files_read == [path]
    assert len(memories()) == 1


@pytest.mark.usefixtures("remembering")
def test_a_changed_file_is_read_again_though_its_size_and_time_are_the_same(
    data: Path, files_read: list[Path]
) -> None:
    look(data)
    before = data.stat()

    data.write_bytes(data.read_bytes().replace(b"walrus", b"badger"))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    look(data)
    assert len(files_read) == 2

    replacement = data.with_name("b.jsonl")
    replacement.write_bytes(data.read_bytes())
    os.utime(replacement, ns=(before.st_atime_ns, before.st_mtime_ns))
    replacement.rename(data)
    look(data)
    assert len(files_read) == 3


def test_a_file_that_was_written_just_now_is_not_remembered(
    write: Write, files_read: list[Path]
) -> None:
    path = write("a.jsonl", lines(texts(3)))
    look(path)
    look(path)
    assert len(files_read) == 2
    assert not memories()


def memory(rows: str = "1", kinds: str = "[]", faults: str = "[]", count: int = 0) -> bytes:
    """A file of the cache, as JSON."""
    fields = f'"rows":{rows},"kinds":{kinds},"faults":{faults},"fault_count":{count}'
    return f'{{{fields},"facts":[],"unread":[]}}'.encode()


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 10_000,
        bytes(2**24 + 1),
        b'{"rows": 3}',
        memory(rows='"x"'),
        memory(rows="1e999"),
        memory(kinds="[1]"),
        memory(kinds='[["text","text",1,7,1]]'),
        memory(faults='["x"]', count=1),
        memory(faults='[{"file":0}]', count=1),
        memory(faults='[{"file":0,"reason":"x","number":"y"}]', count=1),
        memory().replace(b'"unread":[]', b'"unread":3'),
    ],
)
def test_a_damaged_memory_is_replaced(data: Path, content: bytes) -> None:
    first = look(data)
    (path,) = memories()
    path.write_bytes(content)

    assert look(data) == first
    assert look(data) == first


@pytest.mark.usefixtures("remembering")
def test_a_memory_of_another_version_is_not_read(
    data: Path, files_read: list[Path], monkeypatch: Environment
) -> None:
    look(data)
    monkeypatch.setattr(survey, "_VERSION", -1)
    look(data)
    assert len(files_read) == 2


@pytest.mark.usefixtures("remembering")
def test_a_cache_that_cannot_be_written_does_no_harm(
    data: Path, write: Write, monkeypatch: Environment
) -> None:
    blocked = write("file", "x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setenv("HF_HOME", str(blocked))
    assert look(data).rows == 3


@pytest.mark.usefixtures("remembering")
def test_a_folder_in_the_place_of_a_memory_does_no_harm(data: Path) -> None:
    look(data)
    (path,) = memories()
    path.unlink()
    path.mkdir()
    assert look(data).rows == 3


LOOK = """
import sys
from pathlib import Path
from launcher.dataset import survey
survey._SETTLED_S = -3600.0
print(survey.look([Path(sys.argv[1])]).rows)
"""


def test_processes_that_look_at_once_leave_one_memory(write: Write) -> None:
    path = write("a.jsonl", lines(texts(20_000)))
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    processes = []
    for _ in range(3):
        command = [sys.executable, "-c", LOOK, str(path)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ))

    for process in processes:
        output, _ = process.communicate()
        assert output.strip() == "20000"
    (memory_path,) = memories()
    assert json.loads(memory_path.read_bytes())["rows"] == 20_000


@pytest.mark.parametrize("name", ["gone.jsonl", "folder.jsonl", "pipe.jsonl", "a\0b.jsonl"])
def test_a_path_that_is_no_file_is_one_fault(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert look(tmp_path / name).fault_count == 1


def test_kinds_of_values_are_counted_over_files_and_their_first_row_is_known(write: Write) -> None:
    first = write("a.jsonl", lines(texts(3)))
    second = write("b.jsonl", lines([{"text": 5}, {"body": "x"}]))

    surveyed = look(first, second)

    kinds = surveyed.kinds_of("text")
    assert surveyed.rows == 5
    assert {kind: tally.count for kind, tally in kinds.items()} == {
        "text": 3,
        "number": 1,
        "absent": 1,
    }
    assert str(kinds["text"].first) == f"{first}:1"
    assert str(kinds["number"].first) == f"{second}:1"


def test_columns_and_roles_without_end_are_counted_up_to_a_limit(write: Write) -> None:
    rows = []
    for number in range(3000):
        message = {"role": f"r{number}", "content": "x"}
        rows.append({f"c{number}": number, "messages": [message]})

    surveyed = look(write("a.jsonl", lines(rows)))

    assert surveyed.rows == 3000
    assert len(surveyed.kinds) <= 2 * survey._MOST_FACTS
    assert len(surveyed.facts) <= survey._MOST_FACTS
