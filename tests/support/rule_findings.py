"""What the rules say of a stage without a file: its arguments alone, or a run on a machine."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verdicts import schema_of

from launcher.errors import Finding
from launcher.rules import registry
from launcher.rules.context import Context, Machine
from launcher.upstream.schema import Values

# The config.json of a small Qwen2.
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}

# A valid, quiet base for each script; at this rate no step is lost to bfloat16.
SFT = {
    "model_name_or_path": "m",
    "dataset_mixer_list": ["a", "1.0"],
    "push_to_hub": False,
    "try_launch_beaker_eval_jobs": False,
    "checkpointing_steps": "epoch",
    "learning_rate": 1e-4,
}
DPO = {
    "model_name_or_path": "m",
    "mixer_list": ["a", "1.0"],
    "push_to_hub": False,
    "try_launch_beaker_eval_jobs": False,
    "learning_rate": 1e-4,
}
TRL = {"model_name_or_path": "m", "dataset_name": "d"}
BASES = {
    "sft": ("open_instruct", "sft", SFT),
    "dpo": ("open_instruct", "dpo", DPO),
    "trl-sft": ("trl", "sft", TRL),
    "trl-dpo": ("trl", "dpo", TRL),
}

THIS_MACHINE = Machine(cpus=8)
"""A start on this machine: what is missing then stays missing."""

UNRELATED = ("overlap-corrupts", "unseen-data")
"""Said of every run with this DeepSpeed (tests/probe/test_gradients.py) or with data on the hub."""


def values_of(script: str, changes: dict[str, Any]) -> Values:
    backend, stage, base = BASES[script]
    schema = schema_of(backend, stage)
    assert changes.keys() <= schema.fields.keys()
    return Values(schema, {**base, **changes})


def judge_arguments(script: str, **changes: Any) -> list[Finding]:
    return list(registry.apply(values_of(script, changes)))


def judge_run(script: str, args: dict[str, Any], **facts: Any) -> list[Finding]:
    """Findings about a run with these facts, the fields of `Context`."""
    home = Path.cwd() / "home"
    facts.setdefault("environ", {"HOME": str(home)})
    if "gpus" not in facts:
        # once the GPUs are known, it may be a default that was filled in
        facts.setdefault("named_precision", facts.get("mixed_precision"))
    context = Context(values=values_of(script, args), **facts)
    findings = registry.apply_in(context)
    return [finding for finding in findings if finding.code not in UNRELATED]


def summarise(findings: Iterable[Finding]) -> list[str]:
    """Each finding as `code severity key`."""
    lines = []
    for finding in findings:
        key = (finding.key or "").removeprefix("args.")
        lines.append(f"{finding.code} {finding.severity} {key}")
    return lines


def summarise_run(script: str, args: dict[str, Any], **facts: Any) -> list[str]:
    """The findings about a run, each as `code severity key`."""
    findings = judge_run(script, args, **facts)
    assert all(finding.layer == "run" and finding.message for finding in findings)
    return summarise(findings)


def codes_of_run(script: str, args: dict[str, Any], **facts: Any) -> set[str]:
    return {finding.code for finding in judge_run(script, args, **facts)}
