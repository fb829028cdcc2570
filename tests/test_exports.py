"""The curves as a picture and as TensorBoard event files."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import loss, made, manifest

from launcher import exports, panels, publish, series
from launcher.errors import Exit, NotReady
from launcher.series import Run

STARTED = 1767323045.0  # of the made manifest


@pytest.fixture(scope="module")
def tensorboardx() -> None:
    """Imported before a test begins: with torch comes a variable of the environment, and two seconds."""
    pytest.importorskip("tensorboardX")


needs_tensorboardx = pytest.mark.usefixtures("tensorboardx")


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    other = made(tmp_path / "two", steps=60, told=manifest(name="$other_$"), bad=(30,))
    return publish.gather([str(made(tmp_path / "one")), str(other)])


@pytest.fixture
def matplotlib() -> Any:
    return pytest.importorskip("matplotlib", reason="no matplotlib")


def pixels(path: Path) -> set[tuple[int, int, int]]:
    """Every colour of a picture."""
    from matplotlib.image import imread

    image = (imread(path)[..., :3] * 255).round().astype(int)
    return {tuple(colour) for colour in image.reshape(-1, 3)[::3].tolist()}


def coloured(text: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(text[1:]))


@pytest.mark.usefixtures("matplotlib")
def test_every_run_is_drawn_in_its_colour(runs: list[Run], tmp_path: Path) -> None:
    path = tmp_path / "new" / "curves.png"
    publish.write_png(runs, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    found = pixels(path)
    assert {coloured(colour) for colour in exports.COLOURS[:2]} <= found
    assert coloured(exports.COLOURS[2]) not in found
    # the step that was not finite
    assert coloured("#ff0000") in found
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("package", "extra"), [("matplotlib", "plot"), ("tensorboardX", "tensorboard")]
)
def test_a_package_that_is_not_there_is_named(
    package: str, extra: str, runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(NotReady) as caught:
        if extra == "plot":
            publish.write_png(runs, tmp_path / "a.png")
        else:
            publish.write_events(runs, tmp_path / "events")
    assert caught.value.exit_code is Exit.NOT_READY
    (finding,) = caught.value.findings
    assert finding.code == "missing-packages"
    assert f"pip install {package}" in (finding.help or "")
    assert f"'.[{extra}]'" in (finding.help or "")
    assert not (tmp_path / "a.png").exists()


def test_charts_of_what_there_is(runs: list[Run], tmp_path: Path) -> None:
    assert [p.key for p in panels.first(runs)][:3] == ["loss", "learning_rate", "tokens"]
    assert {"logps/chosen", "epoch"} <= {p.title for p in panels.further(runs)}
    told = series.of_kept(tmp_path, {}, {}, [{"step": 1, "logged_tokens_per_second": 5.0}])
    # upstream's own figure stands in where nothing was measured, and is not drawn twice
    assert [p.key for p in panels.first([told])] == ["tokens"]
    assert panels.further([told]) == []
    both = [told, *runs]
    assert "logged_tokens_per_second" not in {p.title for p in panels.further(both)}


# ---- event files


def records(path: Path) -> Iterator[bytes]:
    """The records of an event file: a length and its checksum, the bytes and theirs."""
    raw, at = path.read_bytes(), 0
    while at < len(raw):
        (length,) = struct.unpack_from("<Q", raw, at)
        yield raw[at + 12 : at + 12 + length]
        at += 16 + length


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Step, value and wall time by tag."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float, float]]] = {}
    (path,) = folder.glob("events.out.tfevents.*")
    for record in records(path):
        event = Event.FromString(record)
        for value in event.summary.value:
            told = (event.step, value.simple_value, event.wall_time)
            found.setdefault(value.tag, []).append(told)
    return found


@needs_tensorboardx
def test_event_files_hold_every_curve(runs: list[Run], tmp_path: Path) -> None:
    folders = publish.write_events(runs, tmp_path / "events")
    assert [f.name for f in folders] == ["one", "two"]
    first, second = map(scalars, folders)
    assert [(s, pytest.approx(v, rel=1e-6)) for s, v, _ in first["train/loss"]] == [
        (step, loss(step)) for step in range(1, 41)
    ]
    assert first["train/loss"][9][2] == pytest.approx(STARTED + 5.0)
    assert [s for s, _, _ in first["rewards/margins"]] == list(range(5, 41, 5))
    assert 30 not in [s for s, _, _ in second["train/loss"]]


@needs_tensorboardx
def test_a_name_with_slashes_is_one_folder(runs: list[Run], tmp_path: Path) -> None:
    run = replace(runs[0], name="../a/train.log")
    (folder,) = publish.write_events([run], tmp_path / "events")
    assert folder.parent == tmp_path / "events"
