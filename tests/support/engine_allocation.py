"""Run by tests/plan/test_memory.py: DeepSpeed engines with every allocation counted.

usage: engine_allocation.py OUTPUT CASE_JSON...

What is imported takes longer than what is measured, so ranks are forks of one process.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from allocation import HALF, Tracker
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import _disable_current_modes

HIDDEN = 256


class Engine(Tracker):
    """Products are made in fp32, uncounted: a CPU without bf16 instructions is 15 times slower at
    them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        if is_product and args[0].dtype == HALF:
            args = [arg.float() for arg in args]
            out = func(*args).to(HALF)
            self.see(out)
            return out
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Two steps on the CPU, one without and one with the optimizer's states beside it.

    The peak of the fullest rank in bytes, and what it was of.
    """
    config = transformers.Qwen2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=1024,
        vocab_size=case["vocab"],
        tie_word_embeddings=case["tied"],
    )
    accumulation = case["accumulation"]
    zero: dict[str, Any] = {
        "stage": case["stage"],
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": case["bucket"],
    }
    if case["stage"] == 3:
        zero |= {
            "stage3_prefetch_bucket_size": int(0.9 * HIDDEN * HIDDEN),
            "stage3_param_persistence_threshold": 10 * HIDDEN,
        }
    engine_config = {
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": accumulation,
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": case["communication"],
    }
    with Engine() as tracker:
        with deepspeed.zero.Init(config_dict_or_path=engine_config, enabled=case["stage"] == 3):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=HALF)
        if case["lora"]:
            model = adapted(model, case["lora"])
        if case["checkpointing"]:
            model.gradient_checkpointing_enable()
        # the model's own making is not the engine's
        tracker.mark()
        kind = {"foreach": True} if case["foreach"] else {"fused": True}
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, **kind)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engine_config)
        engine.train()
        ids = torch.randint(0, config.vocab_size, (case["rows"], 64))
        for _ in range(2 * accumulation):
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            del loss
            engine.step()
        peak = torch.tensor(tracker.peak)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    engine.destroy()
    return {
        "peak": int(peak),
        "deepspeed": engine_config,
        "config": json.loads(config.to_json_string(use_diff=False)),
    }


def adapted(model: Any, rank: int) -> Any:
    import peft

    settings = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings).to(HALF)


def unseen(called: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return called(*args, **kwargs)

    return wrapper


def rank(number: int, world: int, place: Path, case: dict[str, Any]) -> None:
    os.environ["RANK"] = str(number)
    os.environ["LOCAL_RANK"] = str(number)
    os.environ["WORLD_SIZE"] = str(world)
    torch.set_num_threads(1)
    meeting = f"file://{place}.meeting"
    deepspeed.init_distributed("gloo", init_method=meeting, rank=number, world_size=world)
    measured = measure(case)
    if number == 0:
        place.write_text(json.dumps(measured))


def main(output: Path, cases: list[dict[str, Any]]) -> None:
    # between processes on one CPU it would compile a transport of its own: gloo does
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    # what starts an engine is imported late, and by every rank anew
    for name in ("engine", "zero.stage_1_and_2", "zero.stage3", "zero.muon.original_muon"):
        importlib.import_module(f"deepspeed.runtime.{name}")
    # gloo copies what it is to scatter, NCCL does not
    collectives: Any = importlib.import_module("deepspeed.runtime.comm.coalesced_collectives")
    collectives._torch_reduce_scatter_fn = unseen(collectives._torch_reduce_scatter_fn)
    # taken from the file where they meet
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    measured = []
    for number, case in enumerate(cases):
        # new processes for each: what an engine before it left behind counts as freed in this one
        place = output.with_name(f"{number}.json")
        ranks = case["ranks"]
        start_processes(rank, (ranks, place, case), nprocs=ranks, start_method="fork")
        measured.append(json.loads(place.read_text()))
    output.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [json.loads(case) for case in sys.argv[2:]])
