"""Arguments that do nothing: what is said of them, for sources made up here and for the pinned one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Write
from unused_arguments import FINETUNE, HELPER

from launcher.config import load
from launcher.errors import Finding
from launcher.stage import stage
from launcher.upstream import facts, locate
from launcher.upstream.locate import Locator
from launcher.upstream.trainers import BACKENDS

STAGE = "stage: sft\nargs:\n  model_name_or_path: m\n  dataset_mixer_list: [a, 1.0]\n"
Judge = Callable[..., dict[str, Finding]]


@pytest.fixture
def root(write: Write) -> Path:
    """A checkout of another layout, with a script that leaves several arguments alone."""
    write("checkout/open_instruct/__init__.py", "")
    write("checkout/open_instruct/helper.py", HELPER)
    return write("checkout/open_instruct/finetune.py", FINETUNE).parent.parent


@pytest.fixture
def said(root: Path, write: Write) -> Judge:
    """The findings about the arguments of a stage file, by key."""

    def of(lines: str, text: str = STAGE) -> dict[str, Finding]:
        path = write("a.yaml", text + "".join(f"  {line}\n" for line in lines.split("; ")))
        locator = Locator(checkout=root, allow_unpinned=True)
        judged = stage.judge(load.load(path), locator=locator)
        codes = {"unread-key", "conditional-key", "shadowed-key", "refused-by-source"}
        return {str(f.key): f for f in judged.findings if f.code in codes}

    return of


def test_an_argument_that_nothing_reads_here(said: Judge) -> None:
    found = said("forgotten: 4")["args.forgotten"]
    assert (found.severity, found.layer, found.code) == ("warning", "run", "unread-key")
    assert found.message == (
        "`forgotten` does nothing: no read found on the path of open_instruct/finetune.py"
    )
    assert found.help == "delete the line"
    assert found.line == 5
    # an argument of another mode
    found = said("lora_rank: 8")["args.lora_rank"]
    assert (found.severity, found.layer, found.code) == ("warning", "run", "conditional-key")
    assert "read only where `use_lora` (open_instruct/finetune.py:" in found.message
    assert found.message.endswith("and `use_lora` is false")
    # several conditions
    found = said("bits: 4")["args.bits"]
    assert "where `use_lora` and `use_qlora`" in found.message
    assert found.message.endswith("`use_lora` is false, `use_qlora` is false")
    assert "where `use_qlora` (" in said("use_lora: true; bits: 4")["args.bits"].message
    # a condition that a value closes
    assert "args.often" in said("gradient_accumulation_steps: 1; often: 7")
    assert "args.often" not in said("gradient_accumulation_steps: 2; often: 7")
    assert "args.folder" in said("do_not_randomize_output_dir: true; folder: z")
    found = said("logging_steps: 0; verbose: true")["args.verbose"]
    assert found.message.endswith("and `logging_steps` is 0")
    # shadowed
    found = said("shadowed: z")["args.shadowed"]
    assert (found.code, found.severity) == ("shadowed-key", "warning")
    assert found.message == (
        "`shadowed` does nothing: `first` comes before it (open_instruct/helper.py:4 is never reached)"
    )


def test_off_by_its_own_value_is_only_noted(said: Judge) -> None:
    for line, severity in (
        ("forgotten_flag: false", "note"),
        ("forgotten_flag: true", "warning"),
        ("forgotten_list: []", None),
        ("forgotten_list: [a]", "warning"),
        ("forgotten_list: null", None),
    ):
        assert [f.severity for f in said(line).values()] == ([severity] if severity else [])


def test_what_acts_is_not_mentioned(said: Judge) -> None:
    for lines in (
        "use_lora: true; lora_rank: 8",
        "use_lora: true; use_qlora: true; bits: 4",
        # a default that says what is the case anyhow is off
        "verbose: false",
        "first: z",
        "num_train_epochs: 3",
        # ends early on purpose: everything after that is not judged by it
        "cache_dataset_only: true; num_train_epochs: 3; use_lora: true; lora_rank: 8",
        # launch itself prints every step
        "verbose: true",
        # the plan decides about these
        "often: 7",
        "folder: z",
    ):
        assert said(lines) == {}, lines


def test_refused_by_the_source(said: Judge) -> None:
    found = said("use_qlora: true")
    refused = found["args.use_qlora"]
    assert (refused.code, refused.severity, refused.layer) == (
        "refused-by-source",
        "error",
        "parser",
    )
    assert "raises ValueError where `not use_lora` and `use_qlora`" in refused.message
    later = said("spare: 200")["args.spare"]
    assert (later.code, later.layer) == ("refused-by-source", "run")
    assert later.help == "`cache_dataset_only` is false, `spare` is 200"
    assert said("spare: 100")["args.spare"].code == "unread-key"


def test_a_key_that_has_a_finding_gets_no_other(said: Judge, root: Path, write: Write) -> None:
    path = write("b.yaml", STAGE + "  forgotten: many\n")
    judged = stage.judge(load.load(path), locator=Locator(checkout=root, allow_unpinned=True))
    assert [f.code for f in judged.findings if f.key == "args.forgotten"] == ["bad-value"]


def test_an_argument_that_must_be_given(root: Path, write: Write) -> None:
    script = root / "open_instruct" / "finetune.py"
    text = script.read_text(encoding="utf-8")
    for name in ("model_name_or_path: str", "spare: int", "output_dir: str"):
        line = next(line for line in text.splitlines() if line.startswith(f"    {name}"))
        text = text.replace(line, f"    {name}")
    script.write_text(text, encoding="utf-8")
    where = f"open_instruct/finetune.py:{text.splitlines().index('    spare: int') + 1}"

    def judged(text: str) -> list[Finding]:
        path = write("b.yaml", text)
        told = stage.judge(load.load(path), locator=Locator(checkout=root, allow_unpinned=True))
        return [f for f in told.findings if f.severity == "error"]

    # the folder is named by launch
    (found,) = judged(STAGE)
    assert (found.code, found.layer, found.key, found.line) == (
        "missing-argument",
        "parser",
        "args.spare",
        2,
    )
    assert found.message == f"`spare` must be given: it has no default  ({where})"
    assert judged(STAGE + "  spare: 1\n") == []
    # one error for each: no rule says again that no model is named
    codes = [f.code for f in judged(STAGE.replace("  model_name_or_path: m\n", ""))]
    assert codes == ["missing-argument", "missing-argument"]
    # a misspelt one has its own error
    assert [f.code for f in judged(STAGE + "  sparee: 1\n")] == ["unknown-key"]


UNREAD = {
    "sft": "dataset_config_name dataset_mix_dir gs_bucket_path hf_metadata_dataset load_balancing_weight "
    "max_train_samples overwrite_cache preprocessing_num_workers save_to_hub tokenizer_name use_slow_tokenizer",
    "dpo": "cache_logprobs_only compile_model context_parallel_degree fsdp_num_replicas fsdp_shard_degree "
    "optimizer_kwargs optimizer_type overwrite_cache preprocessing_num_workers profiling report_to run_name "
    "save_to_hub send_slack_alerts tensor_parallel_degree tokenizer_name use_slow_tokenizer wandb_group_name",
}


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_at_the_pin(checkout: Path, name: str) -> None:
    """Said by the checkout's own source, not by the snapshot."""
    source = locate.locate("open_instruct", checkout=checkout)
    backend = BACKENDS["open_instruct"]
    told = facts.read(backend, source.packages, {}, [name])
    path = facts.schema_of(told, backend, name, "source", "x").path
    dead = {key for key, reads in path.reads.items() if not reads}
    assert dead >= set(UNREAD[name].split())
    assert not dead & {"model_name_or_path", "learning_rate", "packing", "seed", "use_liger_kernel"}
    assert not dead & {"checkpointing_steps", "attn_implementation", "max_seq_length"}
    assert path.shadows["tokenizer_name"].by == ("tokenizer_name_or_path",)


