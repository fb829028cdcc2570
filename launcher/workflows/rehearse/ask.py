"""Talking to the trainer's Python: one server process, many requests, and nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import Finding, not_ready
from launcher.machine import isolation, process
from launcher.machine.python import Trainer
from launcher.upstream.trainers import BACKENDS
from launcher.workflows.rehearse import scratch

SERVER = Path(__file__).resolve().parent / "server.py"
STARTS_S = 300.0
"""Seconds that importing the trainer's packages may take."""
LIMIT_S = 120.0
"""Seconds that one request may take."""


def environment(scratch: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """No GPU, no network, no tracker, and every temporary file in `scratch`."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("LAUNCH_", "WANDB_"))}
    return {
        **isolation.isolated(kept),
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


def script_as_json(backend: str, key: str) -> dict[str, Any]:
    """What is rehearsed of an entry script, for the trainer's Python; empty for a script that is not described."""
    described = BACKENDS.get(backend)
    entry = None if described is None else described.STAGES.get(key)
    recipe = None if entry is None else entry.rehearsal
    if entry is None or recipe is None:
        return {}
    return {
        "module": entry.script.removesuffix(".py").replace("/", "."),
        "classes": [list(one) for one in entry.classes],
        "parses": recipe.parses,
        "trainer": recipe.trainer,
        "adapts": recipe.adapts,
        "imports_others": recipe.imports_others,
        "final_model": entry.final_model,
        "ends_after": list(entry.ends_after),
    }


class Server:
    """A fork server under the trainer's Python. `scratch` is its folder, gone when the server is."""

    def __init__(self, trainer: Trainer, backend: str, stage: str, root: Path | None) -> None:
        self.trainer, self.backend, self.stage, self.root = trainer, backend, stage, root
        self._numbers = itertools.count(1)

    def folder(self) -> Path:
        return self.scratch / f"small-{next(self._numbers)}"

    def __enter__(self) -> Server:
        scratch.remove_left()
        try:
            self._scratch = scratch.make()
            self.scratch = self._scratch.path
        except OSError as error:
            raise not_ready("no-space", f"no temporary folder can be made: {error.strerror}") from None
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self._log = (self.scratch / "server.log").open("wb")
        self._process = subprocess.Popen(
            [str(self.trainer.python), "-u", str(SERVER), str(self.scratch), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(self.scratch, os.environ),
            start_new_session=True,
            text=True,
        )
        about = {"backend": self.backend, "stage": self.stage, "script": script_as_json(self.backend, self.stage)}
        paths = [] if self.root is None else [str(self.root)]
        first = self._answer({**about, "paths": paths}, STARTS_S)
        if first is None or "failed" in first:
            why = "it ended, or did not answer" if first is None else described(first["failed"])
            message = f"{self.trainer.python} cannot import the training script: {why}"
            raise not_ready("rehearsal-imports", message, "launch doctor CONFIG says what is missing")

    def _answer(self, data: Any, seconds: float) -> Any:
        """The server's line about `data`; None where it ends, or takes longer: then it is ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        try:
            print(json.dumps(data), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline() or "null")
        except (BrokenPipeError, ValueError):
            # it has gone, in the midst of a line
            return None
        finally:
            timer.cancel()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_process"):
            self._kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
            self._log.close()
        self._scratch.remove()

    def ask(self, *requests: Mapping[str, Any], limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
        """The answers to some requests, in their order; they are worked on at the same time.

        An answer without a `phase` is that of a process that ended by itself: `ended` is its exit code or
        minus its signal, `hung` whether its time was over, `stack` where it was.
        """
        ids = [next(self._numbers) for _ in requests]
        common = {"scratch": str(self.scratch), "folder": os.getcwd(), "limit_s": limit_s}
        sent = [{"id": number, **common, **request} for number, request in zip(ids, requests, strict=True)]
        found = self._answer(sent, limit_s * len(ids) + 30) or ()
        answers = {answer["id"]: answer for answer in found}
        lost: dict[str, Any] = {"ended": self._process.poll(), "hung": False, "stack": ""}
        return [answers.get(number, lost) for number in ids]

    def log(self, answer: Mapping[str, Any]) -> str:
        with contextlib.suppress(OSError):
            return (self.scratch / f"{answer['id']}.log").read_bytes()[-4000:].decode(errors="replace")
        return ""


class Servers(contextlib.ExitStack):
    """Servers for several stages: one for each script, started when it is first asked for.

    While they are open, TERM and HUP raise KeyboardInterrupt as INT does: nothing is left behind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[tuple[Any, ...], Server] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Servers:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                # nohup has HUP ignored
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, signal.default_int_handler)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        # a second signal must not end the removal halfway
        ignored = dict.fromkeys((*self._before, signal.SIGINT) if self._before else (), process.ignore)
        try:
            with process.handling(ignored):
                return super().__exit__(*error)
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def of(self, trainer: Trainer, backend: str, stage: str, root: Path | None) -> Server:
        """The server of a script. Raises NotReady where the Python cannot import it."""
        key = (trainer.python, backend, stage, root)
        if key not in self._open:
            self._open[key] = self.enter_context(Server(trainer, backend, stage, root))
        return self._open[key]


def described(refusal: Mapping[str, Any]) -> str:
    """What an exception says, in one line, with the place in the library that raised it."""
    kind = refusal["type"]
    message = " ".join(str(refusal["message"]).split())
    plain = kind in {"SystemExit", "Refused", "KeyError"}
    text = message if plain else f"{kind}: {message}"
    place = f" ({refusal['file']}:{refusal['line']})" if refusal.get("file") and not plain else ""
    return f"{text[:600]}{place}"


def crash(answer: Mapping[str, Any], log: str) -> Finding:
    """A finding about a process that ended without an answer."""
    stack = [line.strip() for line in str(answer["stack"]).splitlines() if "File" in line]
    where = f"; it was in {stack[0]}" if stack else ""
    name, code = "rehearsal-crash", answer["ended"]
    if answer["hung"]:
        name, what = "rehearsal-hangs", f"the training script does not come to an end in {LIMIT_S:.0f} s"
    elif isinstance(code, int) and code < 0:
        what = f"the training script's process was ended by {signal.Signals(-code).name}"
    else:
        what = f"the training script's process ended with {code}"
    printed = log.strip().splitlines()
    help = f"its last line: {printed[-1].strip()[:200]}" if printed else None
    return Finding(severity="error", layer="trainer", code=name, message=what + where, help=help)
