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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ratio
from benchmarks.ratio import Pair
from launcher.probe.watching import Probe, trainers

WATCHED = ("backward", "clip_grad_norm_")


class Training:
    """A small Qwen2 and steps of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from accelerate import Accelerator
        from transformers import Qwen2Config, Qwen2ForCausalLM

        self.torch, self.options = torch, options
        self.accelerator = Accelerator(
            cpu=options.device == "cpu", gradient_accumulation_steps=options.micro,
            mixed_precision="no" if options.device == "cpu" else "bf16",
        )  # fmt: skip
        heads = max(1, options.hidden // 64)
        config = Qwen2Config(
            vocab_size=options.vocab, hidden_size=options.hidden, 
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers, num_attention_heads=heads, num_key_value_heads=heads,
        )  # fmt: skip
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).train()
        self.bare = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        ids = torch.randint(
            0, options.vocab, (4, options.tokens // 4), device=self.accelerator.device
        )
        self.batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def block(self) -> float:
        """Seconds a step, over one block."""
        return ratio.timed(self._steps)() / int(self.options.block)

    def _steps(self) -> None:
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


def alone(training: Training, probe: Any) -> float:
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

    def several() -> None:
        for _ in range(20):
            step()

    return ratio.best_of(ratio.timed(several), 50) / 20


def switch(training: Training, folder: str) -> tuple[Callable[[bool], None], Any]:
    """What puts the probe into a training that runs, and takes it out; and the probe."""
    import accelerate.accelerator
    import accelerate.optimizer

    cpu = training.options.device == "cpu"
    probe = Probe({"target": "", "out": folder, "cpu": cpu})
    places = [(accelerate.accelerator.Accelerator, name) for name in WATCHED]
    places.append((accelerate.optimizer.AcceleratedOptimizer, "step"))
    bare = [vars(owner)[name] for owner, name in places]
    trainers.watch_accelerate(probe, accelerate.accelerator)
    trainers.watch_optimizer(probe, accelerate.optimizer)
    watched = [vars(owner)[name] for owner, name in places]
    probe.saw_model(training.bare)
    probe.optimizer.saw(training.optimizer.optimizer, training.accelerator)
    probe.watchdog.start()
    hooks = dict(training.bare._forward_pre_hooks)

    def turn(on: bool) -> None:
        probe.close_step()
        for (owner, name), function in zip(places, watched if on else bare, strict=True):
            setattr(owner, name, function)
        training.bare._forward_pre_hooks.clear()
        training.bare._forward_pre_hooks.update(hooks if on else {})
        if not on:
            probe.gradients.unhook()

    return turn, probe


def pairs(folder: Path) -> Iterator[Pair]:
    """The probe's own calls in a step beside writing a line of JSON, the least it must do."""
    training = Training(parsed(()))
    turn, probe = switch(training, str(folder))
    turn(False)
    line = {"event": "step", "step": 1, "loss": 2.5, "finite": True, "tokens": 512, "seconds": 0.25}
    with (folder / "lines.jsonl").open("w", encoding="utf-8") as file:

        def write() -> None:
            for number in range(20):
                file.write(json.dumps({**line, "step": number}) + "\n")
                file.flush()

        yield Pair(
            name="probe",
            what="its calls in a training step / one line of JSON, written and flushed",
            ours=lambda: alone(training, probe),
            beside=lambda: ratio.best_of(ratio.timed(write), 50) / 20,
        )  # fmt: skip


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
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
    options = parsed(arguments)
    training = Training(options)
    taken: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        turn, probe = switch(training, folder)
        # a model that was prepared before: its gradients are compared as in a run
        probe.gradients.prepared(training.bare)
        for number in range(options.blocks + 4):
            on = number % 2 == 0
            turn(on)
            seconds = training.block()
            if number >= 4:
                taken[on].append(seconds)
        turn(False)
        own = alone(training, probe)
    step, watched = statistics.median(taken[False]), statistics.median(taken[True])
    # neighbours in time are compared, so that a machine that slows down slows both
    added = statistics.median(a - b for a, b in zip(taken[True], taken[False], strict=True))
    least = min(taken[True]) - min(taken[False])
    told = {
        "step_ms": round(1e3 * step, 3), "watched_ms": round(1e3 * watched, 3),
        "added_us": round(1e6 * added, 1), "share": round(added / step, 5),
        "least_added_us": round(1e6 * least, 1), "alone_us": round(1e6 * own, 1),
    }  # fmt: skip
    if options.json:
        print(json.dumps(told))
    else:
        print(
            f"a step takes {told['step_ms']} ms, with the probe {told['watched_ms']} ms: "
            f"{told['added_us']} us more, {100 * told['share']:.2f} % (the fastest blocks "
            f"differ by {told['least_added_us']} us); its calls alone take {told['alone_us']} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
