"""What the GPU did in one step: Kineto's record of its kernels, by their names."""

from __future__ import annotations

import collections
import math
import re
import sys
import time
from typing import Any

from .process import Process

_CLASSES = (
    ("communication", re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa?_", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|nvjet|xmma|cutlass|cublas|matmul|splitk", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy|memset|copy_kernel|CatArray", re.IGNORECASE)),
    ("optimizer", re.compile(r"multi_tensor|adam", re.IGNORECASE)),
)
"""What a kernel is for, by its name; the first that matches. All others are `other`."""


def class_of(kernel: str) -> str:
    return next((name for name, pattern in _CLASSES if pattern.search(kernel)), "other")


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of (begin, end)."""
    length, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length


def of_kernels(spans: list[tuple[str, float, float]], seconds: float) -> dict[str, Any]:
    """What (kernel, begin, end), in seconds, say of a step that took `seconds`.

    `shares` are of the step, and overlap where kernels do; `exposed_communication` is the share in
    which nothing but communication ran, `idle` that in which nothing did.
    """
    classes: dict[str, float] = collections.defaultdict(float)
    names: dict[str, list[float]] = collections.defaultdict(list)
    for name, begin, end in spans:
        classes[class_of(name)] += end - begin
        names[name].append(end - begin)
    apart = [(b, e) for name, b, e in spans if class_of(name) != "communication"]
    busy = covered([(begin, end) for _, begin, end in spans])
    top = sorted(names.items(), key=lambda one: -sum(one[1]))[:15]
    return {
        "seconds": round(seconds, 6), "kernels": len(spans),
        "shares": {name: round(taken / seconds, 5) for name, taken in sorted(classes.items())},
        "exposed_communication": round((busy - covered(apart)) / seconds, 5),
        "idle": round(max(0.0, 1 - busy / seconds), 5),
        "top": [
            {"kernel": name[:160], "class": class_of(name), "calls": len(taken),
             "share": round(sum(taken) / seconds, 5)}
            for name, taken in top
        ],
    }  # fmt: skip


class Kernels:
    """Kineto's record of what the GPU runs, from here until `taken`; both wait for the GPU."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self.profiler = torch.profiler.profile(activities=activities)
        torch.cuda.synchronize()
        self.profiler.start()
        self.begun = time.perf_counter()

    def taken(self) -> dict[str, Any]:
        self.torch.cuda.synchronize()
        seconds = time.perf_counter() - self.begun
        self.profiler.stop()
        on_device = self.torch.autograd.DeviceType.CUDA
        spans = [
            (str(one.name), one.time_range.start / 1e6, one.time_range.end / 1e6)
            for one in self.profiler.events()
            if one.device_type == on_device and not getattr(one, "is_user_annotation", False)
        ]
        return of_kernels(spans, seconds)


class Profile:
    """The step whose kernels were asked for."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.asked = process.settings.profile
        self.kernels: Kernels | None = None
        self.recorded = False

    def begins(self) -> bool:
        """At a training forward pass: whether that step, which tells no speed then, is recorded."""
        process = self.process
        if self.kernels is not None or process.at + 1 != self.asked or process.settings.cpu:
            return False
        with process.record.quietly("profile"):
            self.kernels = Kernels(sys.modules["torch"])
        return True

    def ends(self) -> None:
        """After the step: say what its kernels were. To read them may take seconds."""
        if self.kernels is not None:
            with self.process.record.quietly("profile"):
                self.process.record.write("kernels", step=self.process.at, **self.kernels.taken())
                self.recorded = True
            self.kernels = None

    def tell_missing(self) -> None:
        """At the end: why there is no record, where one was asked for."""
        process = self.process
        if not self.asked or self.recorded:
            return
        why = f"the last one was step {process.at}"
        if process.settings.cpu:
            why = "there is no GPU"
        elif self.asked <= process.base:
            why = f"this attempt began after step {process.base}"
        elif self.asked <= process.at:
            why = "their record failed"
        process.record.write("note", text=f"the kernels of step {self.asked}: {why}")
