"""A process under the trainer's Python that works with a model: requests to it, events from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

from launcher.errors import NotReady, not_ready, shorten
from launcher.machine import isolation
from launcher.machine.python import Trainer
from launcher.paths import PACKAGE
from launcher.printable import make_printable

SCRIPT = PACKAGE / "probe" / "models" / "run.py"
_ENDS_S = 10.0
"""Seconds that the process may take to end once its stdin is closed."""
_LOG_BYTES = 4000
_CODES = {
    "quantised-base": "name the unquantised model with --base MODEL",
    "not-mergeable": None,
    "template-refuses": "leave out --system, or see what the template takes",
    "too-long-prompt": "shorten it, or begin anew with /new",
}
"""What to do about what `probe/models` refuses."""


def build_environment(
    environ: Mapping[str, str], *, devices: str | None, cpu: bool
) -> dict[str, str]:
    """The environment of a worker: the user's, without launch's variables for training."""
    kept = {name: value for name, value in environ.items() if not name.startswith("LAUNCH_")}
    inside = isolation.isolate(kept)
    inside |= {
        "PYTHONDONTWRITEBYTECODE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if devices is not None:
        inside["CUDA_VISIBLE_DEVICES"] = devices
    if cpu:
        inside["CUDA_VISIBLE_DEVICES"] = ""
    return inside


class Worker:
    """A context manager that runs the process; Ctrl-C in the terminal does not reach it."""

    def __init__(
        self,
        trainer: Trainer,
        task: str,
        settings: Mapping[str, object],
        environ: Mapping[str, str],
    ) -> None:
        self._trainer = trainer
        self._task = task
        self._settings = settings
        self._environ = environ

    def __enter__(self) -> Worker:
        self._log: IO[bytes] = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [str(self._trainer.python), "-u", str(SCRIPT), self._task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=dict(self._environ),
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._log.close()
            message = f"{self._trainer.python} cannot be started: {error.strerror}"
            raise not_ready(
                "no-python", message, "name the trainer's Python with --python PATH"
            ) from None
        self.send(self._settings)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_ENDS_S if kind is None else 0)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._log.close()

    def send(self, request: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        # if the process has ended, reading its answer raises
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def kill(self) -> None:
        """End the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def interrupt(self) -> None:
        """End the answer that is being generated."""
        self._process.send_signal(signal.SIGINT)

    def events(self, *last: str) -> Iterator[dict[str, Any]]:
        """The events of the process, up to the first with one of the names `last`.

        Raises NotReady if it fails, or ends before that.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event: dict[str, Any] = json.loads(line)
            except ValueError:
                # the process was ended within a line
                break
            if event["event"] == "failed":
                raise self._explain_failure(event)
            yield event
            if event["event"] in last:
                return
        raise self._explain_exit()

    def wait_for(self, name: str) -> dict[str, Any]:
        """The next event of that name."""
        *_, event = self.events(name)
        return event

    def _explain_failure(self, event: Mapping[str, Any]) -> NotReady:
        code = event["code"]
        if code in _CODES:
            return not_ready(code, event["message"], _CODES[code])
        if event["out_of_memory"]:
            help = "--devices names other GPUs, --cpu uses none"
            return not_ready(
                "model-out-of-memory",
                f"the model does not fit: {_shorten_to_line(event['message'])}",
                help,
            )
        text = f"{event['type']}: {_shorten_to_line(event['message'])}"
        return not_ready("model-fails", f"{self._trainer.python}: {text}", self._quote_last_line())

    def _explain_exit(self) -> NotReady:
        self.kill()
        returncode = self._process.wait()
        how = f"ended with {returncode}"
        if returncode < 0:
            how = f"was ended by {signal.Signals(-returncode).name}"
        return not_ready(
            "model-fails", f"the process that had loaded the model {how}", self._quote_last_line()
        )

    def _quote_last_line(self) -> str | None:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LOG_BYTES))
        lines = self._log.read().decode(errors="replace").split("\n")
        printed = [line.strip() for line in lines if line.strip()]
        if not printed:
            return None
        return f"its last line: {shorten(make_printable(printed[-1]), 200)}"


def _shorten_to_line(text: str) -> str:
    return shorten(" ".join(text.split()), 600)
