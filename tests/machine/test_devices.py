"""Which GPUs a run gets, with an `nvidia-smi` that answers like the real one and real locks."""

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
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

BUSY_MIB = 70000
RUN = "20261121T000000Z-sft-a"


@pytest.fixture(autouse=True)
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """A machine with four free cards."""
    smi = Smi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{smi.folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    smi.cards(4, 4, 4, 4)
    return smi


def choose(
    count: int | None = None, named: Sequence[str] | None = None, visible: str | None = None
) -> Devices:
    """The cards that a start gets; `visible` is its CUDA_VISIBLE_DEVICES."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return devices.choose_devices(count, named, devices.survey_devices(environ))


def require_refusal(refused: Devices, code: str, *texts: str) -> None:
    (finding,) = refused.findings
    assert refused.refused
    assert not refused.slots
    assert finding.code == code
    for text in texts:
        assert text in f"{finding.message} | {finding.help}"


def test_the_first_free_cards_are_chosen(smi: Smi) -> None:
    chosen = choose(2)
    assert chosen.visible == "0,1"
    assert chosen.findings == ()
    assert chosen.env() == {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    second = {"index": 1, "id": uuid(1), "name": "NVIDIA H200", "memory_mib": 143771}
    assert chosen.as_json()["gpus"][1] == second

    smi.cards(BUSY_MIB, 4)
    assert choose(1).visible == "1"


def test_a_divided_card_is_left_out(smi: Smi) -> None:
    smi.cards(4, 4, mig=[0])
    assert choose(1).visible == "1"


def test_the_cpu_needs_no_card(smi: Smi) -> None:
    smi.cards()
    chosen = choose(0)
    assert chosen.visible == ""
    assert not chosen.refused
    assert chosen.why == "on the CPU"


def test_who_uses_the_cards_that_are_not_free_is_named(smi: Smi) -> None:
    smi.cards(BUSY_MIB, 4, 4, 5000)
    smi.processes((0, 999_999_999, BUSY_MIB), (0, 999_999_998, 12))
    require_refusal(
        choose(3),
        "gpus-taken",
        "3 GPU(s) asked for, 2 of 4 free",
        "GPU 0 is used by pid 999999999 (python3, 70000 MiB), pid 999999998 (python3, 12",
        "GPU 3 is used by something that is not seen from here (5000 MiB)",
        "--gpus 2",
    )


def test_more_cards_than_there_are() -> None:
    require_refusal(choose(5), "too-few-gpus", "5 GPU(s) asked for, 4 here | --gpus 4")
    text = "1 GPU(s) asked for, 0 here (CUDA_VISIBLE_DEVICES=) | --gpus 0 trains on the CPU"
    require_refusal(choose(1, visible=""), "too-few-gpus", text)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("", []),
        (" 1, 0", ["1", "0"]),
        ("0,1,7,2", ["0", "1"]),
        ("-1", []),
        ("0,0", []),
        (f"{uuid(3)},{uuid(0)[:12]}", [uuid(3), uuid(0)[:12]]),
        ("GPU-", []),
        ("none", []),
    ],
)
def test_the_visible_cards_are_those_of_cuda(visible: str, names: list[str]) -> None:
    survey = devices.survey_devices({"CUDA_VISIBLE_DEVICES": visible})
    assert [slot.name for slot in survey.visible] == names


def test_names_of_cards() -> None:
    assert devices.parse_slots(" 2 , GPU-00000001 ") == ("2", "GPU-00000001")


@pytest.mark.parametrize("text", ["", "2,2", "-1", "MIG-1", "٣"])
def test_names_that_name_nothing(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        devices.parse_slots(text)
    assert refused.value.findings[0].code == "bad-devices"


def test_named_cards_are_chosen_in_their_order() -> None:
    assert choose(named=["3", "2"]).visible == "3,2"
    assert choose(2, [uuid(1), "0"]).visible == "1,0"


def test_a_named_card_that_is_not_there_or_hidden_is_refused() -> None:
    text = "--devices 7: there is no such GPU here | to be seen: 0, 1"
    require_refusal(choose(named=["2", "7"]), "no-such-gpu", text)
    text = "CUDA_VISIBLE_DEVICES=2,3 hides it | to be seen: 2, 3"
    require_refusal(choose(named=["1"], visible="2,3"), "no-such-gpu", text)


def test_a_busy_card_that_is_named_is_a_warning(smi: Smi) -> None:
    smi.cards(4, BUSY_MIB)
    smi.processes((1, 999_999_999, BUSY_MIB))
    chosen = choose(named=["1"])
    assert chosen.visible == "1"
    (finding,) = chosen.findings
    assert finding.severity == "warning"
    assert finding.code == "busy-gpu"
    assert "pid 999999999" in finding.message


def test_a_choice_stays_within_what_is_visible(smi: Smi) -> None:
    smi.cards(4, 4, BUSY_MIB, 4)
    assert choose(2, visible="3,2,1").visible == "3,1"
    # ids stay ids: what started launch may count in another order
    assert choose(1, visible=f"{uuid(3)},{uuid(1)}").env() == {"CUDA_VISIBLE_DEVICES": uuid(3)}


def test_a_card_that_a_run_holds_is_not_free(tmp_path: Path) -> None:
    chosen = choose(2)
    with devices.lock_slots(chosen, tmp_path / "runs" / RUN):
        assert choose(2).visible == "2,3"
        texts = (f"GPU 0 is used by the run {RUN}", f"`launch stop {RUN}`")
        require_refusal(choose(3), "gpus-taken", *texts)
        require_refusal(choose(named=["1"]), "gpus-taken", "GPU 1 is taken by the run")
        # another start has chosen it a moment before
        late = devices.lock_slots(Devices(slots=chosen.slots), tmp_path / "other")
        with pytest.raises(NotReady, match="taken by the run"), late:
            pass
    assert choose(4).visible == "0,1,2,3"


def test_the_same_run_takes_over_from_its_launcher(tmp_path: Path) -> None:
    chosen = choose(1)
    launcher = devices.lock_slots(chosen, tmp_path / "run")
    launcher.__enter__()
    timer = threading.Timer(0.3, lambda: launcher.__exit__(None, None, None))
    timer.start()
    with devices.lock_slots(chosen, tmp_path / "run") as locks:
        assert len(locks) == 1
        timer.join()
        require_refusal(choose(named=["0"]), "gpus-taken")
    assert not choose(named=["0"]).findings


def test_a_lock_lives_as_long_as_the_process_that_inherited_it(tmp_path: Path) -> None:
    with devices.lock_slots(choose(1), tmp_path / "run") as locks:
        child = subprocess.Popen(["sleep", "600"], pass_fds=locks)
    try:
        assert choose(1).visible == "1"
    finally:
        child.kill()
        child.wait()
    assert choose(1).visible == "0"


@pytest.fixture
def shared_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of locks that all users may write to."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    place.chmod(0o1777)
    monkeypatch.setenv(devices.LOCKS, str(place))
    yield
    shutil.rmtree(place)


def hold_as_another_user(card: Devices, ready: int, go: int) -> None:
    """Hold a card until a byte comes in, then end this process."""
    os.umask(0o077)
    os.setuid(65534)
    os.environ["XDG_STATE_HOME"] = "/nowhere"
    with devices.lock_slots(card, Path("/theirs/run")):
        os.write(ready, b"x")
        os.read(go, 1)
    os._exit(0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user too")
@pytest.mark.usefixtures("shared_locks")
def test_users_share_the_locks(tmp_path: Path) -> None:
    gpu = Gpu(index=0, uuid=uuid(0), name="NVIDIA H200", memory_mib=143771, used_mib=4)
    card = Devices(slots=(Slot("0", gpu),))
    read_ready, write_ready = os.pipe()
    read_go, write_go = os.pipe()
    child = os.fork()
    if not child:
        hold_as_another_user(card, write_ready, read_go)
    os.read(read_ready, 1)

    own = tmp_path / "own"
    with (
        pytest.raises(NotReady, match="taken by the run run"),
        devices.lock_slots(card, own, patience_s=0),
    ):
        pass

    os.write(write_go, b"x")
    assert os.waitpid(child, 0)[1] == 0
    with devices.lock_slots(card, own, patience_s=0) as locks:
        assert len(locks) == 1


@pytest.mark.parametrize("is_link", [True, False])
def test_a_lock_file_that_is_a_link_or_a_pipe_is_left_alone(tmp_path: Path, is_link: bool) -> None:
    run = tmp_path / "run"
    with devices.lock_slots(choose(1), run):
        pass
    (place,) = tmp_path.glob("launch-GPU*")
    place.unlink()
    victim = tmp_path / "victim"
    victim.write_text("kept")
    if is_link:
        place.symlink_to(victim)
    else:
        os.mkfifo(place)

    with devices.lock_slots(choose(1), run) as locks:
        assert locks == ()
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("gpus", [8, 0])
def test_a_count_that_contradicts_the_names_is_refused_without_a_look(gpus: int) -> None:
    """Also of a dry run, which looks at no GPU."""
    request = Request(stage="sft", config=Path("stage.yaml"), gpus=gpus, devices="0")
    with pytest.raises(UsageError, match="but --devices names"):
        collect.collect(request, Scope.PLAN)
