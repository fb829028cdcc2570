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
from gradient_case import FAULTY_STEP, Case
from torch.multiprocessing import Process

from launcher.probe.watching import Probe, gradients, trainers

STEPS = 5
LEARNING_RATE = 1e-3


class StandIn:
    """accelerate's Accelerator around an engine that it starts on GPUs only: the same calls."""

    scaler = None

    def __init__(self, case: Case) -> None:
        self.case = case
        self.sync_gradients = True
        self.num_processes = dist.get_world_size()
        self.process_index = dist.get_rank()
        self.state = types.SimpleNamespace(deepspeed_plugin=None)
        self.deepspeed_engine_wrapped: Any = None

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        if self.case.is_zero:
            config = zero_config(self.case)
            engine, *_ = deepspeed().initialize(model=model, optimizer=optimizer, config=config)
            self.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(engine)
            return engine, optimizer
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtype = torch.bfloat16 if self.case.half else None
        formats = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = dist.init_device_mesh("cpu", (self.num_processes,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=formats)
        fully_shard(model, mesh=mesh, mp_policy=formats)
        return model, type(optimizer)(model.parameters(), lr=LEARNING_RATE)

    def accumulate(self, model: Any) -> Any:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(self.sync_gradients)
        return contextlib.nullcontext()

    def backward(self, loss: Any) -> None:
        if self.deepspeed_engine_wrapped is not None:
            self.deepspeed_engine_wrapped.backward(loss, sync_gradients=self.sync_gradients)
        else:
            mean = loss / self.case.accumulation
            mean.backward()

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


def zero_config(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration: buckets so small that a step fills several."""
    stage: dict[str, Any] = {
        "stage": int(case.engine[-1]),
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": 4096,
        "allgather_bucket_size": 4096,
    }
    if case.offload:
        stage["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "zero_optimization": stage,
        "gradient_clipping": case.clip,
        "gradient_accumulation_steps": case.accumulation,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": case.half},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if case.wire:
        config["communication_data_type"] = case.wire
    if case.summed:
        config["data_types"] = {"grad_accum_dtype": case.summed}
    return config


def corrupt_step(case: Case, accelerator: Any, model: Any) -> None:
    """Make the gradients wrong, the way the case says, on their way to the optimizer."""
    if case.is_zero:
        corrupt_zero(case, accelerator, model.optimizer)
        return
    for parameter in model.parameters():
        if parameter.grad is not None:
            local = getattr(parameter.grad, "_local_tensor", parameter.grad)
            corrupt(case, accelerator, local.view(-1))


def corrupt_zero(case: Case, accelerator: Any, optimizer: Any) -> None:
    original = optimizer._optimizer_step

    def step_with_fault(index: int) -> Any:
        parts = getattr(optimizer, "fp32_partitioned_groups_flat", None)
        parts = parts or optimizer.single_partition_of_fp32_groups
        corrupt(case, accelerator, parts[index].grad.view(-1))
        return original(index)

    optimizer._optimizer_step = step_with_fault


def corrupt(case: Case, accelerator: Any, gradient: torch.Tensor) -> None:
    if case.fault == "undivided":
        gradient.mul_(accelerator.num_processes)
    elif accelerator.process_index == 0:
        # as where a buffer is used again before it was sent: another bucket's data
        half = gradient.numel() // 2
        gradient[half:].copy_(torch.randn(()))


def drop_accumulated(case: Case, model: Any) -> None:
    """Lose what has been accumulated so far, as where gradients are set to zero too early."""
    sums: list[Any] = []
    if case.engine == "fsdp2":
        for module in model.modules():
            if hasattr(module, "_get_fsdp_state"):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    sums += [p.unsharded_accumulated_grad for p in group.fsdp_params]
                    sums += [p._unsharded_param.grad for p in group.fsdp_params]
    optimizer = getattr(model, "optimizer", None)
    for name in ("averaged_gradients", "all_grad_tensors"):
        for tensors in getattr(optimizer, name, {}).values():
            sums += tensors or []
    for parameter in model.parameters():
        sums += [parameter.grad, getattr(parameter, "grad_accum", None)]
    for total in sums:
        if total is not None:
            total.zero_()


def start_probe(case: Case, folder: Path, rank: int) -> Probe:
    """A probe that stops the process where its contract is broken."""
    if case.patience:
        gradients.AGREEMENT = case.patience
    if case.sparse:
        gradients.DENSE = 1
        gradients.EVERY = 2
    probe = Probe(
        {
            "target": __file__,
            "out": str(folder),
            "cpu": True,
            "divides_loss": True,
            "expect": {"gradients": "true"},
            "on_violation": "stop",
        }
    )
    if rank not in case.unwatched:
        module: Any = types.SimpleNamespace(Accelerator=StandIn)
        stepping: Any = types.SimpleNamespace(AcceleratedOptimizer=Stepping)
        if case.is_real:
            module = importlib.import_module("accelerate.accelerator")
            stepping = accelerate.optimizer
        trainers.watch_accelerate(probe, module)
        trainers.watch_optimizer(probe, stepping)
    return probe


def build_model(case: Case) -> Any:
    config = transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        tie_word_embeddings=case.tied,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    if case.checkpointing:
        is_reentrant = case.checkpointing == "reentrant"
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
    if case.frozen:
        for parameter in model.model.embed_tokens.parameters():
            parameter.requires_grad_(False)
    return model


def train(case: Case, folder: Path, rank: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    probe = start_probe(case, folder, rank)
    accelerator: Any
    if case.is_real:
        accelerator = Accelerator(gradient_accumulation_steps=case.accumulation, cpu=True)
    else:
        accelerator = StandIn(case)
    model = build_model(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    if case.half and case.is_zero:
        model = model.bfloat16()
    model, optimizer = accelerator.prepare(model, optimizer)
    if not case.is_real:
        optimizer = Stepping(optimizer)
    model.train()
    generator = torch.Generator().manual_seed(1000 + rank)
    for step in range(1, STEPS + 1):
        fault = case.fault if step == FAULTY_STEP else None
        for micro in range(case.accumulation):
            ids = torch.randint(0, 512, (2, 16), generator=generator)
            is_last = micro == case.accumulation - 1
            take_micro_step(case, accelerator, model, optimizer, ids, fault, is_last=is_last)
    probe.end()


def take_micro_step(
    case: Case,
    accelerator: Any,
    model: Any,
    optimizer: Any,
    ids: torch.Tensor,
    fault: str | None,
    *,
    is_last: bool,
) -> None:
    """A forward and backward pass, and after the last one of a step the optimizer's step."""
    is_corrupt = is_last and fault in ("undivided", "bucket")
    if not case.is_real:
        accelerator.sync_gradients = is_last
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        # ZeRO's engine takes the step inside its backward
        if case.is_zero:
            if is_corrupt:
                corrupt_step(case, accelerator, model)
            accelerator.backward(loss)
        else:
            accelerator.backward(loss)
            if is_corrupt:
                corrupt_step(case, accelerator, model)
            if is_last and case.clip:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            if is_last or case.is_real:
                optimizer.step()
                optimizer.zero_grad()
        if fault == "dropped" and not is_last:
            drop_accumulated(case, model)


def run_rank(case: Case, folder: Path, number: int) -> None:
    """Train as one rank, in a process that ends here."""
    os.environ["RANK"] = str(number)
    os.environ["LOCAL_RANK"] = str(number)
    os.environ["WORLD_SIZE"] = str(case.world)
    os.environ["LOCAL_WORLD_SIZE"] = str(case.world)
    log = os.open(folder / f"log-{number}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if case.world > 1:
        init = dist.init_process_group
        if case.is_zero:
            init = deepspeed().init_distributed
        init("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=case.world)
    try:
        train(case, folder, number)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def import_early(cases: list[Case]) -> None:
    """Import what a first step imports: once, for all of them."""
    if any(case.is_zero for case in cases):
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        for name in ("engine", "zero.stage_1_and_2", "zero.stage3", "zero.muon.original_muon"):
            importlib.import_module(f"deepspeed.runtime.{name}")
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.fsdp")
    tiny = transformers.Qwen2Config(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=8,
    )
    transformers.AutoModelForCausalLM.from_config(tiny)


def run_case(case: Case, folder: Path) -> list[int | None]:
    """The exit code of each rank."""
    ranks = range(case.world)
    processes = [Process(target=run_rank, args=(case, folder, rank)) for rank in ranks]
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
    return [process.exitcode for process in processes]


def main(folder: Path, cases: list[Case]) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    import_early(cases)
    codes = []
    for number, case in enumerate(cases):
        case_folder = folder / str(number)
        case_folder.mkdir()
        codes.append(run_case(case, case_folder))
    (folder / "exits.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("fork")
    main(Path(sys.argv[1]), [Case(**json.loads(case)) for case in sys.argv[2:]])
