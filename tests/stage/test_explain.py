"""`launch explain` and `launch schema`: what is said of one argument, and of all of them."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from unused_arguments import FINETUNE, HELPER
from verdicts import Snapshot

from launcher.cli.main import main
from launcher.config import evaluation, keys, load, pipeline
from launcher.errors import Exit
from launcher.stage import explain
from launcher.stage.explain import Explained
from launcher.upstream import locate
from launcher.upstream.locate import Upstream
from launcher.upstream.meaning import find_meaning
from launcher.upstream.schema import Field
from launcher.upstream.trainers import BACKENDS

STAGE = """\
stage: sft
args:
  model_name_or_path: m
  dataset_mixer_list: [a, 1.0]
  learning_rate: 1e-5
  use_8bit_optimizer: true
deepspeed: zero2
"""
Run = Callable[..., str]


def explain_key(key: str, stage: str = "sft", backend: str = "open_instruct") -> Explained:
    (explained,) = explain.explain(key, locator=Snapshot(), stage_name=stage, backend=backend)
    return explained


def explain_in(path: Path, key: str, *overrides: str) -> Explained:
    """What is said of a key in a stage file."""
    config = load.load(path, overrides)
    (explained,) = explain.explain(key, locator=Snapshot(), config=config)
    return explained


def text_of(explained: Explained) -> str:
    return "\n".join(explained.lines())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; what it prints, on stderr where it fails."""

    def run_command(line: str, code: Exit = Exit.OK) -> str:
        assert main(shlex.split(line)) == code
        printed = capsys.readouterr()
        return printed.out if code is Exit.OK else printed.err

    return run_command


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    """Run a command line; the data of its answer."""
    return lambda line: json.loads(run(f"{line} --format json"))["data"]


def test_an_argument_is_explained_with_its_type_place_and_reads() -> None:
    liger = explain_key("use_liger_kernel")
    assert liger.field is not None
    assert liger.field.type == "bool"
    assert liger.field.default is False
    assert liger.field.where.startswith("open_instruct/finetune.py:")
    (read,) = liger.reads or ()
    assert read.where.startswith("open_instruct/finetune.py:")
    assert "not use_qlora" in read.when
    text = text_of(liger)
    assert "where model_name_or_path and not use_qlora" in text
    # whether the script only makes a cache is asked of everything: that is no news
    assert "cache_dataset_only" not in text


def test_of_what_stands_inside_an_argument_the_whole_is_explained() -> None:
    batch = explain_key("args.batch.per_device")
    assert batch.key == "batch"
    assert "global: a whole number above 0; rows per optimizer step" in text_of(batch)
    assert explain_key("dataset_mixer_list[1]").field is not None


def test_an_argument_that_never_acts() -> None:
    assert "no read found" in text_of(explain_key("max_train_samples"))
    tokenizer = explain_key("tokenizer_name")
    assert "tokenizer_name_or_path comes first" in text_of(tokenizer)
    assert tokenizer.as_json()["shadowed_by"] == ["tokenizer_name_or_path"]


def test_a_removed_argument_is_answered_with_its_pull_request() -> None:
    flash = explain_key("use_flash_attn")
    assert flash.field is None
    assert flash.known
    (change, *_) = flash.history
    assert change.what == "removed"
    assert change.pull == 1567
    assert "removed by #1567 (9e8e2187c, 2026-03-30)" in text_of(flash)


def test_the_origin_of_a_value(write: Write) -> None:
    parent = write("parent.yaml", STAGE)
    child = write("child.yaml", "extends: parent.yaml\non_hang: stop\nargs:\n  seed: 7\n")
    inherited = "from a parent, by `extends`"
    override = "learning_rate=2e-5"
    for words, value, origin, via in (
        (["seed"], 7, f"{child}:4", None),
        (["learning_rate"], 1e-5, f"{parent}:5", inherited),
        (["learning_rate", override], 2e-5, f"override `{override}`", None),
        (["weight_decay"], 0.0, "default, open_instruct/finetune.py:", None),
        (["logging_steps"], 1, "set by launch: ", None),
        (["on_hang"], "stop", f"{child}:2", None),
    ):
        setting = explain_in(child, *words).in_file
        assert setting is not None
        assert setting.value == value
        assert setting.origin.startswith(origin)
        assert setting.via == via
    assert explain_in(child, "on_violation").in_file is None


def test_the_findings_about_an_argument_are_shown(write: Write) -> None:
    explained = explain_in(write("a.yaml", STAGE), "args.use_8bit_optimizer")
    assert explained.in_file is not None
    (finding,) = explained.in_file.findings
    assert finding.code == "conditional-key"
    assert finding.line == 6
    assert "does nothing here" in text_of(explained)


def test_an_unknown_key_stage_or_backend_is_refused(run: Run) -> None:
    assert "`learning_rate`" in run("explain lerning_rate", code=Exit.USAGE)
    assert "is not one of" in run("explain seed --stage x", code=Exit.USAGE)
    assert "is not one of" in run("schema --backend x", code=Exit.USAGE)


