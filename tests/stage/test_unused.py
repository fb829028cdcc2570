"""Arguments that do nothing: what is said of them, for made sources and for the pinned one."""

import re
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
from launcher.upstream.schema import Schema
from launcher.upstream.trainers import BACKENDS

STAGE = "stage: sft\nargs:\n  model_name_or_path: m\n  dataset_mixer_list: [a, 1.0]\n"
QUIET = "  push_to_hub: false\n  try_launch_beaker_eval_jobs: false\n"
STAGES = {
    "sft": STAGE + QUIET,
    "dpo": STAGE.replace("sft", "dpo").replace("dataset_mixer_list", "mixer_list") + QUIET,
}
UNUSED = ("unread-key", "conditional-key", "shadowed-key", "refused-by-source")
Judge = Callable[[str], dict[str, Finding]]


@pytest.fixture
def root(write: Write) -> Path:
    """A checkout of another layout, with a script that leaves several arguments alone."""
    write("checkout/open_instruct/__init__.py", "")
    write("checkout/open_instruct/helper.py", HELPER)
    return write("checkout/open_instruct/finetune.py", FINETUNE).parent.parent


def find_unused(
    write: Write, head: str, settings: str, checkout: Path | None = None
) -> dict[str, Finding]:
    """The findings that arguments do nothing, by key; `settings` are joined by `; `."""
    lines = settings.replace("; ", "\n  ")
    path = write("a.yaml", f"{head}  {lines}\n")
    locator = Locator(checkout=checkout, allow_unpinned=checkout is not None)
    findings = stage.judge_stage_file(load.load(path), locator=locator).findings
    unused = [finding for finding in findings if finding.code in UNUSED]
    return {str(finding.key).removeprefix("args."): finding for finding in unused}


@pytest.fixture
def judge(root: Path, write: Write) -> Judge:
    return lambda settings: find_unused(write, STAGE, settings, root)


def test_an_argument_that_nothing_reads(judge: Judge) -> None:
    finding = judge("forgotten: 4")["forgotten"]
    assert finding.code == "unread-key"
    assert finding.severity == "warning"
    assert finding.layer == "run"
    assert finding.line == 5
    reason = "no read found on the path of open_instruct/finetune.py"
    assert finding.message == f"`forgotten` does nothing: {reason}"
    assert finding.help == "delete the line"


def test_an_argument_of_another_mode(judge: Judge) -> None:
    finding = judge("lora_rank: 8")["lora_rank"]
    assert finding.code == "conditional-key"
    assert finding.severity == "warning"
    assert finding.layer == "run"
    assert "read only where `use_lora` (open_instruct/finetune.py:" in finding.message
    assert finding.message.endswith("and `use_lora` is false")


def test_an_argument_under_several_conditions(judge: Judge) -> None:
    message = judge("bits: 4")["bits"].message
    assert "where `use_lora` and `use_qlora`" in message
    assert message.endswith("`use_lora` is false, `use_qlora` is false")
    assert "where `use_qlora` (" in judge("use_lora: true; bits: 4")["bits"].message


def test_a_condition_that_a_value_closes(judge: Judge) -> None:
    assert "often" in judge("gradient_accumulation_steps: 1; often: 7")
    assert "often" not in judge("gradient_accumulation_steps: 2; often: 7")
    assert "folder" in judge("do_not_randomize_output_dir: true; folder: z")
    verbose = judge("logging_steps: 0; verbose: true")["verbose"]
    assert verbose.message.endswith("and `logging_steps` is 0")


def test_an_argument_that_another_one_shadows(judge: Judge) -> None:
    finding = judge("shadowed: z")["shadowed"]
    assert finding.code == "shadowed-key"
    assert finding.severity == "warning"
    reason = "`first` comes before it (open_instruct/helper.py:4 is never reached)"
    assert finding.message == f"`shadowed` does nothing: {reason}"


@pytest.mark.parametrize(
    "setting, severities",
    [
        ("forgotten_flag: false", ["note"]),
        ("forgotten_flag: true", ["warning"]),
        ("forgotten_list: []", []),
        ("forgotten_list: [a]", ["warning"]),
        ("forgotten_list: null", []),
    ],
)
def test_off_by_its_own_value_is_only_noted(
    judge: Judge, setting: str, severities: list[str]
) -> None:
    assert [finding.severity for finding in judge(setting).values()] == severities


@pytest.mark.parametrize(
    "settings",
    [
        "use_lora: true; use_qlora: true; bits: 4; lora_rank: 8",
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
    ],
)
def test_what_acts_is_not_mentioned(judge: Judge, settings: str) -> None:
    assert judge(settings) == {}


def test_a_value_that_the_source_refuses(judge: Judge) -> None:
    first = judge("use_qlora: true")["use_qlora"]
    assert first.code == "refused-by-source"
    assert first.severity == "error"
    assert first.layer == "parser"
    assert "raises ValueError where `not use_lora` and `use_qlora`" in first.message
    later = judge("spare: 200")["spare"]
    assert later.code == "refused-by-source"
    assert later.layer == "run"
    assert later.help == "`cache_dataset_only` is false, `spare` is 200"
    assert judge("spare: 100")["spare"].code == "unread-key"


