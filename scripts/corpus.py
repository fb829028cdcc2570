"""Make the logs of tests/corpus that need no GPU anew: each case really runs, and breaks as its name says.

usage: python scripts/corpus.py DIR [NAME...]

DIR/NAME.log            what the console showed, paths shortened
DIR/NAME.rank-N.jsonl   what the probe saw meanwhile: the ground truth of tests/corpus/truth.yaml
DIR/work                assets, caches, models; may be removed

Without names all cases are made, some 20 s each. Needs the packages of TRL and of open-instruct, the
pinned checkout in LAUNCH_OPEN_INSTRUCT or ~/open-instruct, for the cases with Liger a folder with
liger-kernel and triton in CORPUS_LIGER (its kernels run in triton's interpreter), for the full disk the
right to mount a tmpfs, and for a terminal's log `script`; for the cases of older releases of TRL the
folder in CORPUS_TRL_0_12 or CORPUS_TRL_0_20 into which pip has put one with its transformers, tokenizers,
huggingface_hub, accelerate, peft, datasets and fsspec. No weights are fetched and no network is asked.
The logs of GPU machines in tests/corpus (h200_*) are not made by this script.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LAUNCHER = REPOSITORY / "launcher"
CHECKOUT = Path(os.environ.get("LAUNCH_OPEN_INSTRUCT") or "~/open-instruct").expanduser()
SITE = Path(sysconfig.get_path("purelib"))
LIMIT_S = 300
POLL_S = 0.05

SCRIPTS: Mapping[tuple[str, str], Path] = {
    ("open_instruct", "sft"): CHECKOUT / "open_instruct/finetune.py",
    ("open_instruct", "dpo"): CHECKOUT / "open_instruct/dpo_tune_cache.py",
    ("trl", "sft"): SITE / "trl/scripts/sft.py",
    ("trl", "dpo"): SITE / "trl/scripts/dpo.py",
}
Value = str | int | float | bool | Sequence[str] | None
ARGUMENTS: Mapping[tuple[str, str], Mapping[str, Value]] = {
    ("open_instruct", "sft"): {
        "model_name_or_path": "assets/model", "chat_template_name": "tulu",
        "dataset_mixer_list": ("assets/data/sft/train.jsonl", "64"),
        "dataset_local_cache_dir": "cache", "max_seq_length": 256, "output_dir": "out",
        "do_not_randomize_output_dir": True, "learning_rate": 5e-3, "warmup_ratio": 0.1,
        "max_train_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1, "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
    },
    ("open_instruct", "dpo"): {
        "model_name_or_path": "assets/model", "chat_template_name": "tulu",
        "mixer_list": ("assets/data/dpo/train.jsonl", "48"), "local_cache_dir": "cache",
        "max_seq_length": 256, "output_dir": "out", "do_not_randomize_output_dir": True,
        "learning_rate": 5e-4, "warmup_ratio": 0.2, "max_train_steps": 4,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
    },
    ("trl", "sft"): {
        "model_name_or_path": "assets/model", "dataset_name": "assets/data/sft", "output_dir": "out",
        "learning_rate": 5e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 12,
        "bf16": False, "gradient_checkpointing": False, "logging_steps": 2, "save_strategy": "no",
        "per_device_train_batch_size": 8, "use_cpu": True,
    },
    ("trl", "dpo"): {
        "model_name_or_path": "assets/model", "dataset_name": "assets/data/dpo", "output_dir": "out",
        "learning_rate": 5e-4, "warmup_steps": 2, "max_steps": 8, "bf16": False,
        "gradient_checkpointing": False, "logging_steps": 2, "save_strategy": "no",
        "per_device_train_batch_size": 4, "use_cpu": True,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """When the log shows `seen`, a signal: to `launcher`, to a `rank`, or to the whole `group`."""

    seen: bytes
    number: signal.Signals
    to: str | int = "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a training is started.

    `shell` is a command line around it: `{}` is the training, `{quoted}` the same as one word, `{log}`
    the log that it must write; without one the training writes straight into the log. `guard` is a
    script around each of several workers. `older` names another release of TRL: `0_12`.
    """

    processes: int = 1
    probed: bool = True
    watch: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    unbuffered: bool = True
    shell: str | None = None
    guard: str | None = None
    older: str | None = None
    port: int | None = None
    blow: Blow | None = None


PLAIN = How()
STRANGER = How(probed=False)


