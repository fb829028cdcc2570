"""A config judged: every fault at once, each in its place, and no stage unless there is none."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from verdicts import Snapshot

from launcher.cli.main import main
from launcher.config import load
from launcher.errors import Finding, InvalidConfig
from launcher.stage import options, stage
from launcher.stage.stage import Judged
from launcher.upstream import locate
from launcher.upstream.locate import Locator
from launcher.upstream.open_instruct import PIN
from launcher.upstream.trainers import BACKENDS

SFT = """\
stage: sft
deepspeed: zero2
batch: {global: 128, per_device: 16}
args:
  model_name_or_path: m
  dataset_mixer_list: [a, 1.0]
  checkpointing_steps: epoch
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
"""
DPO = """\
stage: dpo
args:
  model_name_or_path: m
  mixer_list: [a, 1.0]
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
"""
TRL = "stage: sft\nbackend: trl\nargs:\n  model_name_or_path: m\n  dataset_name: d\n"


@pytest.fixture(autouse=True)
def only_the_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LAUNCH_OPEN_INSTRUCT", raising=False)
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path / "nowhere")
    monkeypatch.setattr(locate, "FOUND_IN", ())
    monkeypatch.setattr(locate, "find_package", lambda name, search=None: None)


@pytest.fixture
def judged(write: Write) -> Any:
    def of(text: str, *overrides: str, asked: str | None = None, name: str = "a.yaml") -> Judged:
        return stage.judge(load.load(write(name, text), overrides), stage=asked)

    return of


def one(judged: Judged) -> Finding:
    (finding,) = judged.findings
    return finding


def brief(judged: Judged) -> list[tuple[str, str, int | None]]:
    return [(f.code, f.layer, f.line) for f in judged.findings]


def test_a_valid_file(judged: Any) -> None:
    for text in (SFT, DPO, TRL):
        found = judged(text)
        assert found.findings == ()
        made = stage.validate(found)
        assert made.name == "a" and made.entry.script.endswith(".py")
        assert made.args["model_name_or_path"] == "m"


def test_validate_raises_all_findings_and_under_strict_warnings_too(judged: Any) -> None:
    found = judged(SFT, "sede=1", "learning_rate=x")
    with pytest.raises(InvalidConfig) as raised:
        stage.validate(found)
    assert raised.value.findings == found.findings
    assert len(found.findings) == 2
    warned = judged(SFT, "dataset_mixer_list[1]=1")
    stage.validate(warned)
    with pytest.raises(InvalidConfig):
        stage.validate(warned, strict=True)


def test_all_faults_of_a_file_at_once(judged: Any) -> None:
    found = judged(
        "stage: sft\ndeepspeed: zero9\nbatch: {global: 0}\nexpect: {liger: maybe}\ncolour: red\n"
        "learning_rate: 1\nargs:\n  model_name_or_path: m\n  dataset_mixer_list: [a, 1]\n"
        "  use_liger_kernal: true\n  use_flash_attn: true\n  chat_template: tulu\n"
        "  mixer_list: [a, 1.0]\n  num_train_epochs: two\n  dataset_cache_mode: s3\n"
        "  push_to_hub: false\n  seed: 1\n  seed: 2\n  learning_rat: 1e-5\n"
    )
    assert brief(found) == [
        ("bad-deepspeed", "launch", 2), ("bad-batch", "launch", 3), ("bad-expect", "launch", 4),
        ("unknown-option", "launch", 5), ("unknown-option", "launch", 6), ("one-sample", "run", 9),
        ("unknown-key", "parser", 10), ("removed-key", "parser", 11), ("renamed-key", "launch", 12),
        ("renamed-key", "parser", 13), ("bad-value", "parser", 14), ("bad-value", "parser", 15),
        ("beaker-without-push", "parser", 16), ("duplicate-key", "launch", 18),
        ("abbreviated-key", "launch", 19),
    ]  # fmt: skip
    assert {f.file for f in found.findings} == {str(found.config.path)}


def test_what_a_user_reads(judged: Any) -> None:
    for text, code, parts in (
        ("use_liger_kernal: true", "unknown-key", ["FlatArguments", "mean `use_liger_kernel`?", "finetune.py:"]),
        ("use_flash_attn: true", "removed-key", ["#1567", "delete the line"]),
        ("chat_template: tulu", "renamed-key", ["write `chat_template_name`", "silently take it"]),
        ("num_epochs: 2", "renamed-key", ["DPO's name", "write `num_train_epochs`"]),
        ("beta: 5", "unknown-key", ["available only in: dpo on open_instruct, dpo on trl"]),
        ("deepspeed: zero2", "unknown-key", ["it goes beside `args:`"]),
        ("learning-rate: 1", "abbreviated-key", ["write `learning_rate`"]),
        ("no_push_to_hub: true", "negated-key", ["write `push_to_hub: true` or `push_to_hub: false`"]),
        ("frobnicate: 1", "unknown-key", [f"at {PIN[:12]} has no such argument"]),
        ("seed: [1, 2]", "bad-value", ["takes one value, got 2", "its type is int", "finetune.py:"]),
        ("learning_rate: -1e-5", "bad-value", ["read as a flag"]),
        ("dataset_cache_mode: no", "bad-value", ["not one of hf, local", "put the text in quotes"]),
        ("packing: []", "bad-value", ["an empty list", "read as true"]),
        ("exp_name: {a: 1}", "bad-value", ["a mapping", '{"a": 1}']),
        ("oe_eval_tasks: [a, null]", "bad-value", ["an entry is"]),
        ("exp_name: no", "bool-as-text", ["get the text False", "quotes"]),
    ):  # fmt: skip
        finding = one(judged(f"{SFT}  {text}\n"))
        assert (finding.code, finding.line) == (code, 10)
        words = f"{finding.message} {finding.help}"
        assert all(part in words for part in parts), words


def test_trl_names_its_own_class_and_an_abbreviation_counts(judged: Any) -> None:
    found = judged(f"{TRL}  max_seq_length: 8\n  packing_: true\n")
    assert "`max_seq_length` is not a field of SFTConfig" in found.findings[0].message
    assert "write `max_length`" in (found.findings[0].help or "")
    # an abbreviation counts for what upstream takes it for
    found = judged(
        SFT.replace("push_to_hub: false", "push_to_hu: false").replace("jobs: false", "jobs: true")
    )
    assert {f.code for f in found.findings} == {"abbreviated-key", "beaker-without-push"}
    # the mixer mapping is explained and nothing else is said of data
    found = judged(SFT.replace("dataset_mixer_list: [a, 1.0]", "dataset_mixer: {a: 1.0}"))
    assert "write the sets as `dataset_mixer_list:" in (one(found).help or "")
    # a forgotten stage is guessed and the rest is judged
    found = judged(f"{DPO}  frobnicate: 1\n".replace("stage: dpo\n", "backend: open_instruct\n"))
    assert brief(found) == [("bad-stage", "launch", 1), ("unknown-key", "parser", 7)]
    assert found.stage == "dpo"


@pytest.fixture
def older(write: Write) -> Any:
    """Judges a file by a commit whose DPO has SFT's names for its data and epochs, and `dpo_beta`."""
    head = "from dataclasses import dataclass, field\n@dataclass\nclass "
    needed = BACKENDS["open_instruct"].STAGES["sft"].names.needed
    common = "".join(f"    {name}: str = None\n" for name in sorted(needed))
    common += "    dataset_name: str = None\n    dataset_mixer: dict = None\n"
    for script, own in (("finetune", "report_to"), ("dpo_tune_cache", "dpo_beta")):
        text = f"{head}FlatArguments:\n{common}    {own}: str = None\n"
        text += "args = ArgumentParserPlus((FlatArguments,)).parse()\n"
        checkout = write(f"oi/open_instruct/{script}.py", text).parent.parent
    locator = Locator(checkout=checkout, allow_unpinned=True)

    def of(text: str, name: str = "a.yaml") -> Judged:
        return stage.judge(load.load(write(name, text)), locator=locator)

    return of


