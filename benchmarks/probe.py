"""What the probe costs a training step: blocks with and without it, in turn, in one process.

usage: python -m benchmarks.probe [--device cuda] [--hidden 1024] [--layers 24] [--tokens 4096]
                                  [--vocab 32000] [--micro 1] [--block 10] [--blocks 40] [--json]

The same model, the same batches; between two blocks the probe's wrappers and its hook are taken out
or put back. Prints the medians, what the probe adds, and what its calls of one step take alone,
which no neighbour on the machine blurs. Goal: less than 0.5 % of a step that is worth training (0.1
s and more).
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ratio
from benchmarks.ratio import Pair
from launcher.probe.watching import Probe, trainers


class Training:
    """A small Qwen2 and steps of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from accelerate import Accelerator
        from transformers import Qwen2Config, Qwen2ForCausalLM

        self.torch = torch
        self.options = options
        on_cpu = options.device == "cpu"
        self.accelerator = Accelerator(
            cpu=on_cpu,
            gradient_accumulation_steps=options.micro,
            mixed_precision="no" if on_cpu else "bf16",
        )
        heads = max(1, options.hidden // 64)
        config = Qwen2Config(
            vocab_size=options.vocab,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
        )
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).train()
        self.bare = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        shape = (4, options.tokens // 4)
        ids = torch.randint(0, options.vocab, shape, device=self.accelerator.device)
        self.batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def measure_block(self) -> float:
        """Seconds a step, over one block."""
        timer = ratio.time_call(self._run_block)
        return timer() / int(self.options.block)

    def _run_block(self) -> None:
        for _ in range(self.options.block):
            for _ in range(self.options.micro):
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**self.batch, use_cache=False).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        if self.options.device != "cpu":
            self.torch.cuda.synchronize()


def measure_probe_alone(training: Training, probe: Any) -> float:
    """Seconds that the probe's own calls take in a step, at best: what it costs the host."""
    loss = training.torch.ones((), device=training.accelerator.device)

    def step() -> None:
        for _ in range(training.options.micro):
            probe.begin_forward(training.bare, (), training.batch)
            probe.begin_backward(loss)
        probe.end_backward(training.accelerator)
        probe.clipped(loss)
        probe.before_optimizer(training.optimizer)
        probe.close_step()

    def run_steps() -> None:
        for _ in range(20):
            step()

    return ratio.measure_best(ratio.time_call(run_steps), 50) / 20


@dataclass(frozen=True, slots=True)
class WatchedMethod:
    """A method of accelerate, as it is and as the probe wraps it."""

    owner: type
    name: str
    bare: Any
    watched: Any


class ProbeSwitch:
    """Puts the probe into a training that runs, and takes it out."""

    def __init__(self, training: Training, folder: str) -> None:
        import accelerate.accelerator
        import accelerate.optimizer

        self.training = training
        self.probe = Probe({"target": "", "out": folder, "cpu": training.options.device == "cpu"})
        places: list[tuple[type, str]] = [
            (accelerate.accelerator.Accelerator, "backward"),
            (accelerate.accelerator.Accelerator, "clip_grad_norm_"),
            (accelerate.optimizer.AcceleratedOptimizer, "step"),
        ]
        bare = [vars(owner)[name] for owner, name in places]
        trainers.watch_accelerate(self.probe, accelerate.accelerator)
        trainers.watch_optimizer(self.probe, accelerate.optimizer)
        self.methods = []
        for (owner, name), method in zip(places, bare, strict=True):
            self.methods.append(WatchedMethod(owner, name, method, vars(owner)[name]))
        self.probe.saw_model(training.bare)
        self.probe.optimizer.saw(training.optimizer.optimizer, training.accelerator)
        self.probe.watchdog.start()
        self.hooks = dict(training.bare._forward_pre_hooks)

    def turn_on(self) -> None:
        self.probe.close_step()
        for method in self.methods:
            setattr(method.owner, method.name, method.watched)
        self.training.bare._forward_pre_hooks.update(self.hooks)

    def turn_off(self) -> None:
        self.probe.close_step()
        for method in self.methods:
            setattr(method.owner, method.name, method.bare)
        self.training.bare._forward_pre_hooks.clear()
        self.probe.gradients.unhook()


def pairs(folder: Path) -> Iterator[Pair]:
    """The probe's own calls in a step beside writing a line of JSON, the least it must do."""
    training = Training(parse_arguments(()))
    switch = ProbeSwitch(training, str(folder))
    switch.turn_off()
    line = {"event": "step", "step": 1, "loss": 2.5, "finite": True, "tokens": 512, "seconds": 0.25}
    with (folder / "lines.jsonl").open("w", encoding="utf-8") as file:

        def write() -> None:
            for number in range(20):
                file.write(json.dumps({**line, "step": number}) + "\n")
                file.flush()

        yield Pair(
            name="probe",
            what="its calls in a training step / one line of JSON, written and flushed",
            launch=lambda: measure_probe_alone(training, switch.probe),
            neighbour=lambda: ratio.measure_best(ratio.time_call(write), 50) / 20,
        )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    defaults = {
        "hidden": 64,
        "layers": 2,
        "tokens": 128,
        "vocab": 1_000,
        "micro": 1,
        "block": 10,
        "blocks": 40,
    }
    for name, number in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure and print; always exits 0, the figures are for people and for the record."""
    options = parse_arguments(arguments)
    training = Training(options)
    bare: list[float] = []
    watched: list[float] = []
    added: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        switch = ProbeSwitch(training, folder)
        # a model that was prepared before: its gradients are compared as in a run
        switch.probe.gradients.prepared(training.bare)
        for number in range(options.blocks // 2 + 2):
            switch.turn_on()
            with_probe = training.measure_block()
            switch.turn_off()
            without = training.measure_block()
            # the first two warm up
            if number >= 2:
                watched.append(with_probe)
                bare.append(without)
                # neighbours in time are compared: a machine that slows down slows both
                added.append(with_probe - without)
        alone = measure_probe_alone(training, switch.probe)
    step_s = statistics.median(bare)
    added_s = statistics.median(added)
    least_s = min(watched) - min(bare)
    figures = {
        "step_ms": round(1e3 * step_s, 3),
        "watched_ms": round(1e3 * statistics.median(watched), 3),
        "added_us": round(1e6 * added_s, 1),
        "share": round(added_s / step_s, 5),
        "least_added_us": round(1e6 * least_s, 1),
        "alone_us": round(1e6 * alone, 1),
    }
    if options.json:
        print(json.dumps(figures))
    else:
        print(
            f"a step takes {figures['step_ms']} ms, with the probe {figures['watched_ms']} ms: "
            f"{figures['added_us']} us more, {100 * figures['share']:.2f} % (the fastest blocks "
            f"differ by {figures['least_added_us']} us); its calls alone take "
            f"{figures['alone_us']} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
