"""`launch explain` and `launch schema`: what is said of one argument, and of all of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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
from launcher.upstream.meaning import meaning_of
from launcher.upstream.schema import Field
from launcher.upstream.trainers import BACKENDS

STAGE = """\
stage: sft
args:
  model_name_or_path: m
  dataset_mixer_list: [a, 1.0]
  learning_rate: 1e-5
  use_8bit_optimizer: true
"""


Out = Callable[..., str]


def one(key: str, stage: str = "sft", backend: str = "open_instruct") -> Explained:
    (told,) = explain.explain(key, locator=Snapshot(), stage_name=stage, backend=backend)
    return told


def of_file(key: str, path: Path, *overrides: str) -> Explained:
    (told,) = explain.explain(key, locator=Snapshot(), config=load.load(path, overrides))
    return told


def text(told: Explained) -> str:
    return "\n".join(told.lines())


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints."""

    def run(*words: str, code: Exit = Exit.OK) -> str:
        assert main([*words]) == code
        printed = capsys.readouterr()
        return printed.out if code is Exit.OK else printed.err

    return run


def test_what_is_explained_of_an_argument() -> None:
    told = one("use_liger_kernel")
    assert told.field is not None
    assert (told.field.type, told.field.default) == ("bool", False)
    assert told.field.where.startswith("open_instruct/finetune.py:")
    (read,) = told.reads or ()
    assert read.where.startswith("open_instruct/finetune.py:")
    assert "not use_qlora" in read.when
    shown = text(told)
    assert "where model_name_or_path and not use_qlora" in shown
    # whether the script only makes a cache is asked of everything: that is no news
    assert "cache_dataset_only" not in shown
    # of what stands inside an argument the whole is explained
    batch = one("args.batch.per_device")
    assert batch.key == "batch"
    assert "global: a whole number above 0; rows per optimizer step" in text(batch)
    assert one("dataset_mixer_list[1]").field is not None


def test_what_never_acts_and_what_was_removed() -> None:
    assert "no read found" in text(one("max_train_samples"))
    assert "tokenizer_name_or_path comes first" in text(one("tokenizer_name"))
    assert one("tokenizer_name").as_json()["shadowed_by"] == ["tokenizer_name_or_path"]
    # a removed argument is answered with its pull request
    told = one("use_flash_attn")
    assert told.field is None
    assert told.known
    assert told.history[0].what == "removed"
    assert told.history[0].pull == 1567
    assert "removed by #1567 (9e8e2187c, 2026-03-30)" in text(told)


def test_who_set_it(write: Write) -> None:
    parent = write("parent.yaml", STAGE)
    child = write("child.yaml", "extends: parent.yaml\non_hang: stop\nargs:\n  seed: 7\n")
    for key, overrides, value, origin, via in (
        ("seed", (), 7, f"{child}:4", None),
        ("learning_rate", (), 1e-5, f"{parent}:5", "from a parent, by `extends`"),
        ("learning_rate", ("learning_rate=2e-5",), 2e-5, "override `learning_rate=2e-5`", None),
        ("weight_decay", (), 0.0, "default, open_instruct/finetune.py:", None),
        ("logging_steps", (), 1, "set by launch: ", None),
        ("on_hang", (), "stop", f"{child}:2", None),
    ):
        here = of_file(key, child, *overrides).here
        assert here is not None and here.origin.startswith(origin), key
        assert (here.value, here.via) == (value, via)
    assert of_file("on_violation", child).here is None
    # and what was found of it
    told = of_file("args.use_8bit_optimizer", parent)
    assert told.here is not None
    (finding,) = told.here.findings
    assert (finding.code, finding.line) == ("conditional-key", 6)
    assert "does nothing here" in text(told)


def test_what_is_no_key_stage_or_backend(out: Out) -> None:
    assert "`learning_rate`" in out("explain", "lerning_rate", code=Exit.USAGE)
    for words in (["explain", "seed", "--stage", "x"], ["schema", "--backend", "x"]):
        assert "is not one of" in out(*words, code=Exit.USAGE)


