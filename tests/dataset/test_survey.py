"""What is seen of all rows, and how it is remembered."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Write
from row_files import chats, lines, texts

from launcher.artifacts.fingerprint import cache_home
from launcher.dataset import reading, survey


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose rows were read, in their order."""
    paths: list[Path] = []
    original = reading.read_rows

    def spied(path: Path) -> Any:
        paths.append(path)
        return original(path)

    monkeypatch.setattr(reading, "read_rows", spied)
    return paths


def settled(path: Path) -> Path:
    """A file that was not written to just now."""
    earlier = time.time() - 60
    os.utime(path, (earlier, earlier))
    return path


def look(*paths: Path) -> survey.Survey:
    # another process: nothing is remembered but what lies in the cache
    survey._look.cache_clear()
    return survey.look(paths)


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    # the time of a change of a file's state cannot be set
    monkeypatch.setattr(survey, "_SETTLED_S", -3600.0)


def memories() -> list[Path]:
    return sorted((cache_home() / "surveys").glob("*"))


@pytest.mark.usefixtures("remembering")
def test_a_second_look_reads_nothing(write: Write, rows_read: list[Path]) -> None:
    path = settled(write("a.jsonl", lines([*chats(), [1], {"messages": "x"}])))
    first = look(path)
    assert look(path) == first
    assert rows_read == [path]
    assert len(memories()) == 1


@pytest.mark.usefixtures("remembering")
def test_a_changed_file_is_looked_at_again(write: Write, rows_read: list[Path]) -> None:
    path = settled(write("a.jsonl", lines(texts(3))))
    assert look(path).rows == 3
    # as long as before, and with its earlier time
    before = path.stat()
    path.write_bytes(lines(texts(3)).replace(b"walrus", b"badger"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    look(path)
    assert len(rows_read) == 2
    replaced = write("b.jsonl", lines(texts(3)))
    os.utime(replaced, ns=(before.st_atime_ns, before.st_mtime_ns))
    replaced.rename(path)
    look(path)
    assert len(rows_read) == 3


def test_a_file_that_is_still_written_is_not_remembered(
    write: Write, rows_read: list[Path]
) -> None:
    path = write("a.jsonl", lines(texts(3)))
    look(path)
    look(path)
    assert len(rows_read) == 2
    assert not memories()


DAMAGED: list[bytes] = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"rows": "x"}', b'{"rows": 3}', b"[" * 10_000, bytes(2**24 + 1),
    b'{"rows":1,"kinds":[["text","text",1,7,1]],"facts":[],"faults":[],"fault_count":0,"unread":[]}',
    b'{"rows":1,"kinds":[["text","text",1,-9,1]],"facts":[],"faults":[],"fault_count":0,"unread":[]}',
    b'{"rows":1,"kinds":[1],"facts":{},"faults":[],"fault_count":0,"unread":[]}',
    b'{"rows":1,"kinds":[],"facts":[],"faults":[{"file":0}],"fault_count":1,"unread":[]}',
    b'{"rows":1,"kinds":[],"facts":[],"faults":["x"],"fault_count":1,"unread":[]}',
    b'{"rows":1,"kinds":[],"facts":[],"faults":[{"file":0,"reason":"x","number":"y"}],"fault_count":1,"unread":[]}',
    b'{"rows":1,"kinds":[],"facts":[],"faults":[],"fault_count":1,"unread":3}',
    b'{"rows":1e999,"kinds":[],"facts":[],"faults":[],"fault_count":0,"unread":[]}',
    b'{"rows":NaN,"kinds":[],"facts":[],"faults":[],"fault_count":0,"unread":[]}',
]  # fmt: skip


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_memory_does_no_harm(write: Write, content: bytes) -> None:
    path = settled(write("a.jsonl", lines(texts(3))))
    first = look(path)
    (memory,) = memories()
    memory.write_bytes(content)
    assert look(path) == first
    assert look(path) == first


@pytest.mark.usefixtures("remembering")
def test_what_another_version_remembers_is_not_read(
    write: Write, rows_read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settled(write("a.jsonl", lines(texts(3))))
    look(path)
    monkeypatch.setattr(survey, "_VERSION", -1)
    look(path)
    assert len(rows_read) == 2


@pytest.mark.usefixtures("remembering")
def test_a_cache_that_cannot_be_written(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = write("file", "x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setenv("HF_HOME", str(blocked))
    assert look(settled(write("a.jsonl", lines(texts(3))))).rows == 3
    folder = write("cache/x", "x").parent
    folder.chmod(0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    try:
        assert look(write("b.jsonl", lines(texts(4)))).rows == 4
    finally:
        folder.chmod(0o700)


@pytest.mark.usefixtures("remembering")
def test_a_memory_that_is_a_folder(write: Write) -> None:
    path = settled(write("a.jsonl", lines(texts(3))))
    look(path)
    (memory,) = memories()
    memory.unlink()
    memory.mkdir()
    assert look(path).rows == 3


LOOK = """
import sys
from pathlib import Path
from launcher.dataset import survey
survey._SETTLED_S = -3600.0
print(survey.look([Path(sys.argv[1])]).rows)
"""


def test_two_processes_at_once(write: Write) -> None:
    path = settled(write("a.jsonl", lines(texts(20_000))))
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-c", LOOK, str(path)]
    processes = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ) for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["20000"] * 3
    (memory,) = memories()
    assert json.loads(memory.read_bytes())["rows"] == 20_000


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("gone.jsonl", "folder.jsonl", "pipe.jsonl", "a\0b.jsonl"):
        assert look(tmp_path / name).fault_count == 1, name


def test_a_survey_of_several_files(write: Write) -> None:
    first = write("a.jsonl", lines(texts(3)))
    second = write("b.jsonl", lines([{"text": 5}, {"body": "x"}]))
    surveyed = look(first, second)
    assert surveyed.rows == 5
    assert {kind: (tally.count, tally.first.number) for kind, tally in surveyed.kinds_of("text").items()} == {
        "text": (3, 1), "number": (1, 1), "absent": (1, 0),
    }  # fmt: skip
    assert str(surveyed.kinds_of("text")["number"].first) == f"{second}:1"


def test_columns_and_roles_without_end(write: Write) -> None:
    rows = [{f"c{n}": n, "messages": [{"role": f"r{n}", "content": "x"}]} for n in range(3000)]
    surveyed = look(write("a.jsonl", lines(rows)))
    assert surveyed.rows == 3000
    assert len(surveyed.kinds) <= 2 * survey._MOST_FACTS
    assert len(surveyed.facts) <= survey._MOST_FACTS