def told(judged: Judged) -> dict[str, str]:
    return {f.code: f.help or "" for f in judged.findings if f.severity == "error"}


def test_another_commit_is_judged_by_its_own_names(older: Any) -> None:
    found = older("stage: dpo\nargs:\n  model_name_or_path: m\n  dataset_mixer: {a: 1.0}\n")
    assert "`dataset_mixer_list: [" in told(found)["bad-value"]
    # of that commit's list, which has no default, the other sources of data are no rivals
    found = older("stage: sft\nargs:\n  model_name_or_path: m\n  dataset_name: x\n")
    assert told(found) == {}
    assert "no-data" in told(older("stage: sft\nargs:\n  model_name_or_path: m\n"))
    # what only the pin has is said to be there
    found = older("stage: sft\nargs:\n  dataset_name: x\n  packing: true\n  chat_template: a\n")
    assert "unpinned-checkout" in {f.code for f in found.findings}
    help = {f.key: f.help or "" for f in found.findings if f.code == "unknown-key"}
    assert "it is one at the pin (open_instruct/finetune.py:" in help["args.packing"]
    # nor is a key to be renamed to one that is not there
    assert "chat_template_name" not in help["args.chat_template"]
    # a flat file of another commit is guessed by its names
    assert older("dataset_name: x\nreport_to: wandb\n", name="dpo.yaml").stage == "sft"
    assert older("dataset_name: x\nnum_train_epochs: 1\ndpo_beta: 5\n").stage == "dpo"


