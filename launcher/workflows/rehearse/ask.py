"""Talking to the trainer's Python: one server process, many requests, and nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launcher.errors import Finding, not_ready
from launcher.machine import codec, isolation, process
from launcher.machine.python import Trainer
from launcher.upstream.trainers import BACKENDS
from launcher.workflows.rehearse.inside.records import (
    ErrorRecord,
    ScriptFacts,
    ServerRequest,
    ServerResponse,
)

SERVER = Path(__file__).resolve().parent / "server.py"
STARTS_S = 300.0
"""Seconds that importing the trainer's packages may take."""
LIMIT_S = 120.0
"""Seconds that one request may take."""


def build_environment(scratch: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """No GPU, no network, no tracker, and every temporary file in `scratch`."""
    kept = {}
    for name, value in environ.items():
        if not name.startswith(("LAUNCH_", "WANDB_")):
            kept[name] = value
    return {
        **isolation.isolate(kept),
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TMPDIR": str(scratch),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONDONTWRITEBYTECODE": "1",
        "REFERENCE_LOGPROBS_CACHE_PATH": str(scratch / "reference"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def find_script_facts(backend: str, key: str) -> ScriptFacts | None:
    """What the trainer's Python needs to know of an entry script; None if it is not rehearsed."""
    if backend not in BACKENDS or key not in BACKENDS[backend].STAGES:
        return None
    entry = BACKENDS[backend].STAGES[key]
    recipe = entry.rehearsal
    if recipe is None:
        return None
    return ScriptFacts(
        module=entry.script.removesuffix(".py").replace("/", "."),
        classes=list(entry.classes),
        parses=recipe.parses,
        trainer=recipe.trainer,
        adapts=recipe.adapts,
        imports_others=recipe.imports_others,
        final_model=entry.final_model,
        ends_after=list(entry.ends_after),
    )


class Server:
    """A fork server under the trainer's Python; its folder `scratch` is removed with it."""

    def __init__(self, trainer: Trainer, backend: str, stage: str, root: Path | None) -> None:
        self.trainer = trainer
        self.backend = backend
        self.script = find_script_facts(backend, stage) or ScriptFacts()
        self.root = root
        self._numbers = itertools.count(1)

    def folder(self) -> Path:
        """The name of a new folder in `scratch`."""
        return self.scratch / f"small-{next(self._numbers)}"

    def __enter__(self) -> Server:
        try:
            self.scratch = Path(tempfile.mkdtemp(prefix="launch-rehearsal-"))
        except OSError as error:
            message = f"no temporary folder can be made: {error.strerror}"
            raise not_ready("no-space", message) from None
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.scratch, ignore_errors=True)
            log = stack.enter_context((self.scratch / "server.log").open("wb"))
            self._process = subprocess.Popen(
                [str(self.trainer.python), "-u", str(SERVER), str(self.scratch), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=build_environment(self.scratch, os.environ),
                start_new_session=True,
                text=True,
            )
            stack.callback(self._end_process)
            self._set_up_server()
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _set_up_server(self) -> None:
        paths = [] if self.root is None else [str(self.root)]
        setup = {"backend": self.backend, "paths": paths, "script": asdict(self.script)}
        ready = self._exchange(setup, STARTS_S)
        if ready is None:
            reason = "it ended, or did not answer"
        elif "failed" in ready:
            reason = describe_error(ErrorRecord(**ready["failed"]))
        else:
            return
        message = f"{self.trainer.python} cannot import the training script: {reason}"
        raise not_ready("rehearsal-imports", message, "launch doctor CONFIG says what is missing")

    def _exchange(self, content: Any, seconds: float) -> Any:
        """The server's answer to a line; None where it ends, or takes longer: then it is ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(seconds, self._kill_process)
        timer.start()
        try:
            print(json.dumps(content), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline() or "null")
        except (BrokenPipeError, ValueError):
            # it has gone, in the midst of a line
            return None
        finally:
            timer.cancel()

    def _kill_process(self) -> None:
        process.signal_group(self._process.pid, signal.SIGKILL)

    def _end_process(self) -> None:
        self._kill_process()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def ask(self, *requests: ServerRequest, limit_s: float = LIMIT_S) -> list[ServerResponse]:
        """The responses to some requests, in their order; they are worked on at the same time."""
        content = []
        for request in requests:
            sent = replace(
                request,
                id=next(self._numbers),
                scratch=str(self.scratch),
                folder=os.getcwd(),
                limit_s=limit_s,
            )
            content.append(asdict(sent))
        responses = {}
        for answer in self._exchange(content, limit_s * len(content) + 30) or ():
            responses[answer["id"]] = codec.read_record(ServerResponse, answer)
        lost = ServerResponse(ended=self._process.poll())
        return [responses.get(sent["id"], lost) for sent in content]

    def log(self, response: ServerResponse) -> str:
        """The end of what a request printed."""
        with contextlib.suppress(OSError):
            text = (self.scratch / f"{response.id}.log").read_bytes()[-4000:]
            return text.decode(errors="replace")
        return ""


class Servers(contextlib.ExitStack):
    """Servers for several stages: one for each script, started when it is first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[tuple[Any, ...], Server] = {}

    def of(self, trainer: Trainer, backend: str, stage: str, root: Path | None) -> Server:
        """The server of a script. Raises NotReady where the Python cannot import it."""
        key = (trainer.python, backend, stage, root)
        if key not in self._open:
            self._open[key] = self.enter_context(Server(trainer, backend, stage, root))
        return self._open[key]


def describe_error(error: ErrorRecord) -> str:
    """What an exception says, in one line, with the place in the library that raised it."""
    text = " ".join(error.message.split())
    if error.type in {"SystemExit", "Refused", "KeyError"}:
        return text[:600]
    text = f"{error.type}: {text}"[:600]
    if error.file is not None:
        text += f" ({error.file}:{error.line})"
    return text


def describe_crash(response: ServerResponse, log: str) -> Finding:
    """A finding about a process that ended without a response."""
    code = "rehearsal-crash"
    if response.hung:
        code = "rehearsal-hangs"
        message = f"the training script does not come to an end in {LIMIT_S:.0f} s"
    elif response.ended is not None and response.ended < 0:
        name = signal.Signals(-response.ended).name
        message = f"the training script's process was ended by {name}"
    else:
        message = f"the training script's process ended with {response.ended}"
    frames = [line.strip() for line in response.stack.splitlines() if "File" in line]
    if frames:
        message += f"; it was in {frames[0]}"
    help = None
    if log.strip():
        help = f"its last line: {log.strip().splitlines()[-1].strip()[:200]}"
    return Finding(severity="error", layer="trainer", code=code, message=message, help=help)
