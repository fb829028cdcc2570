"""Rules about the number of processes, which is known once a stage is planned on GPUs."""

from collections.abc import Iterator

from launcher.errors import Finding
from launcher.rules.context import Context, RuleTable, caches_only
from launcher.rules.rule import cites, needs, say
from launcher.rules.trl.mixture import unseeded_test_split


@cites("finetune.py::main[args.sequence_parallel_size != 0]", reviewed=("e6c3044aa620",))
@needs("split")
def sequence_parallel(context: Context) -> Iterator[Finding]:
    """Each group of so many processes shares its rows."""
    key = "sequence_parallel_size"
    size = context.values[key]
    if not isinstance(size, int) or size <= 1 or context.split is None or caches_only(context):
        return
    processes = context.split.processes
    if processes % size:
        divisors = [str(number) for number in range(1, processes + 1) if processes % number == 0]
        message = f"`{key}: {size}` does not divide {processes} process(es)"
        help = f"one of {', '.join(divisors)}, or another --gpus"
        yield say("error", "sequence-split", key, message, help)


@cites("transformers/trainer.py::Trainer.__init__[if not self.is_fsdp_xla_enabled]")
@needs("split")
def sharded_alone(context: Context) -> Iterator[Finding]:
    """FSDP needs processes that know of each other."""
    values = context.values
    alone = context.split is not None and context.split.processes == 1
    if values["fsdp"] and alone and "xla" not in str(values["fsdp_config"]):
        message = "`fsdp` on one process: transformers refuses it, there is nothing to shard over"
        yield say("error", "fsdp-alone", "fsdp", message, "--gpus 2 or more, or delete the line")


RULES: RuleTable = {
    "open_instruct": {"sft": (sequence_parallel,)},
    "trl": dict.fromkeys(("sft", "dpo"), (sharded_alone, unseeded_test_split)),
}