def test_a_key_that_came_after_a_commit(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    needed = sorted(BACKENDS["open_instruct"].STAGES["sft"].names.needed)
    text = "from dataclasses import dataclass\n@dataclass\nclass FlatArguments:\n"
    fields = "".join(f"    {name}: str = None\n" for name in needed)
    root = write("oi/open_instruct/finetune.py", text + fields).parent.parent
    tokenizer = text.replace("FlatArguments", "TokenizerConfig") + "    a: int = 1\n"
    write("oi/open_instruct/dataset_transformation.py", tokenizer)
    asked = ["--stage", "sft", "--open-instruct", str(root), "--allow-unpinned"]
    assert main(["explain", "push_to_hub", *asked]) == Exit.OK
    there = locate.snapshot("open_instruct")["fields"]["FlatArguments.push_to_hub"]["where"]
    assert f"it is one at the pin ({there})" in capsys.readouterr().out
    # and nothing is advised that is not there either
    assert main(["explain", "chat_template", *asked]) == Exit.USAGE


def test_options_of_launch_say_what_they_take() -> None:
    for key, known in keys.KEYS.items():
        told = one(key)
        assert told.option is known
        assert f"  type       {known.shape}\n" in text(told)
        assert f"  default    {known.default}" in text(told)
        assert told.as_json()["option"]["words"] == list(told.words)
    # the words of an option are those that are read
    shown = text(one("expect"))
    assert all(f"{point}: {', '.join(states)}" in shown for point, states in keys.EXPECT.items())
    assert "  values     report, stop\n  default    report" in text(one("on_hang"))
    assert "hang_factor: a whole number above 0, 20 unless set" in text(one("probe"))
    assert "dpo_olmo_core (dpo.py)" in text(one("script", "dpo"))
    # TRL has an argument of that name: both are said
    both = text(one("deepspeed", backend="trl"))
    assert "  defined    transformers/" in both and "  option     launch's own" in both


def test_json(out: Out, write: Write) -> None:
    path = write("a.yaml", STAGE)
    envelope = json.loads(out("explain", "learning_rate", str(path), "seed=1", "--format", "json"))
    assert envelope["command"] == "explain"
    (told,) = envelope["data"]["explained"]
    assert (told["key"], told["stage"], told["exists"]) == ("learning_rate", "sft", True)
    here = {"value": 1e-5, "origin": f"{path}:5", "via": None, "words": ["1e-05"], "findings": []}
    assert told["here"] == here


def test_the_schema_lists_every_argument(out: Out) -> None:
    lines = out("schema", "--stage", "sft", "--backend", "open_instruct").splitlines()
    names = [line.split()[0] for line in lines[2:]]
    assert names == list(Snapshot().schema("open_instruct", "sft").fields)
    (row,) = (line for line in lines if line.startswith("max_train_samples "))
    assert "no read found: give a number of samples" in row


def test_the_schema_for_editors_and_machines(out: Out) -> None:
    told = json.loads(out("schema", "--json-schema", "--backend", "trl"))
    assert told["$schema"].startswith("http://json-schema.org/draft-07")
    # what is known of its reads is there to be hovered over
    assert "read only where" in json.dumps(told)
    # the schema for machines
    told = json.loads(out("schema", "--stage", "dpo", "--format", "json"))["data"]["schemas"]
    assert [(one["stage"], one["backend"]) for one in told] == [
        ("dpo", "open_instruct"),
        ("dpo", "trl"),
    ]
    fields = {field["name"]: field for field in told[0]["fields"]}
    assert fields["compile_model"]["reads"] == []


def test_a_commit_before_a_further_script_has_a_schema(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("oi/open_instruct/helper.py", HELPER)
    for name in ("finetune", "dpo_tune_cache"):
        root = write(f"oi/open_instruct/{name}.py", FINETUNE).parent.parent
    words = ["--backend", "open_instruct", "--open-instruct", str(root), "--allow-unpinned"]
    assert main(["schema", "--json-schema", *words]) == Exit.OK
    assert "forgotten_flag" in capsys.readouterr().out
    # what a stage itself is started by has to be there
    (root / "open_instruct" / "dpo_tune_cache.py").unlink()
    assert main(["schema", "--json-schema", *words]) == Exit.CONFIG


TOKEN = "hf_" + "aB3" * 11
SECRETS = f"""\
stage: sft
args:
  model_name_or_path: m
  dataset_mixer_list: [a, 1.0]
  exp_name: {TOKEN}
  use_flash_attn: {TOKEN}
  additional_model_arguments:
    hub_token: a-plain-password
    other: {TOKEN}
"""
TRL = f"""\
stage: sft
backend: trl
args: {{model_name_or_path: m, dataset_name: a, hub_token: a-plain-password, run_name: {TOKEN}}}
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_token_is_not_told(write: Write, form: str, out: Out) -> None:
    for key, content in (
        ("additional_model_arguments", SECRETS),
        ("hub_token", TRL),
        ("run_name", TRL),
    ):
        said = out("explain", key, str(write("a.yaml", content)), "--format", form)
        assert "<redacted>" in said
        assert TOKEN not in said and "a-plain-password" not in said


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


class _Tree:
    name = "pkg"

    def read(self, path: str) -> bytes | None:
        return SOURCE.encode() if path == "args.py" else None


def test_the_meaning_is_upstreams_own() -> None:
    source = Upstream(
        backend="trl",
        root=Path("/x"),
        source="found",
        is_named=False,
        pin="1",
        version="1",
        packages={"pkg": _Tree()},
    )
    for name, line, owner, text in (
        ("rate", 14, "Arguments", "The rate."),
        ("size", 15, "Arguments", "The size."),
        ("steps", 11, "Base", "How many steps."),
        ("plain", 17, "Arguments", None),
        # the lines of the snapshot are not always those of the checkout
        ("rate", 99, "Arguments", "The rate."),
    ):
        known = Field(name=name, type="int", kind="int", owner=owner, where=f"pkg/args.py:{line}")
        assert meaning_of(source, known) == text
        assert meaning_of(replace(source, packages={}), known) is None


def test_a_code_is_explained(out: Out) -> None:
    assert "the entry script has no such argument" in out("explain", "unknown-key")
    assert "did you mean `unknown-key`" in out("explain", "unknown-kez", code=Exit.USAGE)


def test_what_launch_derives_is_the_value_here(out: Out, write: Write) -> None:
    path = write("s.yaml", STAGE + "batch: {global: 128, per_device: 16}\n")

    def here(key: str, *words: str) -> str:
        return next(
            line for line in out("explain", key, str(path), *words).splitlines() if "here  " in line
        )

    assert here("per_device_train_batch_size") == f"  here       16  (batch: {path}:7, on 1 GPU)"
    assert here("gradient_accumulation_steps").startswith("  here       8  (batch: ")
    assert here("gradient_accumulation_steps", "--gpus", "4").startswith("  here       2  (batch: ")
    assert "(set by launch: " in here("dataset_local_cache_dir")


def test_a_key_of_launchs_own_is_explained_once(out: Out) -> None:
    assert out("explain", "gates").count("loss_fall") == 1


@pytest.mark.parametrize(
    ("idea", "backend", "names"),
    [
        ("lr", "open_instruct", ["learning_rate"]),
        ("model", "trl", ["model_name_or_path"]),
        ("epochs", "open_instruct", ["num_epochs", "num_train_epochs"]),
        ("cutoff_len", "trl", ["max_length"]),
        ("warmup", "open_instruct", ["warmup_ratio"]),
    ],
)
def test_what_people_call_an_argument(
    idea: str, backend: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", idea, "--backend", backend, "--format", "json"]) == Exit.OK
    explained = json.loads(capsys.readouterr().out)["data"]["explained"]
    assert sorted({one["key"] for one in explained}) == names


def test_both_trainers_are_explained_where_none_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "max_length", "--stage", "sft", "--format", "json"]) == Exit.OK
    explained = json.loads(capsys.readouterr().out)["data"]["explained"]
    assert [(row["backend"], row["exists"]) for row in explained] == [
        ("open_instruct", False),
        ("trl", True),
    ]
    # a trainer that never had it is left out
    assert (
        main(["explain", "do_not_randomize_output_dir", "--stage", "sft", "--format", "json"])
        == Exit.OK
    )
    explained = json.loads(capsys.readouterr().out)["data"]["explained"]
    assert [row["backend"] for row in explained] == ["open_instruct"]


@pytest.mark.parametrize("key", [*pipeline.KEYS, *pipeline.STAGE_KEYS, "eval.command"])
def test_keys_of_pipelines_are_explained(key: str, out: Out) -> None:
    assert f"{key.partition('.')[0]}  (a key of pipeline files)" in out("explain", key)


def test_the_parts_of_an_evaluation_are_explained(out: Out) -> None:
    text = out("explain", "eval")
    assert all(f"{part}: " in text for part in evaluation.KEYS)
    assert "oe_eval_tasks" not in text