@dataclass(slots=True, kw_only=True)
class Lab:
    """The folder in which one case runs: its own caches and outputs, everybody's assets."""

    root: Path
    name: str

    @property
    def folder(self) -> Path:
        """Where it runs; paths in its logs are relative to here."""
        return self.root / "work" / self.name

    @property
    def log(self) -> Path:
        """What will be the case's log."""
        return self.folder / "console.log"

    def train(self, backend: str, stage: str, how: How = PLAIN, **changed: Value) -> int:
        """Run one training to its end; it appends to the case's log. Returns its exit code."""
        arguments = {**ARGUMENTS[backend, stage], **changed}
        script = SCRIPTS[backend, stage] if how.older is None else _older_script(how.older, stage)
        before = len(self.log.read_bytes()) if self.log.exists() else 0
        argv = [
            *self._starter(how),
            *_guarded(how.guard),
            str(LAUNCHER / "probe.py" if how.probed else script),
        ]
        argv += _words(arguments)
        environment = {**os.environ, **self._environment(backend, stage, script, how), **how.env}
        command: Sequence[str] = argv
        if how.shell is not None:
            command = ("bash", "-c", _shell(how.shell, argv, self.log))
        with self.log.open("ab") as console:
            child = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=console,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                self._watch(child, how.blow, before)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        return child.wait()

    def sft(self, how: How = PLAIN, **changed: Value) -> int:
        """An SFT of open-instruct."""
        return self.train("open_instruct", "sft", how, **changed)

    def dpo(self, how: How = PLAIN, **changed: Value) -> int:
        """A DPO of open-instruct."""
        return self.train("open_instruct", "dpo", how, **changed)

    def trl_sft(self, how: How = PLAIN, **changed: Value) -> int:
        """An SFT of TRL."""
        return self.train("trl", "sft", how, **changed)

    def trl_dpo(self, how: How = PLAIN, **changed: Value) -> int:
        """A DPO of TRL."""
        return self.train("trl", "dpo", how, **changed)

    def forget(self) -> None:
        """What was run until now only prepared the case."""
        self.log.unlink()
        shutil.rmtree(self.folder / "probe", ignore_errors=True)

    def rows(self, kind: str, rows: Sequence[object]) -> str:
        """Own training data; returns its path."""
        path = self.folder / "data" / kind / "train.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path.relative_to(self.folder))

    def some_rows(self, kind: str) -> list[dict[str, object]]:
        """The first rows of the assets."""
        lines = (self.folder / "assets/data" / kind / "train.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines[:64]]

    def _starter(self, how: How) -> list[str]:
        if how.processes > 1:  # accelerate starts several processes on CPUs through MPI only
            words = ["-m", "torch.distributed.run", "--nproc_per_node", str(how.processes)]
            return [sys.executable, *words, "--master_port", str(how.port or _free_port())]
        words = [
            "-m",
            "accelerate.commands.launch",
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
        ]
        return [sys.executable, *words, "--dynamo_backend", "no", "--cpu", "--num_processes", "1"]

    def _environment(self, backend: str, stage: str, script: Path, how: How) -> dict[str, str]:
        env = {
            "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(self.folder / "datasets"),
            "HF_HOME": str(self.folder / "hub"), "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "REFERENCE_LOGPROBS_CACHE_PATH": str(self.folder / "reference"),
        }  # fmt: skip
        paths = [str(CHECKOUT)] if backend == "open_instruct" else []
        if how.older is not None:
            paths = [_site(self, _WITHOUT), os.environ[f"CORPUS_TRL_{how.older}"]]
        env["PYTHONPATH"] = os.pathsep.join(paths)
        if how.unbuffered:
            env["PYTHONUNBUFFERED"] = "1"
        if how.probed:
            watch: dict[str, object] = {
                "target": str(script), "out": str(self.folder / "probe"), "cpu": True,
                "backend": backend, "stage": stage, "on_violation": "warn", **how.watch,
            }  # fmt: skip
            env["LAUNCH_PROBE"] = json.dumps(watch)
        return env

    def _watch(self, child: subprocess.Popen[bytes], blow: Blow | None, before: int) -> None:
        until = time.monotonic() + LIMIT_S
        while child.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError(f"{self.name}: did not end within {LIMIT_S} s")
            if blow is not None and blow.seen in self.log.read_bytes()[before:]:
                self._strike(child, blow)
                blow = None
            time.sleep(POLL_S)

    def _strike(self, child: subprocess.Popen[bytes], blow: Blow) -> None:
        if blow.to == "group":
            os.killpg(child.pid, blow.number)
            for rank in (self.folder / "probe").glob("rank-*.jsonl"):  # torchrun's are elsewhere
                with contextlib.suppress(ProcessLookupError):
                    os.kill(_pid(rank), blow.number)
        elif blow.to == "launcher":
            os.kill(child.pid, blow.number)
        else:
            os.kill(_pid(self.folder / "probe" / f"rank-{blow.to}.jsonl"), blow.number)


def _shell(template: str, argv: Sequence[str], log: Path) -> str:
    words = shlex.join(argv)
    return template.format(words, quoted=shlex.quote(words), log=shlex.quote(str(log)))


def _guarded(guard: str | None) -> list[str]:
    return [] if guard is None else ["--no-python", "bash", "-c", guard, sys.executable]


def _pid(record: Path) -> int:
    """The process that wrote a record last."""
    events = [json.loads(line) for line in record.read_text().splitlines()]
    return int([e for e in events if e["event"] == "start"][-1]["pid"])


def _words(arguments: Mapping[str, Value]) -> list[str]:
    words: list[str] = []
    for name, value in arguments.items():
        if value is None:
            continue
        words.append(f"--{name}")
        words += (
            map(str, value)
            if isinstance(value, Sequence) and not isinstance(value, str)
            else [str(value)]
        )
    return words


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# --- the cases ------------------------------------------------------------------------------------

CASES: dict[str, Callable[[Lab], object]] = {}


def case(make: Callable[[Lab], object]) -> Callable[[Lab], object]:
    """Register a case under its function's name."""
    CASES[make.__name__] = make
    return make


def _with_liger(lab: Lab) -> dict[str, str]:
    """Liger's kernels in triton's interpreter, which has no libdevice: an own rsqrt stands in."""
    own = lab.folder / "interpreted"
    own.mkdir()
    (own / "sitecustomize.py").write_text(_RSQRT)
    paths = [str(CHECKOUT), str(own), os.environ.get("CORPUS_LIGER", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_INTERPRET": "1"}


@case
def sft_miss(lab: Lab) -> None:
    lab.sft()


@case
def sft_hit(lab: Lab) -> None:
    lab.sft()
    lab.forget()
    lab.sft()


@case
def sft_packing(lab: Lab) -> None:
    lab.sft(How(watch={"packed": True}), packing=True)


@case
def sft_liger(lab: Lab) -> None:
    lab.sft(How(env=_with_liger(lab)), use_liger_kernel=True, **_SMALL)


@case
def sft_liger_unsupported(lab: Lab) -> None:
    _gpt2(lab)
    lab.sft(How(env=_with_liger(lab)), use_liger_kernel=True, model_name_or_path="gpt2-model")


@case
def sft_liger_missing(lab: Lab) -> None:
    lab.sft(use_liger_kernel=True)


@case
def sft_liger_fails(lab: Lab) -> None:
    env = {**_with_liger(lab), "TRITON_INTERPRET": "0"}
    lab.sft(How(env=env), use_liger_kernel=True)


@case
def sft_logs_nothing(lab: Lab) -> None:
    lab.sft(logging_steps=None)


@case
def sft_accumulated(lab: Lab) -> None:
    lab.sft(
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        logging_steps=2,
        max_train_steps=6,
    )


@case
def sft_lora(lab: Lab) -> None:
    lab.sft(use_lora=True, lora_rank=4)


@case
def sft_nan(lab: Lab) -> None:
    lab.sft(learning_rate=1e30, lr_scheduler_type="constant", warmup_ratio=0.0, max_train_steps=6)


@case
def sft_nan_stopped(lab: Lab) -> None:
    how = How(watch={"on_violation": "stop", "expect": {"loss": "finite"}})
    lab.sft(how, learning_rate=1e30, lr_scheduler_type="constant", warmup_ratio=0.0)


@case
def sft_broken_row(lab: Lab) -> None:
    rows = [*lab.some_rows("sft")[:40], {"id": "broken", "messages": None}]
    lab.sft(dataset_mixer_list=(lab.rows("broken", rows), "1.0"))


@case
def sft_missing_column(lab: Lab) -> None:
    rows = [{"id": row["id"], "conversation": row["messages"]} for row in lab.some_rows("sft")]
    lab.sft(dataset_mixer_list=(lab.rows("column", rows), "1.0"))


@case
def sft_missing_model(lab: Lab) -> None:
    lab.sft(model_name_or_path="assets/no-such-model")


@case
def sft_host_oom(lab: Lab) -> None:
    how = How(shell="ulimit -v 9000000; exec {}")
    lab.sft(how, per_device_train_batch_size=60, max_seq_length=1024, model_name_or_path=_wide(lab),
            dataset_mixer_list=("assets/data/sft/train.jsonl", "1.0"))  # fmt: skip


@case
def sft_disk_full(lab: Lab) -> None:
    with _small_disk(lab) as disk:
        lab.sft(output_dir=f"{disk}/out")


@case
def sft_killed(lab: Lab) -> None:
    lab.sft(How(blow=Blow(seen=b"Step: 3,", number=signal.SIGKILL)), max_train_steps=40)


@case
def sft_trainer_killed(lab: Lab) -> None:
    lab.sft(How(blow=Blow(seen=b"Step: 3,", number=signal.SIGKILL, to=0)), max_train_steps=40)


@case
def sft_sigterm(lab: Lab) -> None:
    lab.sft(How(processes=2, blow=Blow(seen=b"Step: 3,", number=signal.SIGTERM, to="launcher")),
            max_train_steps=40)  # fmt: skip


@case
def sft_sigterm_alone(lab: Lab) -> None:
    lab.sft(How(blow=Blow(seen=b"Step: 3,", number=signal.SIGTERM)), max_train_steps=40)


@case
def sft_sigint(lab: Lab) -> None:
    lab.sft(How(blow=Blow(seen=b"Step: 3,", number=signal.SIGINT)), max_train_steps=40)


@case
def sft_port_in_use(lab: Lab) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        lab.sft(How(processes=2, port=int(other.getsockname()[1])))


@case
def sft_two_ranks(lab: Lab) -> None:
    lab.sft(How(processes=2))


@case
def sft_two_ranks_teed(lab: Lab) -> None:
    shell = "{} 2>&1 | tee -a {log} > /dev/null"
    lab.sft(How(processes=2, shell=shell, unbuffered=False))


@case
def sft_rank_killed(lab: Lab) -> None:
    lab.sft(How(processes=2, blow=Blow(seen=b"Step: 3,", number=signal.SIGKILL, to=1)),
            max_train_steps=40)  # fmt: skip


@case
def sft_rank_dies(lab: Lab) -> None:
    """Rank 1 alone may not have much memory."""
    guard = 'if [ "$LOCAL_RANK" = 1 ]; then ulimit -v 5000000; fi; exec "$0" "$@"'
    lab.sft(How(processes=2, guard=guard), model_name_or_path=_wide(lab),
            per_device_train_batch_size=16)  # fmt: skip


@case
def sft_resumed(lab: Lab) -> None:
    _interrupted(lab)
    lab.forget()
    lab.sft(max_train_steps=6, checkpointing_steps="2")


@case
def sft_attempts_in_one_log(lab: Lab) -> None:
    _interrupted(lab)
    lab.sft(max_train_steps=6, checkpointing_steps="2")


@case
def sft_second_attempt_crashes(lab: Lab) -> None:
    lab.sft()
    lab.sft(model_name_or_path="assets/no-such-model")


@case
def sft_checkpoints(lab: Lab) -> None:
    lab.sft(max_train_steps=6, checkpointing_steps="2", keep_last_n_checkpoints=1)


@case
def sft_stopped_after_checkpoint(lab: Lab) -> None:
    _interrupted(lab)


@case
def sft_abbreviated(lab: Lab) -> None:
    lab.sft(learning_rat=1e-5)


@case
def sft_refused(lab: Lab) -> None:
    lab.sft(lerning_rate=1e-5)


@case
def sft_refused_value(lab: Lab) -> None:
    lab.sft(max_train_steps="four")


@case
def sft_refused_dataclass(lab: Lab) -> None:
    lab.sft(dataset_name="some/set")


@case
def sft_without_probe(lab: Lab) -> None:
    lab.sft(How(probed=False, unbuffered=False, shell="{} 2>&1 | tee -a {log} > /dev/null"))


@case
def dpo_without_probe(lab: Lab) -> None:
    lab.dpo(How(probed=False))


@case
def sft_tracebacks_as_data(lab: Lab) -> None:
    rows = lab.some_rows("sft")
    for row in rows:
        row["messages"] = [
            {"role": "user", "content": "My training says this. " + _HORRORS},
            {"role": "assistant", "content": _HORRORS + "It ran out of memory."},
        ]
    lab.sft(dataset_mixer_list=(lab.rows("horrors", rows), "1.0"), max_seq_length=1024)


@case
def sft_terminal(lab: Lab) -> None:
    lab.sft(How(shell="script -qefc {quoted} /dev/null >> {log}"))


@case
def sft_nohup(lab: Lab) -> None:
    lab.sft(How(shell="nohup {} >> {log} 2>&1", unbuffered=False))


@case
def sft_cache_only(lab: Lab) -> None:
    lab.sft(cache_dataset_only=True)


@case
def sft_still_running(lab: Lab) -> None:
    """What the log is while the run goes on: copied out of a run that then ended well."""
    lab.sft(max_train_steps=8)
    content = lab.log.read_bytes()
    at = content.index(b"Step: 5,")
    lab.log.write_bytes(content[: at + 20])


@case
def dpo_miss(lab: Lab) -> None:
    lab.dpo(How(watch={"first_loss": math.log(2)}))


@case
def dpo_hit(lab: Lab) -> None:
    lab.dpo()
    lab.forget()
    lab.dpo(How(watch={"first_loss": math.log(2)}))


@case
def dpo_packing(lab: Lab) -> None:
    lab.dpo(How(watch={"packed": True}), packing=True)


@case
def dpo_liger(lab: Lab) -> None:
    lab.dpo(How(env=_with_liger(lab)), use_liger_kernel=True, **_SMALL,
            mixer_list=("assets/data/dpo/train.jsonl", "4"))  # fmt: skip


@case
def dpo_stale_stopped(lab: Lab) -> None:
    _other_reference(lab)
    how = How(watch={"first_loss": math.log(2), "on_violation": "stop"})
    lab.dpo(how, model_name_or_path="mine")


@case
def dpo_stale_unseen(lab: Lab) -> None:
    """Nobody looks: the log of a run on a stale cache is that of a good one."""
    _other_reference(lab)
    lab.dpo(How(watch={"first_loss": math.log(2)}), model_name_or_path="mine")


@case
def dpo_two_ranks(lab: Lab) -> None:
    lab.dpo(How(processes=2), per_device_train_batch_size=4)


@case
def dpo_nan(lab: Lab) -> None:
    lab.dpo(learning_rate=1e30, lr_scheduler_type="constant", warmup_ratio=0.0, max_train_steps=6)


@case
def dpo_killed_in_reference(lab: Lab) -> None:
    lab.dpo(How(blow=Blow(seen=b"Caching reference logprobs:  ", number=signal.SIGKILL, to=0)))


@case
def dpo_sft_data(lab: Lab) -> None:
    lab.dpo(mixer_list=("assets/data/sft/train.jsonl", "48"))


@case
def trl_sft(lab: Lab) -> None:
    lab.trl_sft()


@case
def trl_sft_packing(lab: Lab) -> None:
    lab.trl_sft(
        How(watch={"packed": True}),
        packing=True,
        packing_strategy="bfd",
        max_length=256,
        max_steps=6,
    )


@case
def trl_sft_lora(lab: Lab) -> None:
    lab.trl_sft(use_peft=True, lora_r=4, lora_target_modules=("q_proj", "v_proj"))


@case
def trl_sft_liger(lab: Lab) -> None:
    env = _with_liger(lab)
    lab.trl_sft(How(env=env), use_liger_kernel=True, max_steps=2, logging_steps=1, max_length=48,
                per_device_train_batch_size=1)  # fmt: skip


@case
def trl_sft_eval(lab: Lab) -> None:
    rows = lab.some_rows("sft")
    lab.rows("split", rows)
    (lab.folder / "data/split/test.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows[:16])
    )
    lab.trl_sft(dataset_name="data/split", eval_strategy="steps", eval_steps=4)


@case
def trl_sft_resumed(lab: Lab) -> None:
    lab.trl_sft(How(blow=Blow(seen=b"'epoch': '0.05333'", number=signal.SIGKILL)), save_strategy="steps",
                save_steps=4)  # fmt: skip
    lab.forget()
    last = max((lab.folder / "out").glob("checkpoint-*"), key=lambda p: int(p.name[11:]))
    lab.trl_sft(save_strategy="steps", save_steps=4, resume_from_checkpoint=f"out/{last.name}")


@case
def trl_sft_interrupted(lab: Lab) -> None:
    lab.trl_sft(How(blow=Blow(seen=b"'epoch': '0.05333'", number=signal.SIGINT)), max_steps=200)


@case
def trl_sft_nan(lab: Lab) -> None:
    lab.trl_sft(learning_rate=1e30, lr_scheduler_type="constant", warmup_steps=0)


@case
def trl_sft_nan_unfiltered(lab: Lab) -> None:
    lab.trl_sft(learning_rate=1e30, lr_scheduler_type="constant", warmup_steps=0,
                logging_nan_inf_filter=False)  # fmt: skip


@case
def trl_sft_crash(lab: Lab) -> None:
    rows = [{"id": row["id"], "conversation": row["messages"]} for row in lab.some_rows("sft")]
    lab.rows("column", rows)
    lab.trl_sft(dataset_name="data/column")


@case
def trl_sft_two_ranks(lab: Lab) -> None:
    lab.trl_sft(How(processes=2, unbuffered=False, shell="{} 2>&1 | tee -a {log} > /dev/null"))


@case
def trl_sft_buffered(lab: Lab) -> None:
    lab.trl_sft(How(unbuffered=False, shell="{} >> {log} 2>&1"))


@case
def trl_sft_no_bar(lab: Lab) -> None:
    lab.trl_sft(disable_tqdm=True)


@case
def trl_sft_refused(lab: Lab) -> None:
    lab.trl_sft(lerning_rate=1e-5)


@case
def trl_sft_refused_value(lab: Lab) -> None:
    lab.trl_sft(lr_scheduler_type="cosinus")


@case
def trl_dpo(lab: Lab) -> None:
    lab.trl_dpo()


@case
def trl_dpo_precomputed(lab: Lab) -> None:
    lab.trl_dpo(precompute_ref_log_probs=True)


@case
def trl_dpo_killed(lab: Lab) -> None:
    lab.trl_dpo(How(blow=Blow(seen=b" 4/40 [", number=signal.SIGKILL, to=0)), max_steps=40)


@case
def trl_dpo_terminal(lab: Lab) -> None:
    lab.trl_dpo(How(shell="script -qefc {quoted} /dev/null >> {log}"))


# --- what strangers' logs look like ----------------------------------------------------------------


@case
def trl_sft_begun_again(lab: Lab) -> None:
    """A good run, and behind it in the same file another one that came to no step."""
    nohup = "nohup {} >> {log} 2>&1"
    lab.trl_sft(How(probed=False, shell=nohup))
    blow = Blow(seen=b"get_accelerator", number=signal.SIGKILL)
    lab.trl_sft(How(probed=False, shell=nohup, blow=blow))


@case
def trl_sft_crash_then_good(lab: Lab) -> None:
    how = How(probed=False, unbuffered=False, shell="nohup {} >> {log} 2>&1")
    lab.trl_sft(how, dataset_name="assets/data/none")
    lab.trl_sft(how)


@case
def trl_dpo_interrupted_then_resumed(lab: Lab) -> None:
    blow = Blow(seen=b" 7/40 [", number=signal.SIGINT)
    lab.trl_dpo(How(probed=False, blow=blow), save_strategy="steps", save_steps=3, max_steps=40)
    last = max((lab.folder / "out").glob("checkpoint-*"), key=lambda p: int(p.name[11:]))
    lab.trl_dpo(
        STRANGER, save_strategy="steps", save_steps=3, resume_from_checkpoint=f"out/{last.name}"
    )


@case
def trl_dpo_disk_full(lab: Lab) -> None:
    with _small_disk(lab) as disk:
        lab.trl_dpo(STRANGER, output_dir=f"{disk}/out")


@case
def trl_sft_file_limit(lab: Lab) -> None:
    lab.trl_sft(How(probed=False, shell="ulimit -f 1500; {}"))


@case
def trl_sft_rank_killed(lab: Lab) -> None:
    blow = Blow(seen=b" 5/40 [", number=signal.SIGKILL, to=1)
    lab.trl_sft(How(processes=2, blow=blow), max_steps=40)


@case
def trl_sft_segfault(lab: Lab) -> None:
    _as_job(lab, _site(lab, _SEGFAULT), max_steps=40)


@case
def trl_sft_terminated(lab: Lab) -> None:
    _as_job(lab, _site(lab, _TERMINATED), max_steps=40)


@case
def trl_sft_typescript(lab: Lab) -> None:
    shell = "script -ec {quoted} {log}.ts; cat {log}.ts >> {log}"
    lab.trl_sft(How(probed=False, shell=shell, env={"FORCE_COLOR": "1", "TERM": "xterm-256color"}))


@case
def trl_sft_import_error(lab: Lab) -> None:
    broken = lab.folder / "broken"
    (broken / "peft").mkdir(parents=True)
    (broken / "peft/__init__.py").write_text("from peft_missing import nothing\n")
    lab.trl_sft(How(probed=False, env={"PYTHONPATH": str(broken)}))


@case
def trl_sft_workers_raise(lab: Lab) -> None:
    bad = {"id": "broken", "messages": [{"role": None, "content": 3}]}
    lab.rows("broken", [*lab.some_rows("sft"), bad])
    lab.trl_sft(STRANGER, dataset_name="data/broken", dataset_num_proc=2)


@case
def trl_sft_odd_logging(lab: Lab) -> None:
    lab.trl_sft(STRANGER, max_steps=13, logging_steps=5, logging_first_step=True,
                save_strategy="steps", save_steps=6)  # fmt: skip


@case
def trl_sft_wandb_offline(lab: Lab) -> None:
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(lab.folder)}
    lab.trl_sft(How(probed=False, env=env), report_to="wandb")


@case
def trl_sft_nan_no_norm(lab: Lab) -> None:
    lab.trl_sft(STRANGER, learning_rate=1e30, lr_scheduler_type="constant", warmup_steps=0,
                max_grad_norm=0)  # fmt: skip


@case
def trl_dpo_nan(lab: Lab) -> None:
    lab.trl_dpo(STRANGER, learning_rate=1e30, lr_scheduler_type="constant", warmup_steps=0)


@case
def trl_sft_cut_in_row(lab: Lab) -> None:
    """What the log is while the run goes on: cut in the middle of a row."""
    lab.trl_sft(STRANGER)
    content = lab.log.read_bytes()
    lab.log.write_bytes(content[: content.index(b"'epoch': '0.05333'") - 40])


@case
def trl_sft_harmless_tracebacks(lab: Lab) -> None:
    lab.trl_sft(How(probed=False, env={"PYTHONPATH": _site(lab, _HARMLESS)}))


@case
def trl_sft_then_used(lab: Lab) -> None:
    (lab.folder / "use.py").write_text(_USE)
    lab.trl_sft(
        How(probed=False, shell=f"{{}} >> {{log}} 2>&1; {sys.executable} use.py >> {{log}} 2>&1")
    )


@case
def trl_sft_job_fails(lab: Lab) -> None:
    _as_job(lab, "", model_name_or_path="assets/none")


@case
def trl_sft_rich_traceback(lab: Lab) -> None:
    rows = [{"id": row["id"], "conversation": row["messages"]} for row in lab.some_rows("sft")]
    lab.rows("column", rows)
    site = _site(lab, "from rich import traceback\ntraceback.install(width=100)\n")
    lab.trl_sft(How(probed=False, env={"PYTHONPATH": site}), dataset_name="data/column")


@case
def trl_sft_faulthandler(lab: Lab) -> None:
    _as_job(
        lab, _site(lab, "import faulthandler\nfaulthandler.enable()\n" + _SEGFAULT), max_steps=40
    )


@case
def trl_sft_deepspeed_launcher(lab: Lab) -> None:
    words = _words({**ARGUMENTS["trl", "sft"], "max_steps": 40})
    train = shlex.join(["deepspeed", "--num_gpus", "1", str(SCRIPTS["trl", "sft"]), *words])
    env = {
        "PYTHONPATH": _site(lab, _RANK_KILLED),
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    lab.trl_sft(How(probed=False, shell=f"{train} >> {{log}} 2>&1", env=env))


@case
def trl_sft_refused_twice(lab: Lab) -> None:
    how = How(probed=False, shell="{} >> {log} 2>&1")
    lab.trl_sft(how, lr_scheduler_type="cosinus")
    lab.trl_sft(how, bf16="s")


@case
def trl_sft_own_script(lab: Lab) -> None:
    _own(lab, 'trainer.save_model()\nprint("Done. Model saved to out")\n')


@case
def trl_sft_info(lab: Lab) -> None:
    _own(lab, "trainer.save_model()\n", 'log_level="info", ')


@case
def trl_sft_indented(lab: Lab) -> None:
    _own(lab, "    trainer.save_model()\n")


@case
def trl_sft_tail(lab: Lab) -> None:
    trl_sft_crash(lab)
    lines = lab.log.read_bytes().splitlines(keepends=True)
    lab.log.write_bytes(b"".join(lines[-18:]))


@case
def trl_sft_killed_in_evaluation(lab: Lab) -> None:
    rows = lab.some_rows("sft")
    lab.rows("split", rows)
    test = "".join(json.dumps(row) + "\n" for row in rows * 16)
    (lab.folder / "data/split/test.jsonl").write_text(test)
    lab.trl_sft(
        How(probed=False, blow=Blow(seen=b" 9/128 [", number=signal.SIGKILL)),
        dataset_name="data/split", eval_strategy="steps", eval_steps=6, logging_steps=1, max_steps=40,
    )  # fmt: skip


@case
def trl_sft_wandb_output(lab: Lab) -> None:
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(lab.folder)}
    lab.trl_sft(How(probed=False, env=env), report_to="wandb", logging_steps=5, max_steps=40)
    (output,) = lab.folder.glob("wandb/offline-run-*/files/output.log")
    lab.log.write_bytes(output.read_bytes())


@case
def trl_sft_hub_limit(lab: Lab) -> None:
    _without_hub(lab, 429)


@case
def trl_sft_hub_forbidden(lab: Lab) -> None:
    _without_hub(lab, 403)


@case
def trl_reward(lab: Lab) -> None:
    words = _words({**ARGUMENTS["trl", "dpo"], "max_steps": 12})
    script = SCRIPTS["trl", "dpo"].with_name("reward.py")
    train = shlex.join([sys.executable, str(script), *words])
    lab.trl_dpo(How(probed=False, shell=f"{train} >> {{log}} 2>&1"))


@case
def trl_sft_hangup(lab: Lab) -> None:
    blow = Blow(seen=b" 5/40 [", number=signal.SIGHUP, to="launcher")
    lab.trl_sft(How(processes=2, probed=False, blow=blow), max_steps=40)


@case
def trl_sft_packing_stdout(lab: Lab) -> None:
    lab.trl_sft(How(probed=False, shell="{} >> {log} 2> errors"), packing=True, max_length=256)


@case
def trl_sft_stderr(lab: Lab) -> None:
    lab.trl_sft(How(probed=False, shell="{} 2>> {log} > steps"))


@case
def trl_sft_without_bars(lab: Lab) -> None:
    lab.trl_sft(How(probed=False, shell="{} 2>&1 | grep -v it/s >> {log}"))


@case
def trl_sft_then_dpo(lab: Lab) -> None:
    how = How(probed=False, shell="{} >> {log} 2>&1")
    lab.trl_sft(how)
    lab.trl_dpo(how, model_name_or_path="out", output_dir="preferred")


@case
def trl_sft_damaged_model(lab: Lab) -> None:
    damaged = lab.folder / "damaged"
    shutil.copytree(lab.folder / "assets/model", damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 14])
    lab.trl_sft(STRANGER, model_name_or_path="damaged")


@case
def trl_sft_refused_after_end(lab: Lab) -> None:
    how = How(probed=False, shell="{} >> {log} 2>&1")
    lab.trl_sft(how)
    lab.trl_sft(how, bf16="s")


@case
def hf_classifier(lab: Lab) -> None:
    (lab.folder / "train.py").write_text(_CLASSIFIER)
    lab.trl_sft(How(probed=False, shell=f"{sys.executable} train.py >> {{log}} 2>&1"))


@case
def sft_no_script(lab: Lab) -> None:
    shell = (
        f"{sys.executable} -m accelerate.commands.launch --cpu open_instruct/finetune.py --seed 1"
    )
    lab.sft(How(probed=False, shell=f"{shell} >> {{log}} 2>&1"))


@case
def sft_odd_logging(lab: Lab) -> None:
    lab.sft(How(unbuffered=False, shell="{} 2>&1 | tee -a {log} > /dev/null"),
            max_train_steps=7, logging_steps=3)  # fmt: skip


@case
def sft_interrupted_at_import(lab: Lab) -> None:
    lab.sft(How(blow=Blow(seen=b"WARNING", number=signal.SIGINT)))


@case
def sft_rank_hangs(lab: Lab) -> None:
    blow = Blow(seen=b"Step: 3,", number=signal.SIGSTOP, to=1)
    lab.sft(How(processes=2, blow=blow), max_train_steps=40, timeout=20)


@case
def dpo_rank_missing(lab: Lab) -> None:
    guard = 'if [ "$LOCAL_RANK" = 1 ]; then sleep 120; fi; exec "$0" "$@"'
    lab.dpo(How(processes=2, guard=guard), timeout=20, per_device_train_batch_size=4)


@case
def dpo_resumed(lab: Lab) -> None:
    blow = Blow(seen=b"Step: 5,", number=signal.SIGKILL)
    lab.dpo(How(blow=blow), max_train_steps=6, checkpointing_steps="2")
    lab.forget()
    lab.dpo(max_train_steps=6, checkpointing_steps="2")


@case
def dpo_two_ranks_interrupted(lab: Lab) -> None:
    blow = Blow(seen=b"Step: 3,", number=signal.SIGINT)
    lab.dpo(How(processes=2, blow=blow), max_train_steps=40, per_device_train_batch_size=4)


@case
def trl_older_sft(lab: Lab) -> None:
    _older_assets(lab)
    lab.trl_sft(How(probed=False, older="0_12"), max_seq_length=128, report_to="none")


@case
def trl_older_dpo(lab: Lab) -> None:
    _older_assets(lab)
    lab.trl_dpo(How(probed=False, older="0_12"), report_to="none")


@case
def trl_older_epochs(lab: Lab) -> None:
    _older_assets(lab)
    rows = lab.some_rows("sft")
    lab.rows("split", rows)
    test = "".join(json.dumps(row) + "\n" for row in rows[:16])
    (lab.folder / "data/split/test.jsonl").write_text(test)
    lab.trl_sft(How(probed=False, older="0_20"), dataset_name="data/split", report_to="none",
                eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch",
                num_train_epochs=3, max_steps=-1)  # fmt: skip


@case
def trl_older_two_ranks(lab: Lab) -> None:
    _older_assets(lab)
    lab.trl_dpo(How(processes=2, probed=False, older="0_20"), report_to="none")


@case
def trl_older_nan(lab: Lab) -> None:
    """Neither the loss nor a norm of the gradient says it."""
    _older_assets(lab)
    lab.trl_sft(How(probed=False, older="0_20"), learning_rate=1e30, lr_scheduler_type="constant",
                warmup_steps=0, max_grad_norm=0, report_to="none")  # fmt: skip


@case
def trl_older_second_attempt_crashes(lab: Lab) -> None:
    _older_assets(lab)
    how = How(probed=False, unbuffered=False, older="0_20")
    lab.trl_sft(how, report_to="none")
    lab.trl_sft(how, report_to="none", dataset_name="assets/none")


# The interpreter is slow.
_SMALL: Mapping[str, Value] = {
    "max_train_steps": 2, "max_seq_length": 48, "per_device_train_batch_size": 1,
}  # fmt: skip
_RSQRT = """import os
if os.environ.get("TRITON_INTERPRET") == "1":
    import triton
    import triton.language as tl
    import triton.language.extra.libdevice as device

    @triton.jit
    def rsqrt(x):
        return 1.0 / tl.sqrt(x)

    device.rsqrt = rsqrt
"""
_HORRORS = """Traceback (most recent call last):
  File "finetune.py", line 9, in <module>
    main()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.25 GiB. GPU 1 has a total capacity of
2026-11-20 15:41:37 - INFO - finetune.py:956 -   Step: 3, LR: 1e-05, Loss: nan, TPS: 3.1
{'loss': 'nan', 'grad_norm': 'nan', 'learning_rate': '0.1', 'epoch': '0.5'}
OSError: [Errno 28] No space left on device
Killed
✅ Training completed.
"""


_WHEN = """import ctypes, os, sys, threading, time
def when(seen, act):
    def wait():
        while True:
            time.sleep(0.1)
            with open("console.log", "rb") as log:
                if seen in log.read():
                    act()
                    return
    if any(word.endswith("sft.py") for word in sys.orig_argv):
        threading.Thread(target=wait, daemon=True).start()
"""
_SEGFAULT = _WHEN + 'when(b" 5/40 [", lambda: ctypes.string_at(0))\n'
_RANK_KILLED = _WHEN + (
    'if "LOCAL_RANK" in os.environ:\n    when(b" 5/40 [", lambda: os.kill(os.getpid(), 9))\n'
)
_TERMINATED = _WHEN + 'when(b" 5/40 [", lambda: os.kill(os.getpid(), 15))\n'
_HARMLESS = """import asyncio, atexit, gc, sys, threading
class Late:
    def __del__(self):
        raise ValueError("closed")
def end():
    async def main():
        async def bad():
            raise ConnectionResetError("peer")
        task = asyncio.ensure_future(bad())
        await asyncio.sleep(0.01)
        del task
    asyncio.run(main())
    gc.collect()
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
if any(word.endswith("sft.py") for word in sys.orig_argv):
    kept = Late()
    atexit.register(end)
"""
_WITHOUT = """import sys
class Without:
    def __init__(self, inner):
        self.inner = inner
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("liger_kernel", "deepspeed"):
            return None
        return self.inner.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.inner, name)
named = lambda found: getattr(found, "__name__", "")
sys.meta_path[:] = [Without(f) if named(f) == "PathFinder" else f for f in sys.meta_path]
"""
_USE = """import transformers
model = transformers.AutoModelForCausalLM.from_pretrained("out")
tokenizer = transformers.AutoTokenizer.from_pretrained("out")
print(model.generate(**tokenizer("a", return_tensors="pt"), max_new_tokens=3))
"""


_OWN = """import datasets, trl
rows = datasets.load_dataset("json", data_files="assets/data/sft/train.jsonl", split="train")
config = trl.SFTConfig(output_dir="out", {more}max_steps=12, logging_steps=5, learning_rate=5e-3,
                       per_device_train_batch_size=8, save_strategy="no", bf16=False, use_cpu=True)
trainer = trl.SFTTrainer("assets/model", args=config, train_dataset=rows)
trainer.train()
"""


_CLASSIFIER = """import datasets
import transformers as t
tokenizer = t.AutoTokenizer.from_pretrained("assets/model")
rows = datasets.load_dataset("json", data_files="assets/data/sft/train.jsonl", split="train")
said = [tokenizer(row["messages"][0]["content"]) for row in rows]
rows = [{**told, "labels": n % 2} for n, told in enumerate(said)]
model = t.AutoModelForSequenceClassification.from_pretrained("assets/model", num_labels=2)
args = t.TrainingArguments(output_dir="out", max_steps=12, logging_steps=2, learning_rate=1e-3, use_cpu=True,
                           per_device_train_batch_size=8, save_strategy="no", report_to="none")
trainer = t.Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_model("out")
print("Model saved to out")
"""


def _own(lab: Lab, end: str, more: str = "") -> None:
    """An SFT of TRL by a script of one's own."""
    (lab.folder / "train.py").write_text(_OWN.format(more=more) + end)
    lab.trl_sft(How(probed=False, shell=f"{sys.executable} train.py >> {{log}} 2>&1"))


def _without_hub(lab: Lab, status: int) -> None:
    """A model of the hub, which answers everything with this status."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
        lab.trl_sft(How(probed=False, env=env), model_name_or_path="someone/model")
        server.shutdown()


def _site(lab: Lab, code: str) -> str:
    """A folder whose code every Python of the case runs first."""
    folder = lab.folder / "site"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return str(folder)


def _older_script(release: str, stage: str) -> Path:
    root = Path(os.environ[f"CORPUS_TRL_{release}"]) / "trl"
    return next(root.glob(f"**/scripts/{stage}.py"))


def _older_assets(lab: Lab) -> None:
    """The assets as releases before transformers 5 read them."""
    assets = lab.folder / "assets"
    where = assets.resolve()
    assets.unlink()
    shutil.copytree(where, assets)
    model = assets / "model"
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    template = (model / "chat_template.jinja").read_text()
    for word in ("{%- generation %}", "{%- endgeneration %}"):
        template = template.replace(word, "")
    tokenizer |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    config = json.loads((model / "config.json").read_text())
    del config["layer_types"], config["rope_parameters"]
    config |= {"torch_dtype": config.pop("dtype"), "rope_theta": 10000.0}
    (model / "config.json").write_text(json.dumps(config))


def _as_job(lab: Lab, site: str, **changed: Value) -> None:
    """An SFT of TRL in a job script, as a batch system runs it."""
    words = _words({**ARGUMENTS["trl", "sft"], **changed})
    train = shlex.join([sys.executable, str(SCRIPTS["trl", "sft"]), *words])
    (lab.folder / "job.sh").write_text(f"module load cuda\nnvidia-smi\n{train}\necho ended: $?\n")
    how = How(probed=False, shell="bash job.sh >> {log} 2>&1", env={"PYTHONPATH": site})
    lab.trl_sft(how)


@contextlib.contextmanager
def _small_disk(lab: Lab) -> Iterator[str]:
    """A folder of the case that holds 1 MiB."""
    disk = lab.folder / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        yield disk.name
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _interrupted(lab: Lab) -> None:
    blow = Blow(seen=b"Step: 5,", number=signal.SIGKILL)
    lab.sft(How(blow=blow), max_train_steps=6, checkpointing_steps="2")


def _other_reference(lab: Lab) -> None:
    """Reference log-probs of the SFT that stood in the same folder before."""
    lab.sft(output_dir="mine", max_train_steps=2)
    lab.dpo(model_name_or_path="mine", max_train_steps=1)
    lab.sft(output_dir="mine", max_train_steps=8)
    lab.forget()


def _gpt2(lab: Lab) -> None:
    _make(lab, "gpt2-model", "GPT2Config(vocab_size=1024, n_positions=1024, n_embd=64, n_layer=2, "
          "n_head=4, bos_token_id=2, eos_token_id=2, pad_token_id=0)")  # fmt: skip


def _wide(lab: Lab) -> str:
    """A model whose logits are large: 60 rows of 1,000 tokens."""
    _make(lab, "wide", "Qwen2Config(vocab_size=65536, hidden_size=128, intermediate_size=256, "
          "num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)")  # fmt: skip
    return "wide"


def _make(lab: Lab, name: str, configuration: str) -> None:
    code = (
        "import sys, transformers as t; folder = sys.argv[1]; "
        f"t.AutoModelForCausalLM.from_config(t.{configuration}).save_pretrained(folder); "
        "t.AutoTokenizer.from_pretrained('assets/model').save_pretrained(folder)"
    )
    subprocess.run([sys.executable, "-c", code, name], cwd=lab.folder, check=True, timeout=LIMIT_S)


# --- making them ----------------------------------------------------------------------------------


def shortened(content: bytes, lab: Lab) -> bytes:
    """Without the paths and the name of the machine on which it was made."""
    places = {
        str(lab.folder): "/work",
        str(LAUNCHER): "/launch/launcher",
        str(CHECKOUT): "/open-instruct",
        str(Path(sys.prefix)): "/venv",
        os.environ.get("CORPUS_LIGER", "\0"): "/liger",
        os.environ.get("CORPUS_TRL_0_12", "\0"): "/venv/lib/python3.11/site-packages",
        os.environ.get("CORPUS_TRL_0_20", "\0"): "/venv/lib/python3.11/site-packages",
        sys.base_prefix: "/usr",
        str(Path.home()): "/home/user",
    }
    for place, short in places.items():
        content = content.replace(place.encode(), short.encode())
    host = re.escape(socket.gethostname().encode())
    return re.sub(rb"\b" + host + rb"\b", b"node-1", content) if host else content


def make(lab: Lab) -> None:
    """Run one case and put its log and records into the corpus."""
    shutil.rmtree(lab.folder, ignore_errors=True)
    lab.folder.mkdir(parents=True)
    (lab.folder / "assets").symlink_to(lab.root / "work/assets")
    CASES[lab.name](lab)
    (lab.root / f"{lab.name}.log").write_bytes(shortened(lab.log.read_bytes(), lab))
    for record in (lab.folder / "probe").glob("rank-*.jsonl"):
        shutil.copy(record, lab.root / f"{lab.name}.{record.name}")


def main(folder: Path, names: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    assets = folder / "work/assets"
    if not assets.exists():
        script = REPOSITORY / "scripts/make_demo_assets.py"
        subprocess.run([sys.executable, str(script), str(assets)], check=True)
    bad = 0
    for name in names or CASES:
        print(name, flush=True)
        try:
            make(Lab(root=folder, name=name))
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            bad += 1
    return int(bad > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", metavar="DIR", type=Path, help="created if it is missing")
    parser.add_argument("names", metavar="NAME", nargs="*", help="of: " + ", ".join(CASES))
    given = parser.parse_args()
    if unknown := set(given.names) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    sys.exit(main(given.folder.resolve(), given.names))
