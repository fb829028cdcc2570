"""Console logs as other trainers write them: lines of HF Trainer, LLaMA-Factory, axolotl and
torchrun.
"""

from collections.abc import Iterable

STAMP = "2026-11-20 15:41:37 - INFO - "


def hf_step(
    loss: object,
    rate: object = 1e-5,
    epoch: float = 0.1,
    norm: object = 1.2,
    *,
    quoted: bool = False,
    **more: object,
) -> str:
    """One dict that HF Trainer logs; from transformers 5 on its values are quoted."""
    values = {"loss": loss, "grad_norm": norm, "learning_rate": rate, **more, "epoch": epoch}
    if quoted:
        values = {name: str(value) for name, value in values.items()}
    shown = ", ".join(f"'{name}': {value!r}" for name, value in values.items())
    return "{" + shown.replace("'nan'", "nan" if not quoted else "'nan'") + "}\n"


def llama_factory(total: int, lines: Iterable[str]) -> str:
    head = (
        "[INFO|trainer.py:2243] 2026-11-20 15:41:37,120 >> ***** Running training *****\n"
        "[INFO|trainer.py:2244] 2026-11-20 15:41:37,120 >>   Num examples = 1,000\n"
        "[INFO|trainer.py:2251] 2026-11-20 15:41:37,121 >>   "
        f"Total optimization steps = {total:,}\n"
    )
    return head + "".join(lines)


def axolotl(total: int, lines: Iterable[str]) -> str:
    """axolotl logs beside a bar that is redrawn."""
    head = (
        "[2026-11-20 15:41:30,501] [INFO] [axolotl.train.train:47] [PID:201] "
        "loading model and peft_config...\n"
        f"\r  0%|          | 0/{total} [00:00<?, ?it/s]"
    )
    shown = [
        f"\r {100 * n // total}%|#         | {n}/{total} [00:{n:02}<00:10,  1.00it/s]{line}"
        for n, line in enumerate(lines, start=1)
    ]
    return head + "".join(shown)


def summary(steps: int) -> str:
    values = {
        "train_runtime": 61.5,
        "train_samples_per_second": 16.3,
        "train_steps_per_second": steps / 61.5,
        "train_loss": 1.2,
        "epoch": 1.0,
    }
    return f"{values}\n"


def traceback(*frames: str, error: str, rank: int | None = None) -> str:
    """A traceback through functions of these names."""
    tag = "" if rank is None else f"[rank{rank}]: "
    lines = ["Traceback (most recent call last):"]
    for number, name in enumerate(frames, start=1):
        lines.append(
            '  File "/venv/lib/python3.11/site-packages/transformers/trainer.py", '
            f"line {number}, in {name}"
        )
        lines.append("    return inner(*args)")
    lines.append(error)
    return "".join(f"{tag}{line}\n" for line in lines)


def watchdog(sequence: int, operation: str) -> str:
    what = (
        f"WorkNCCL(SeqNum={sequence}, OpType={operation}, NumelIn=1, NumelOut=2, "
        "Timeout(ms)=600000)"
    )
    text = (
        f"Watchdog caught collective operation timeout: {what} "
        "ran for 600019 milliseconds before timing out."
    )
    return (
        f"[rank1]:[E1120 18:32:45.457035698 ProcessGroupNCCL.cpp:629] [Rank 1] {text}\n"
        "[rank1]:[E1120 18:32:46.014283380 ProcessGroupNCCL.cpp:1895] "
        "[PG ID 0 PG GUID 0 Rank 1] "
        f"Process group watchdog thread terminated with exception: [Rank 1] {text}\n"
    )


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.25 GiB. "
    "GPU 1 has a total capacity of 79.25 GiB of which 1.19 GiB is free."
)