def test_a_key_that_has_a_finding_gets_no_other(judge: Judge) -> None:
    assert judge("forgotten: many") == {}


def test_an_argument_that_must_be_given(root: Path, write: Write) -> None:
    script = root / "open_instruct" / "finetune.py"
    required = r"^(    (?:model_name_or_path: str|spare: int|output_dir: str)).*$"
    text = re.sub(required, r"\1", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    script.write_text(text, encoding="utf-8")
    line = text.splitlines().index("    spare: int") + 1

    def errors(text: str) -> list[Finding]:
        config = load.load(write("b.yaml", text))
        judged = stage.judge_stage_file(config, locator=Locator(checkout=root, allow_unpinned=True))
        return [finding for finding in judged.findings if finding.severity == "error"]

    # the folder is named by launch
    (finding,) = errors(STAGE)
    assert finding.code == "missing-argument"
    assert finding.layer == "parser"
    assert finding.key == "args.spare"
    assert finding.line == 2
    where = f"open_instruct/finetune.py:{line}"
    assert finding.message == f"`spare` must be given: it has no default  ({where})"
    assert errors(f"{STAGE}  spare: 1\n") == []
    # one error for each: no rule says again that no model is named
    findings = errors(STAGE.replace("  model_name_or_path: m\n", ""))
    assert [finding.code for finding in findings] == ["missing-argument"] * 2
    # a misspelt one has its own error
    (finding,) = errors(f"{STAGE}  sparee: 1\n")
    assert finding.code == "unknown-key"


UNREAD = {
    "sft": """
        dataset_config_name dataset_mix_dir gs_bucket_path hf_metadata_dataset
        load_balancing_weight max_train_samples overwrite_cache preprocessing_num_workers
        save_to_hub tokenizer_name use_slow_tokenizer
    """,
    "dpo": """
        cache_logprobs_only compile_model context_parallel_degree fsdp_num_replicas
        fsdp_shard_degree optimizer_kwargs optimizer_type overwrite_cache
        preprocessing_num_workers profiling report_to run_name save_to_hub send_slack_alerts
        tensor_parallel_degree tokenizer_name use_slow_tokenizer wandb_group_name
    """,
}
READ = """
    model_name_or_path learning_rate packing seed use_liger_kernel checkpointing_steps
    attn_implementation max_seq_length
"""


@pytest.fixture(scope="module")
def schemas(checkout: Path) -> dict[str, Schema]:
    """Of the checkout's own source, not of the snapshot."""
    source = locate.locate("open_instruct", checkout=checkout)
    backend = BACKENDS["open_instruct"]
    read = facts.read_facts(backend, source.packages, {}, list(UNREAD))
    return {name: facts.build_schema(read, backend, name, "source", "x") for name in UNREAD}


@pytest.mark.parametrize("name", UNREAD)
def test_what_the_checkout_reads(schemas: dict[str, Schema], name: str) -> None:
    path = schemas[name].path
    unread = {key for key, reads in path.reads.items() if not reads}
    assert unread >= set(UNREAD[name].split())
    assert not unread & set(READ.split())
    assert path.shadows["tokenizer_name"].by == ("tokenizer_name_or_path",)


@pytest.mark.parametrize(
    "name, settings, condition",
    [
        ("sft", "use_8bit_optimizer: true", "`use_qlora`"),
        ("sft", "use_lora: true; use_qlora: true; use_liger_kernel: true", "`not use_qlora`"),
        ("sft", "wandb_entity: me", "`with_tracking`"),
        ("dpo", "gamma_beta_ratio: 0.5", "`loss_type == 'simpo'`"),
        ("dpo", "use_lora: true; activation_memory_budget: 0.5", "`use_qlora`"),
        ("dpo", "offload_optimizer: true", "`zero_stage is not None`"),
        ("dpo", "use_8bit_optimizer: true", "`use_qlora or dpo_use_paged_optimizer`"),
    ],
)
def test_a_condition_at_the_pin(write: Write, name: str, settings: str, condition: str) -> None:
    key = settings.rpartition("; ")[2].partition(":")[0]
    finding = find_unused(write, STAGES[name], settings)[key]
    assert finding.code == "conditional-key"
    assert finding.severity == "warning"
    assert condition in finding.message


@pytest.mark.parametrize(
    "name, settings",
    [
        ("sft", "use_qlora: true; use_lora: true; use_8bit_optimizer: true"),
        ("sft", "with_tracking: true; wandb_entity: me"),
        ("sft", "cache_dataset_only: true; learning_rate: 0.1; packing: true"),
        ("dpo", "loss_type: simpo; gamma_beta_ratio: 0.5"),
        ("dpo", "use_lora: true; use_qlora: true; activation_memory_budget: 0.5"),
        ("dpo", "zero_stage: 3; offload_optimizer: true"),
        ("dpo", "dpo_use_paged_optimizer: true; use_8bit_optimizer: true"),
    ],
)
def test_a_condition_that_holds_at_the_pin(write: Write, name: str, settings: str) -> None:
    unused = find_unused(write, STAGES[name], settings)
    assert "conditional-key" not in [finding.code for finding in unused.values()]
