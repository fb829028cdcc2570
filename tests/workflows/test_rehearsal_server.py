"""The server of rehearsals: one response to each request, and nothing left however it ends."""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY
from fake_world import find_processes, wait_until
from small_stages import copy_server

from launcher.errors import NotReady
from launcher.machine.python import Trainer, find_trainer
from launcher.upstream.trainers import BACKENDS
from launcher.workflows.rehearse import ask
from launcher.workflows.rehearse.ask import Server
from launcher.workflows.rehearse.inside.records import ServerRequest

# The trainer is whatever does not lie in the server's folder, as the code of a request.
STAGE = """
from .calls import Refused, call_trainer, pass_on
def load(script): pass
def fault(): None + 1
def replacement(function): return pass_on(function)
def reload(function): replacement(function)
def run(request, response): exec(request.words[0], {**globals(), "response": response})
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, in which no server leaves its own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    assert not list(folder.glob("launch-rehearsal*"))


@pytest.fixture
def stage_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The code of a stage that runs the words of a request, in a server of its own."""
    folder = tmp_path / "server"
    copy_server(folder)
    module = folder / "inside" / "made_stage.py"
    module.write_text(STAGE)
    monkeypatch.setattr(ask, "SERVER", folder / "server.py")
    return module


@pytest.fixture
def trainer(stage_module: Path) -> Trainer:
    return find_trainer(Path(sys.executable), None)


def code_request(code: str) -> ServerRequest:
    return ServerRequest(kind="run", words=[code])


def test_however_a_script_ends_there_is_one_response_to_it(trainer: Trainer) -> None:
    endings = (
        "import time; time.sleep(900)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "import os; os._exit(7)",
        "import errno; raise OSError(errno.ENOSPC, 'No space left on device')",
    )
    with Server(trainer, "made", "sft", None) as server:
        responses = server.ask(*map(code_request, endings), limit_s=1)
        (trained,) = server.ask(code_request("response.phase = 'train'"))
        crashes = [ask.describe_crash(response, server.log(response)) for response in responses[:3]]

    hung, _, _, full = responses
    assert hung.hung
    assert hung.phase is None
    assert "made_stage" in hung.stack
    codes = [finding.code for finding in crashes]
    assert codes == ["rehearsal-hangs", "rehearsal-crash", "rehearsal-crash"]
    assert "SIGSEGV" in crashes[1].message
    assert "7" in crashes[2].message
    assert full.refusal is not None
    assert full.refusal.errno == 28
    assert trained.phase == "train"


TRAINER_CODE = """
def breaks(): raise KeyError('theirs')
def calls(f, *args): f(*args)
def translates(f):
    try: f()
    except Exception as error: raise ValueError('theirs') from error
def replaces(f):
    try: f()
    except Exception: raise ValueError('theirs')
"""


BY_LAUNCH = {
    "launch": "fault()",
    "launch, called back by the trainer": "call_trainer(calls, fault)",
    "a replacement that launch called": "reload(breaks)",
    "the same, called back by the trainer": "call_trainer(calls, reload, breaks)",
    "the trainer, because of launch": "call_trainer(translates, fault)",
    "the trainer, while it handles a fault of launch": "call_trainer(replaces, fault)",
}
BY_TRAINER = {
    "the trainer": "call_trainer(breaks)",
    "the trainer, called by a replacement": "call_trainer(calls, replacement, breaks)",
    "the trainer, because of the trainer": "call_trainer(translates, breaks)",
    "launch, about a result of the trainer": "raise Refused('no row is left')",
}


def test_the_frames_show_who_raised_an_exception(trainer: Trainer) -> None:
    calls = {**BY_LAUNCH, **BY_TRAINER}
    requests = [code_request(TRAINER_CODE + call) for call in calls.values()]
    with Server(trainer, "made", "sft", None) as server:
        responses = server.ask(*requests)

    blamed = []
    for who, response in zip(calls, responses, strict=True):
        assert response.refusal is not None
        if response.refusal.by_launch:
            blamed.append(who)
    assert blamed == list(BY_LAUNCH)


def test_each_entry_script_describes_its_rehearsal_or_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ask.SERVER.parent)
    for backend in ("trl", "open_instruct"):
        stage = importlib.import_module(f"inside.{backend}_stage")
        adapters = ("", *getattr(stage, "ADAPTERS", ()))
        for key, entry in BACKENDS[backend].STAGES.items():
            facts = ask.find_script_facts(backend, key)
            assert (facts is None) == (entry.rehearsal is None)
            assert facts is None or facts.adapts in adapters
        assert ask.find_script_facts(backend, "reward") is None


REHEARSE = """
import sys
from pathlib import Path
from launcher.machine.python import find_trainer
from launcher.workflows.rehearse import ask
from launcher.workflows.rehearse.inside.records import ServerRequest
ask.SERVER = Path(sys.argv[1])
with ask.Servers() as servers:
    server = servers.of(find_trainer(Path(sys.executable), None), "made", "sft", None)
    server.ask(ServerRequest(kind="run", words=[sys.argv[2]]))
"""
SLOW_IMPORT = "import time\ntime.sleep(900)\n"
SLOW_STAGE = "import subprocess; subprocess.run(['sleep', '900'])"


@pytest.mark.parametrize(
    ("imported", "code", "processes"),
    [
        pytest.param(SLOW_IMPORT, "", 2, id="while it imports"),
        pytest.param("", SLOW_STAGE, 4, id="while it works"),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_a_rehearsal_nothing_of_it_is_left(
    number: signal.Signals, imported: str, code: str, processes: int, stage_module: Path,
    temporary: Path,
) -> None:  # fmt: skip
    stage_module.write_text(STAGE + imported)
    environ = {**os.environ, "REHEARSAL_TEST": str(temporary)}
    command = [sys.executable, "-c", REHEARSE, str(ask.SERVER), code]
    running = subprocess.Popen(command, env=environ, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    wait_until(lambda: list(temporary.glob("launch-rehearsal-*/*.log")))
    wait_until(lambda: len(find_processes("REHEARSAL_TEST", temporary)) >= processes)

    running.send_signal(number)
    running.wait(timeout=60)

    wait_until(lambda: not list(temporary.iterdir()))
    wait_until(lambda: not find_processes("REHEARSAL_TEST", temporary))


def test_a_python_without_the_packages_is_not_ready(stage_module: Path, trainer: Trainer) -> None:
    stage_module.write_text("import no_such_package\n")

    with pytest.raises(NotReady, match="No module named 'no_such_package'"):
        Server(trainer, "made", "sft", None).__enter__()