def test_the_wrong_stage_is_one_finding(judged: Any) -> None:
    found = judged(SFT, asked="dpo")
    assert brief(found) == [("wrong-stage", "launch", 1)]
    assert "launch sft " in (one(found).help or "")
    assert found.stage is None
    # flat files are guessed by their names
    for text, name, expected in (
        ("mixer_list: [a]\nbeta: 5\n", "a.yaml", "dpo"),
        ("seed: 1\n", "a.yaml", "sft"),
        ("seed: 1\n", "my_dpo.yaml", "dpo"),
        # as upstream wrote them before January 2026
        ("num_train_epochs: 1\ngradient_checkpointing: true\ndpo_beta: 5\n", "a.yaml", "dpo"),
    ):
        assert judged(text, name=name).stage == expected
        assert judged(text, name=name, asked="sft").stage == "sft"


def test_the_wrapped_shape(judged: Any) -> None:
    text = (
        "num_gpus: 8\nopen_instruct:\n  script: open_instruct/finetune.py\n  deepspeed_config: zero3\n"
        "  args:\n    model_name_or_path: m\n    dataset_mixer_list: a 1.0\n    checkpointing_steps: 10\n"
        "    push_to_hub: false\n    try_launch_beaker_eval_jobs: false\n"
    )
    made = stage.validate(judged(text))
    assert (made.options.stage, made.options.gpus, made.options.deepspeed_name) == (
        "sft",
        8,
        "zero3",
    )
    assert made.values["dataset_mixer_list"] == ["a", "1.0"]
    found = judged(text.replace("deepspeed_config: zero3", "deepspeed_conf: x") + "    sede: 1\n")
    assert brief(found) == [("unknown-option", "launch", 4), ("unknown-key", "parser", 11)]


def test_all_files_that_the_checkout_ships_are_judged_with_every_fault_in_its_place(
    checkout: Path,
) -> None:
    paths = sorted((checkout / "configs" / "train_configs").rglob("*.y*ml"))
    assert len(paths) == 98
    for path in paths:
        found = stage.judge(load.load(path)).findings
        refused = [f for f in found if (f.severity, f.layer) == ("error", "parser")]
        # upstream refuses every one of them: tried with the real parser
        assert refused, path
        lines = path.read_text().splitlines()
        for finding in found:
            assert finding.file == str(path)
            assert finding.line is not None
            key = (finding.key or "").removeprefix("args.").partition("[")[0]
            if finding in refused:
                assert lines[finding.line - 1].lstrip().startswith(f"{key}:"), (path, finding)