def test_a_key_that_came_after_a_commit(run: Run, write: Write) -> None:
    head = "from dataclasses import dataclass\n@dataclass\nclass "
    script = f"{head}FlatArguments:\n"
    for name in sorted(BACKENDS["open_instruct"].STAGES["sft"].names.needed):
        script += f"    {name}: str = None\n"
    root = write("oi/open_instruct/finetune.py", script).parent.parent
    tokenizer = f"{head}TokenizerConfig:\n    a: int = 1\n"
    write("oi/open_instruct/dataset_transformation.py", tokenizer)
    options = f"--stage sft --open-instruct {root} --allow-unpinned"
    there = locate.load_snapshot("open_instruct")["fields"]["FlatArguments.push_to_hub"]["where"]
    assert f"it is one at the pin ({there})" in run(f"explain push_to_hub {options}")
    # and nothing is advised that is not there either
    run(f"explain chat_template {options}", code=Exit.USAGE)


@pytest.mark.parametrize("key", keys.KEYS)
def test_options_of_launch_say_what_they_take(key: str) -> None:
    option = keys.KEYS[key]
    explained = explain_key(key)
    assert explained.option is option
    assert f"  type       {option.shape}\n" in text_of(explained)
    assert f"  default    {option.default}" in text_of(explained)
    assert explained.as_json()["option"]["words"] == list(explained.words)


def test_the_words_of_an_option_are_those_that_are_read() -> None:
    expect = text_of(explain_key("expect"))
    for point, states in keys.EXPECT.items():
        assert f"{point}: {', '.join(states)}" in expect
    assert "  values     report, stop\n  default    report" in text_of(explain_key("on_hang"))
    probe = text_of(explain_key("probe"))
    assert "hang_factor: a whole number above 0, 20 unless set" in probe
    assert "dpo_olmo_core (dpo.py)" in text_of(explain_key("script", "dpo"))


def test_an_option_of_launch_and_an_argument_of_one_name_are_both_explained() -> None:
    deepspeed = text_of(explain_key("deepspeed", backend="trl"))
    assert "  defined    transformers/" in deepspeed
    assert "  option     launch's own" in deepspeed


def test_json(run_json: Callable[..., Any], write: Write) -> None:
    path = write("a.yaml", STAGE)
    (explained,) = run_json(f"explain learning_rate {path} seed=1")["explained"]
    assert explained["key"] == "learning_rate"
    assert explained["stage"] == "sft"
    assert explained["exists"] is True
    assert explained["here"] == {
        "value": 1e-5,
        "origin": f"{path}:5",
        "via": None,
        "words": ["1e-05"],
        "findings": [],
    }


def test_the_schema_lists_every_argument(run: Run) -> None:
    lines = run("schema --stage sft --backend open_instruct").splitlines()
    names = [line.split()[0] for line in lines[2:]]
    assert names == list(Snapshot().schema("open_instruct", "sft").fields)
    (row,) = [line for line in lines if line.startswith("max_train_samples ")]
    assert "no read found: give a number of samples" in row


def test_the_schema_for_editors(run: Run) -> None:
    text = run("schema --json-schema --backend trl")
    assert json.loads(text)["$schema"].startswith("http://json-schema.org/draft-07")
    # what is known of its reads is there to be hovered over
    assert "read only where" in text


def test_the_schema_for_machines(run_json: Callable[..., Any]) -> None:
    pinned, trl = run_json("schema --stage dpo")["schemas"]
    assert (pinned["stage"], pinned["backend"]) == ("dpo", "open_instruct")
    assert (trl["stage"], trl["backend"]) == ("dpo", "trl")
    (field,) = [field for field in pinned["fields"] if field["name"] == "compile_model"]
    assert field["reads"] == []


def test_a_commit_before_a_further_script_has_a_schema(run: Run, write: Write) -> None:
    write("oi/open_instruct/helper.py", HELPER)
    write("oi/open_instruct/finetune.py", FINETUNE)
    dpo = write("oi/open_instruct/dpo_tune_cache.py", FINETUNE)
    options = f"--backend open_instruct --open-instruct {dpo.parent.parent} --allow-unpinned"
    assert "forgotten_flag" in run(f"schema --json-schema {options}")
    # what a stage itself is started by has to be there
    dpo.unlink()
    run(f"schema --json-schema {options}", code=Exit.CONFIG)


TOKEN = "hf_" + "aB3" * 11
PASSWORD = "a-plain-password"
WITH_SECRETS = f"""\
stage: sft
args:
  model_name_or_path: m
  dataset_mixer_list: [a, 1.0]
  exp_name: {TOKEN}
  use_flash_attn: {TOKEN}
  additional_model_arguments:
    hub_token: {PASSWORD}
    other: {TOKEN}
"""
TRL_WITH_SECRETS = f"""\
stage: sft
backend: trl
args: {{model_name_or_path: m, dataset_name: a, hub_token: {PASSWORD}, run_name: {TOKEN}}}
"""


