"""Which GPUs a run gets, with an `nvidia-smi` that answers like the real one and locks that are real."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from fake_smi import Smi, uuid

from launcher.errors import NotReady, UsageError
from launcher.machine import devices
from launcher.machine.devices import Devices, Slot
from launcher.machine.python import Gpu
from launcher.planning import collect
from launcher.planning.collect import Scope
from launcher.planning.request import Request

BUSY = 70000


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    fake = Smi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake.cards(4, 4, 4, 4)
    return fake


def chosen(
    count: int | None, asked: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Devices:
    return devices.choose_devices(count, asked, devices.survey_devices(environ or {}))


@contextlib.contextmanager
def taken(count: int, run: Path) -> Iterator[tuple[Devices, tuple[int, ...]]]:
    made = chosen(count)
    with devices.lock_slots(made, run) as locks:
        yield made, locks


def refusal(made: Devices) -> tuple[str, str]:
    (finding,) = made.findings
    assert made.refused and not made.slots
    return finding.code, f"{finding.message} | {finding.help}"


def test_free_ones_in_order(smi: Smi) -> None:
    made = chosen(2)
    assert (made.visible, made.findings) == ("0,1", ())
    assert made.env() == {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    told = made.as_json()
    second = {"index": 1, "id": uuid(1), "name": "NVIDIA H200", "memory_mib": 143771}
    assert told["gpus"][1] == second
    json.dumps(told)
    # too few free ones names who has them
    smi.cards(BUSY, 4, 4, 5000)
    smi.processes((0, 999_999_999, BUSY), (0, 999_999_998, 12))
    code, text = refusal(chosen(3))
    assert code == "gpus-taken"
    assert "3 GPU(s) asked for, 2 of 4 free" in text
    assert "GPU 0 is used by pid 999999999 (python3, 70000 MiB), pid 999999998 (python3, 12" in text
    assert "GPU 3 is used by something that is not seen from here (5000 MiB)" in text
    assert "--gpus 2" in text and "wait" in text
    # the cpu needs none
    smi.cards()
    made = chosen(0)
    assert (made.visible, made.refused, made.why) == ("", False, "on the CPU")
    # a divided card is left out
    smi.cards(4, 4, mig=[0])
    assert chosen(1).visible == "1"


@pytest.mark.parametrize(
    ("listed", "count", "words"),
    [
        (None, 5, "5 GPU(s) asked for, 4 here | --gpus 4"),
        ("", 1, "1 GPU(s) asked for, 0 here (CUDA_VISIBLE_DEVICES=) | --gpus 0 trains on the CPU"),
    ],
)
def test_fewer_than_asked_for(smi: Smi, listed: str | None, count: int, words: str) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    code, text = refusal(chosen(count, environ=environ))
    assert code == "too-few-gpus"
    assert text.startswith(words)


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (None, "0,1,2,3"), ("", ""), (" 1, 0", "1,0"), ("0,1,7,2", "0,1"), ("-1", ""), ("0,0", ""),
        (f"{uuid(3)},{uuid(0)[:12]}", f"{uuid(3)},{uuid(0)[:12]}"), ("GPU-", ""), ("none", ""), ("MIG-00000000", ""),
    ],
)  # fmt: skip
def test_what_cuda_would_see(smi: Smi, listed: str | None, names: str) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    seen = devices.survey_devices(environ)
    assert ",".join(slot.name for slot in seen.visible) == names


@pytest.mark.parametrize("text", ["", "2,2", "-1", "MIG-1", "٣"])
def test_names_that_name_nothing(text: str) -> None:
    assert devices.slots_named(" 2 , GPU-00000001 ") == ("2", "GPU-00000001")
    with pytest.raises(UsageError) as caught:
        devices.slots_named(text)
    assert caught.value.findings[0].code == "bad-devices"


def test_the_ones_that_were_named(smi: Smi) -> None:
    assert chosen(None, ["3", "2"]).visible == "3,2"
    assert chosen(2, [uuid(1), "0"]).visible == "1,0"
    for asked, environ, words in (
        (["2", "7"], {}, "--devices 7: there is no such GPU here | to be seen: 0, 1"),
        (
            ["1"],
            {"CUDA_VISIBLE_DEVICES": "2,3"},
            "CUDA_VISIBLE_DEVICES=2,3 hides it | to be seen: 2, 3",
        ),
    ):
        code, text = refusal(chosen(None, asked, environ))
        assert code == "no-such-gpu" and words in text
    # a busy one that is named is a warning
    smi.cards(4, BUSY)
    smi.processes((1, 999_999_999, BUSY))
    made = chosen(None, ["1"])
    (finding,) = made.findings
    assert (made.visible, finding.severity, finding.code) == ("1", "warning", "busy-gpu")
    assert "pid 999999999" in finding.message
    # a choice stays within what is visible
    smi.cards(4, 4, BUSY, 4)
    assert chosen(2, environ={"CUDA_VISIBLE_DEVICES": "3,2,1"}).visible == "3,1"
    # ids stay ids: what started launch may count in another order
    made = chosen(1, environ={"CUDA_VISIBLE_DEVICES": f"{uuid(3)},{uuid(1)}"})
    assert made.env() == {"CUDA_VISIBLE_DEVICES": uuid(3)}
    assert [slot.gpu.index for slot in made.slots] == [3]


def test_a_gpu_that_a_run_holds_is_not_free(smi: Smi, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "20261121T000000Z-sft-a"
    with taken(2, run) as (made, locks):
        assert (made.visible, len(locks)) == ("0,1", 2)
        assert chosen(2).visible == "2,3"
        code, text = refusal(chosen(3))
        assert code == "gpus-taken"
        assert "GPU 0 is used by the run 20261121T000000Z-sft-a" in text
        assert "`launch stop 20261121T000000Z-sft-a`" in text
        # nor is it given to whoever names it
        code, text = refusal(chosen(None, ["1"]))
        assert (code, "GPU 1 is taken by the run" in text) == ("gpus-taken", True)
        # what another start had chosen a moment before
        late = devices.lock_slots(Devices(slots=made.slots), tmp_path / "other")
        with pytest.raises(NotReady, match="taken by the run"), late:
            pass
    assert chosen(4).visible == "0,1,2,3"


def test_the_same_run_takes_over_from_its_launcher(smi: Smi, tmp_path: Path) -> None:
    made = chosen(1)
    first = devices.lock_slots(made, tmp_path / "run")
    first.__enter__()
    timer = threading.Timer(0.3, lambda: first.__exit__(None, None, None))
    timer.start()
    with devices.lock_slots(made, tmp_path / "run") as locks:
        assert len(locks) == 1
        timer.join()
        assert refusal(chosen(None, ["0"]))[0] == "gpus-taken"
    assert not chosen(None, ["0"]).findings


def test_a_lock_lives_as_long_as_the_process_that_inherited_it(smi: Smi, tmp_path: Path) -> None:
    with taken(1, tmp_path / "run") as (_, locks):
        child = subprocess.Popen(["sleep", "600"], pass_fds=locks)
    try:
        assert chosen(1).visible == "1"
    finally:
        child.kill()
        child.wait()
    # nothing is left of it but a file
    assert chosen(1).visible == "0"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user too")
def test_users_share_the_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    place.chmod(0o1777)
    monkeypatch.setenv(devices.LOCKS, str(place))
    known = Gpu(index=0, uuid=uuid(0), name="NVIDIA H200", memory_mib=143771, used_mib=4)
    card = Slot("0", known)
    ready, go = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.umask(0o077)
        os.setuid(65534)
        monkeypatch.setenv("XDG_STATE_HOME", "/nowhere")
        with devices.lock_slots(Devices(slots=(card,)), Path("/theirs/run")):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with (
            pytest.raises(NotReady, match="taken by the run run"),
            devices.lock_slots(Devices(slots=(card,)), tmp_path / "ours", patience_s=0),
        ):
            pass
        os.write(go[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
        with devices.lock_slots(Devices(slots=(card,)), tmp_path / "ours", patience_s=0) as locks:
            assert len(locks) == 1
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("kind", ["symlink", "fifo"])
def test_a_lock_file_that_is_something_else(smi: Smi, tmp_path: Path, kind: str) -> None:
    with taken(1, tmp_path / "run"):
        pass
    (place,) = tmp_path.glob("launch-GPU*")
    place.unlink()
    victim = tmp_path / "victim"
    victim.write_text("kept")
    if kind == "symlink":
        place.symlink_to(victim)
    else:
        os.mkfifo(place)
    with taken(1, tmp_path / "run") as (made, locks):
        assert (made.visible, locks) == ("0", ())
    assert victim.read_text() == "kept"


@pytest.mark.parametrize(("gpus", "named"), [(8, "0"), (0, "0")])
def test_a_count_that_contradicts_the_names_is_refused_without_a_look(
    gpus: int, named: str
) -> None:
    """Also of a dry run, which looks at no GPU."""
    request = Request(stage="sft", config=Path("stage.yaml"), gpus=gpus, devices=named)
    with pytest.raises(UsageError, match="but --devices names"):
        collect.collect(request, Scope.PLAN)
