"""What the GPU's own record of a step says, by names of kernels seen on an H200."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_probe import Training

from launcher.watching import kernels

NAMES = {
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "nvjet_sm90_tst_256x160_64x4_1x2_h_bz_coopA_TNT": "matmul",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128": "attention",
    "Memcpy DtoD (Device -> Device)": "copy",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": "copy",
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>>": "optimizer",
    "_swiglu_forward_kernel": "other",
    "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add<c10::BFloat16>>": "other",
}
TRAIN = """
    from accelerate import Accelerator
    import torch, torch.profiler
    from model import AdamW, Model

    accelerator, model = Accelerator(), Model()
    accelerator.prepare(model, AdamW())
    for step in range(1, 6):
        model.forward(input_ids=torch.Ids(2, 8))
        accelerator.backward(torch.Scalar(2.5))
    print("trained")
"""
PROFILER = """
    import torch
    started = []
    torch.cuda.synchronize = lambda: None
    class DeviceType: CUDA, CPU = "cuda", "cpu"
    class autograd: pass
    autograd.DeviceType = DeviceType
    torch.autograd = autograd
    class ProfilerActivity: CUDA = "cuda"
    class Span:
        def __init__(self, name, start, end, device="cuda", note=False):
            self.name, self.device_type, self.is_user_annotation = name, device, note
            self.time_range = type("T", (), {"start": start, "end": end})
    class profile:
        def __init__(self, activities): assert activities == ["cuda"]
        def start(self): started.append(1)
        def stop(self): FAULT
        def events(self):
            assert started == [1]
            return [Span("sgemm", 0, 10), Span("ncclAllReduce", 5, 20), Span("step", 0, 99, note=True),
                    Span("aten::mm", 0, 50, device="cpu")]
"""


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def test_a_kernel_is_known_by_its_name() -> None:
    assert {kernel: kernels.class_of(kernel) for kernel in NAMES} == NAMES


def test_what_runs_at_once_is_counted_once() -> None:
    spans = [
        ("nvjet_a", 0.0, 4.0), ("nvjet_a", 4.0, 5.0), ("ncclAllReduce", 3.0, 7.0),
        ("_rope_kernel", 8.0, 9.0),
    ]  # fmt: skip
    told = kernels.of_kernels(spans, 10.0)
    assert told["shares"] == {"communication": 0.4, "matmul": 0.5, "other": 0.1}
    assert told["exposed_communication"] == 0.2
    assert told["idle"] == 0.2
    assert told["kernels"] == 4
    assert told["top"][0] == {"kernel": "nvjet_a", "class": "matmul", "calls": 2, "share": 0.5}


def test_nothing_ran() -> None:
    told = kernels.of_kernels([], 2.0)
    assert (told["idle"], told["shares"], told["top"]) == (1.0, {}, [])


def recorded(training: Training, fault: str = "pass", **settings: Any) -> list[dict[str, Any]]:
    (training.folder / "packages" / "torch" / "profiler.py").write_text(
        "\n".join(line[4:] for line in PROFILER.replace("FAULT", fault).splitlines())
    )
    done = training.run(TRAIN, **settings)
    assert done.stdout == "trained\n", done.stderr
    return training.events("kernels")


def test_the_step_that_was_asked_for_is_recorded(training: Training) -> None:
    (told,) = recorded(training, profile=3)
    assert told["step"] == 3 and told["kernels"] == 2
    assert set(told["shares"]) == {"communication", "matmul"}
    # neither that step nor the one in which the record is read tells a speed
    interrupted = {event["step"]: event["interrupted"] for event in training.events("step")}
    assert interrupted == {1: False, 2: False, 3: True, 4: True, 5: False}


def test_a_profiler_that_fails_costs_no_training(training: Training) -> None:
    assert recorded(training, fault="raise OSError('no CUPTI')", profile=2) == []
    assert any("no CUPTI" in note for note in training.notes())
    assert training.notes()[-1] == "the kernels of step 2: their record failed"
    assert len(training.events("step")) == 5


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"profile": 2, "cpu": True}, "the kernels of step 2: there is no GPU"),
        ({"profile": 9}, "the kernels of step 9: the last one was step 5"),
        ({}, ""),
    ],
)
def test_otherwise_nothing_is_recorded(
    training: Training, settings: dict[str, Any], why: str
) -> None:
    assert recorded(training, **settings) == []
    assert training.notes() == ([why] if why else [])