@pytest.mark.parametrize(
    "key, text, form",
    [
        ("additional_model_arguments", WITH_SECRETS, "text"),
        ("additional_model_arguments", WITH_SECRETS, "json"),
        ("hub_token", TRL_WITH_SECRETS, "text"),
        ("run_name", TRL_WITH_SECRETS, "json"),
    ],
    ids=["mapping as text", "mapping", "token as text", "name"],
)
def test_a_token_is_redacted(write: Write, run: Run, key: str, text: str, form: str) -> None:
    path = write("a.yaml", text)
    printed = run(f"explain {key} {path} --format {form}")
    assert "<redacted>" in printed
    assert TOKEN not in printed
    assert PASSWORD not in printed


SOURCE = '''
class Base:
    """Ours.

    Args:
        steps (`int`, *optional*):
            How many
            steps.
    """

    steps: int = 1

class Arguments(Base):
    rate: float = field(default=1.0, metadata={"help": "The " + "rate."})
    size: int = 8
    """The size."""
    plain: int = 0
'''


class Package:
    """A package of one module."""

    name = "pkg"

    def read(self, path: str) -> bytes | None:
        return SOURCE.encode() if path == "args.py" else None


@pytest.mark.parametrize(
    "name, line, owner, meaning",
    [
        ("rate", 14, "Arguments", "The rate."),
        ("size", 15, "Arguments", "The size."),
        ("steps", 11, "Base", "How many steps."),
        ("plain", 17, "Arguments", None),
        # the lines of the snapshot are not always those of the checkout
        ("rate", 99, "Arguments", "The rate."),
    ],
)
def test_the_meaning_is_upstreams_own(
    name: str, line: int, owner: str, meaning: str | None
) -> None:
    source = Upstream(
        backend="trl",
        root=Path("/x"),
        source="found",
        is_named=False,
        pin="1",
        version="1",
        packages={"pkg": Package()},
    )
    field = Field(name=name, type="int", kind="int", owner=owner, where=f"pkg/args.py:{line}")
    assert find_meaning(source, field) == meaning
    assert find_meaning(replace(source, packages={}), field) is None


def test_a_code_is_explained(run: Run) -> None:
    assert "the entry script has no such argument" in run("explain unknown-key")
    assert "did you mean `unknown-key`" in run("explain unknown-kez", code=Exit.USAGE)


def test_what_launch_derives_is_the_value_here(run: Run, write: Write) -> None:
    path = write("s.yaml", STAGE + "batch: {global: 128, per_device: 16}\n")

    def here(key: str, options: str = "") -> str:
        text = run(f"explain {key} {path} {options}")
        return text.partition("  here       ")[2].partition("\n")[0]

    accumulation = "gradient_accumulation_steps"
    assert here("per_device_train_batch_size") == f"16  (batch: {path}:8, on 1 GPU)"
    assert here(accumulation).startswith("8  (batch: ")
    assert here(accumulation, "--gpus 4").startswith("2  (batch: ")
    assert "(set by launch: " in here("dataset_local_cache_dir")


@pytest.mark.parametrize(
    "idea, backend, names",
    [
        ("lr", "open_instruct", ["learning_rate"]),
        ("epochs", "open_instruct", ["num_epochs", "num_train_epochs"]),
        # another tool's name
        ("cutoff_len", "trl", ["max_length"]),
        # a word of the name
        ("warmup", "open_instruct", ["warmup_ratio"]),
    ],
)
def test_what_people_call_an_argument(
    idea: str, backend: str, names: list[str], run_json: Callable[..., Any]
) -> None:
    explained = run_json(f"explain {idea} --backend {backend}")["explained"]
    assert sorted({row["key"] for row in explained}) == names


def test_both_trainers_are_explained_where_none_is_named(run_json: Callable[..., Any]) -> None:
    pinned, trl = run_json("explain max_length --stage sft")["explained"]
    assert (pinned["backend"], pinned["exists"]) == ("open_instruct", False)
    assert (trl["backend"], trl["exists"]) == ("trl", True)
    # a trainer that never had it is left out
    line = "explain do_not_randomize_output_dir --stage sft"
    (pinned,) = run_json(line)["explained"]
    assert pinned["backend"] == "open_instruct"


@pytest.mark.parametrize("key", [*pipeline.KEYS, *pipeline.STAGE_KEYS, "eval.command"])
def test_keys_of_pipelines_are_explained(key: str, run: Run) -> None:
    assert f"{key.partition('.')[0]}  (a key of pipeline files)" in run(f"explain {key}")


def test_the_parts_of_a_key_are_explained_once(run: Run) -> None:
    assert run("explain gates").count("loss_fall") == 1
    text = run("explain eval")
    for part in evaluation.KEYS:
        assert f"{part}: " in text
    assert "oe_eval_tasks" not in text