def test_bad_files_end_with_exit_code_3_and_a_place(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in (
        b"stage: sft\nstage: sft\nargs: {}\n",
        b"stage: sft\nargs: {1: 2, [a]: b}\n",
        b"stage: [sft]\nbackend: {a: 1}\nexpect: {liger: [x]}\nbatch: x\nargs: 5\n",
        b"stage: sft\nbackend: {a: 1}\nexpect: {liger: [x]}\nbatch: x\ndeepspeed: [1]\n",
        b"a: " + b"[" * 5000,
        b"stage: sft\nargs: {a: '${'}\n",
    ):
        path = write("a.yaml", text)
        for command in (["validate-config"], ["sft", "--gpus", "0", "--dry-run"]):
            assert main([*command, str(path), "--format", "json"]) == 3
            findings = json.loads(capsys.readouterr().out)["findings"]
            errors = [f for f in findings if f["severity"] == "error"]
            assert errors and all(f["file"] == str(path) and f["line"] for f in errors)


BOTH = "use_liger_kernel: true, packing: true"
OLMO = "stage: dpo\nargs: {model_name_or_path: allenai/OLMo-2-1124-7B, mixer_list: [a/b, 1.0], "
SMALL = "stage: sft\nargs: {model_name_or_path: o/m, dataset_mixer_list: [a/b, 1.0], packing: true"
ONE = "batch: {global: 8, per_device: 1}\n"
ALONE = "has nothing to pack"
EXPECTED: tuple[tuple[str, str, str | None, str], ...] = (
    ("expect: {liger: engaged}\n", f"{OLMO}packing: true}}", "error", "is not true"),
    ("expect: {packing: on}\non_violation: warn\n", f"{OLMO}packing: false}}", "warning", "is not true"),
    ("script: dpo_olmo_core\nexpect: {liger: engaged}\n", f"{OLMO}{BOTH}}}", "error", "dpo.py has no"),
    ("expect: {liger: engaged, packing: isolated}\n", f"{OLMO}{BOTH}}}", None, ""),
    (f"expect: {{packing: isolated}}\n{ONE}", f"{SMALL}}}", "error", ALONE),
    ("expect: {packing: on}\n", f"{SMALL}, per_device_train_batch_size: 1}}", "error", ALONE),
    ("expect: {packing: isolated}\nbatch: {global: 8, per_device: 2}\n", f"{SMALL}}}", None, ""),
    (ONE, f"{SMALL}}}", None, ""),
)  # fmt: skip


def test_what_is_not_asked_for_cannot_be_expected(judged: Any) -> None:
    for lines, text, severity, part in EXPECTED:
        findings = judged(lines + text).findings
        found = [f for f in findings if f.code == "impossible-expectation"]
        assert [one.severity for one in found] == ([] if severity is None else [severity]), lines
        assert all(
            one.line in {1, 2} and "cannot hold" in one.message and part in one.message
            for one in found
        )
        alone = part == ALONE or lines == ONE
        assert ("packing-of-one" in {f.code for f in findings}) == alone


def test_a_trend_needs_steps(write: Write) -> None:
    for head, more, said in (
        ("", "max_train_steps: 6", True),
        ("", "max_train_steps: 8", False),
        ("backend: trl\n", "max_steps: 7", True),
        ("backend: trl\n", "max_steps: -1", False),
    ):
        data = "dataset_name: a" if head else "dataset_mixer_list: [a/b, 1.0]"
        args = f"args: {{model_name_or_path: m, {data}, {more}}}\n"
        text = f"stage: sft\n{head}expect: {{trend: falling}}\n{args}"
        judged = stage.judge(load.load(write("a.yaml", text)), locator=Snapshot())
        found = [f for f in judged.findings if f.code == "impossible-expectation"]
        assert [(f.severity, f.key) for f in found] == [("warning", "expect.trend")] * said
    assert stage.trend_fault(options.Options(stage="sft", expect={"trend": "any"}), 1) is None


def test_the_script_may_be_an_override(write: Write) -> None:
    data = "model_name_or_path: allenai/OLMo-2-1124-7B, mixer_list: [a/b, 1.0]"
    path = write("a.yaml", f"stage: dpo\nargs: {{{data}}}\n")
    judged = stage.judge(load.load(path, ["script=dpo_olmo_core"]))
    assert judged.schema is not None and judged.schema.script == "open_instruct/dpo.py"