PINNED = [
    ("sft", "use_8bit_optimizer: true", "`use_qlora`"),
    ("sft", "lora_rank: 8", "`use_lora`"),
    ("sft", "use_lora: true; use_qlora: true; use_liger_kernel: true", "`not use_qlora`"),
    ("sft", "wandb_entity: me", "`with_tracking`"),
    ("sft", "oe_eval_max_length: 5", "`try_launch_beaker_eval_jobs`"),
    ("dpo", "gamma_beta_ratio: 0.5", "`loss_type == 'simpo'`"),
    ("dpo", "use_lora: true; activation_memory_budget: 0.5", "`use_qlora`"),
    ("dpo", "load_balancing_weight: 0.5", "`load_balancing_loss`"),
    ("dpo", "offload_optimizer: true", "`zero_stage is not None`"),
    ("dpo", "use_8bit_optimizer: true", "`use_qlora or dpo_use_paged_optimizer`"),
]
OPEN = [
    ("sft", "use_qlora: true; use_lora: true; use_8bit_optimizer: true"),
    ("sft", "use_liger_kernel: true"),
    ("sft", "with_tracking: true; wandb_entity: me"),
    ("sft", "cache_dataset_only: true; learning_rate: 0.1; num_train_epochs: 3; packing: true"),
    ("dpo", "loss_type: simpo; gamma_beta_ratio: 0.5"),
    ("dpo", "use_lora: true; use_qlora: true; activation_memory_budget: 0.5"),
    ("dpo", "zero_stage: 3; offload_optimizer: true"),
    ("dpo", "dpo_use_paged_optimizer: true; use_8bit_optimizer: true"),
]
HEADS = {
    "sft": f"{STAGE}  push_to_hub: false\n  try_launch_beaker_eval_jobs: false\n",
    "dpo": "stage: dpo\nargs:\n  model_name_or_path: m\n  mixer_list: [a, 1.0]\n"
    "  push_to_hub: false\n  try_launch_beaker_eval_jobs: false\n",
}


def by_snapshot(write: Write, name: str, lines: str) -> dict[str, Finding]:
    """What the committed facts say of the last line."""
    path = write("p.yaml", HEADS[name] + "".join(f"  {line}\n" for line in lines.split("; ")))
    judged = stage.judge(load.load(path), locator=Locator())
    return {str(f.key): f for f in judged.findings if f.code == "conditional-key"}


def test_conditions_at_the_pin(write: Write) -> None:
    for name, lines, condition in PINNED:
        key = lines.split("; ")[-1].partition(":")[0]
        found = by_snapshot(write, name, lines)[f"args.{key}"]
        assert condition in found.message and found.severity == "warning"
    for name, lines in OPEN:
        assert by_snapshot(write, name, lines) == {}, lines
