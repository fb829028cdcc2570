"""Two real processes train, with an engine that may be made to lie: for test_gradients.py.

usage: gradient_ranks.py FOLDER CASE_JSON...

Each case is a fork of this process, as imports take longer than training. The probe's pieces watch
as they would in a run; records go to FOLDER/NUMBER/rank-N.jsonl, exit codes to FOLDER/exits.json.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import accelerate.optimizer
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from torch.multiprocessing import Process

from launcher.probe.watching import Probe, gradients, trainers

STEPS = 5
FAULTY = 3  # the step whose gradients are wrong


class StandIn:
    """accelerate's Accelerator around an engine that it starts on GPUs only: the same calls."""

    scaler = None

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.sync_gradients = True
        self.num_processes, self.process_index = dist.get_world_size(), dist.get_rank()
        self.state = types.SimpleNamespace(deepspeed_plugin=None)
        self.deepspeed_engine_wrapped: Any = None

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        if self.case["engine"].startswith("zero"):
            engine, *_ = deepspeed().initialize(
                model=model, optimizer=optimizer, config=zero(self.case)
            )
            self.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(engine)
            return engine, optimizer
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        formats = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self.case.get("half") else None,
            reduce_dtype=torch.float32,
        )
        mesh = dist.init_device_mesh("cpu", (self.num_processes,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=formats)
        fully_shard(model, mesh=mesh, mp_policy=formats)
        return model, type(optimizer)(model.parameters(), lr=1e-3)

    def accumulate(self, model: Any) -> Any:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(self.sync_gradients)
        return contextlib.nullcontext()

    def backward(self, loss: Any) -> None:
        if self.deepspeed_engine_wrapped is not None:
            self.deepspeed_engine_wrapped.backward(loss, sync_gradients=self.sync_gradients)
        else:
            (loss / self.case.get("accumulation", 1)).backward()

    def clip_grad_norm_(self, parameters: Any, limit: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)


class Stepping:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def deepspeed() -> Any:
    return importlib.import_module("deepspeed")


def zero(case: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration: buckets so small that a step fills several."""
    stage: dict[str, Any] = {
        "stage": int(case["engine"][-1]), "overlap_comm": False, "contiguous_gradients": True,
        "reduce_bucket_size": 4096, "allgather_bucket_size": 4096,
    }  # fmt: skip
    if case.get("offload"):
        stage["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "zero_optimization": stage, "gradient_clipping": case.get("clip", 0.0),
        "gradient_accumulation_steps": case.get("accumulation", 1),
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": bool(case.get("half"))},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    if case.get("wire"):
        settings["communication_data_type"] = case["wire"]
    if case.get("summed"):
        settings["data_types"] = {"grad_accum_dtype": case["summed"]}
    return settings


def lie(case: dict[str, Any], accelerator: Any, model: Any, step: int) -> None:
    """Make the step about to be taken wrong, the way the case says, on the way to its optimizer."""
    fault, rank = case.get("fault"), accelerator.process_index
    if fault is None or step != FAULTY:
        return
    engine = case["engine"]
    if fault in ("undivided", "bucket"):

        def wrong(gradient: torch.Tensor) -> None:
            if fault == "undivided":
                gradient.mul_(accelerator.num_processes)
            elif rank == 0:
                # as where a buffer is used again before it was sent: another bucket's data
                gradient[gradient.numel() // 2 :].copy_(torch.randn(()) + torch.zeros(()))

        if engine.startswith("zero"):
            zero = model.optimizer
            original = zero._optimizer_step

            def stepping(index: int) -> Any:
                flats = getattr(zero, "fp32_partitioned_groups_flat", None)
                flat = (flats or zero.single_partition_of_fp32_groups)[index]
                wrong(flat.grad.view(-1))
                return original(index)

            zero._optimizer_step = stepping
        else:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    local = getattr(parameter.grad, "_local_tensor", parameter.grad)
                    wrong(local.view(-1))


def lose(case: dict[str, Any], model: Any) -> None:
    """What has been accumulated so far is lost, as where gradients are set to zero too early."""
    held: list[Any] = []
    if case["engine"] == "fsdp2":
        for module in model.modules():
            if hasattr(module, "_get_fsdp_state"):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    held += [p.unsharded_accumulated_grad for p in group.fsdp_params]
                    held += [p._unsharded_param.grad for p in group.fsdp_params]
    outer = getattr(model, "optimizer", None)
    for name in ("averaged_gradients", "all_grad_tensors"):
        for tensors in getattr(outer, name, {}).values():
            held += tensors or []
    for parameter in model.parameters():
        held += [parameter.grad, getattr(parameter, "grad_accum", None)]
    for tensor in held:
        if tensor is not None:
            tensor.zero_()


def train(case: dict[str, Any], folder: Path, rank: int) -> None:
    """A few steps of a tiny model; the probe stops the process where its contract is broken."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    expect = {"gradients": case.get("expect", "true")}
    settings = {
        "target": __file__, "out": str(folder), "cpu": True, "divides_loss": True,
        "expect": expect, "on_violation": "stop",
    }  # fmt: skip
    gradients.AGREEMENT = case.get("patience", gradients.AGREEMENT)
    if case.get("sparse"):
        gradients.DENSE = 1
        gradients.EVERY = 2
    probe = Probe(settings)
    real = case["engine"] in ("one", "ddp")
    module = (
        importlib.import_module("accelerate.accelerator")
        if real
        else types.SimpleNamespace(Accelerator=StandIn)
    )
    stepping = (
        accelerate.optimizer if real else types.SimpleNamespace(AcceleratedOptimizer=Stepping)
    )
    if rank not in case.get("unwatched", ()):
        trainers.watch_accelerate(probe, module)
        trainers.watch_optimizer(probe, stepping)
    accumulation = case.get("accumulation", 1)
    accelerator: Any = (
        Accelerator(gradient_accumulation_steps=accumulation, cpu=True) if real else StandIn(case)
    )
    config = transformers.Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, tie_word_embeddings=bool(case.get("tied")),
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": case["checkpointing"] == "reentrant"})
        model.enable_input_require_grads()
    if case.get("frozen"):
        for parameter in model.model.embed_tokens.parameters():
            parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    if case.get("half") and case["engine"].startswith("zero"):
        model = model.bfloat16()
    model, optimizer = accelerator.prepare(model, optimizer)
    if not real:
        optimizer = Stepping(optimizer)
    model.train()
    generator = torch.Generator().manual_seed(1000 + rank)
    stepped = case["engine"].startswith("zero")  # by the engine, inside its backward
    for step in range(1, STEPS + 1):
        for micro in range(accumulation):
            ids = torch.randint(0, 512, (2, 16), generator=generator)
            last = micro == accumulation - 1
            if not real:
                accelerator.sync_gradients = last
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                if stepped and last:
                    lie(case, accelerator, model, step)
                accelerator.backward(loss)
                if not stepped and last:
                    lie(case, accelerator, model, step)
                if case.get("clip") and last and not stepped:
                    accelerator.clip_grad_norm_(model.parameters(), case["clip"])
                if not stepped and (real or last):
                    optimizer.step()
                    optimizer.zero_grad()
                if case.get("fault") == "dropped" and step == FAULTY and not last:
                    lose(case, model)
    probe.end()


def rank(case: dict[str, Any], folder: Path, number: int, world: int) -> None:
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }  # fmt: skip
    log = os.open(folder / f"log-{number}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if world > 1:
        meeting = f"file://{folder}/meeting"
        if case["engine"].startswith("zero"):
            import deepspeed

            deepspeed.init_distributed("gloo", init_method=meeting, rank=number, world_size=world)
        else:
            dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=world)
    try:
        train(case, folder, number)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(folder: Path, cases: list[dict[str, Any]]) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    if any(case["engine"].startswith("zero") for case in cases):
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        for name in ("engine", "zero.stage_1_and_2", "zero.stage3", "zero.muon.original_muon"):
            importlib.import_module(f"deepspeed.runtime.{name}")
    # a first step imports much: once, for all of them
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.fsdp")
    tiny = transformers.Qwen2Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, vocab_size=8,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(tiny)
    codes: list[list[int | None]] = []
    for number, case in enumerate(cases):
        world = case.get("world", 2)
        place = folder / str(number)
        place.mkdir()
        processes = [Process(target=rank, args=(case, place, n, world)) for n in range(world)]
        for process in processes:
            process.start()
        waiting = list(processes)
        while waiting:
            waiting[0].join(0.1)
            waiting = [process for process in waiting if process.is_alive()]
            # a process that stopped itself leaves the others in a collective: a launcher ends them
            if any(process.exitcode for process in processes):
                for process in waiting:
                    process.join(2)
                    process.kill()
        codes.append([process.exitcode for process in processes])
    (folder / "exits.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("fork")
    main(Path(sys.argv[1]), [json.loads(case) for case in sys.argv[2:]])
