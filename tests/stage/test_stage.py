"""A config judged: every fault at once, each in its place, and no stage unless there is none."""

import json
from collections.abc import Callable
from pathlib import Path

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
  learning_rate: 1e-4
"""
TRL = "stage: sft\nbackend: trl\nargs:\n  model_name_or_path: m\n  dataset_name: d\n"
Judge = Callable[..., Judged]


@pytest.fixture(autouse=True)
def only_the_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LAUNCH_OPEN_INSTRUCT", raising=False)
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path / "nowhere")
    monkeypatch.setattr(locate, "FOUND_IN", ())
    monkeypatch.setattr(locate, "find_package", lambda name, search=None: None)


@pytest.fixture
def judge(write: Write) -> Judge:
    """Judge the text of a stage file."""

    def judge_text(
        text: str, *overrides: str, asked: str | None = None, name: str = "a.yaml"
    ) -> Judged:
        return stage.judge_stage_file(load.load(write(name, text), overrides), stage=asked)

    return judge_text


def only(judged: Judged) -> Finding:
    (finding,) = judged.findings
    return finding


def codes(judged: Judged) -> set[str]:
    return {finding.code for finding in judged.findings}


def brief(judged: Judged) -> list[str]:
    """Each finding as `line: code (layer)`."""
    return [f"{finding.line}: {finding.code} ({finding.layer})" for finding in judged.findings]


@pytest.mark.parametrize("text", [SFT, DPO, TRL], ids=["sft", "dpo", "trl"])
def test_a_valid_file(judge: Judge, text: str) -> None:
    judged = judge(text)
    assert judged.findings == ()
    valid = stage.validate(judged)
    assert valid.name == "a"
    assert valid.entry.script.endswith(".py")
    assert valid.args["model_name_or_path"] == "m"


def test_validate_raises_all_findings(judge: Judge) -> None:
    wrong = judge(SFT, "sede=1", "learning_rate=x")
    with pytest.raises(InvalidConfig) as raised:
        stage.validate(wrong)
    assert raised.value.findings == wrong.findings
    assert len(wrong.findings) == 2
    warned = judge(SFT, "dataset_mixer_list[1]=1")
    assert stage.validate(warned).findings == warned.findings


def test_all_faults_of_a_file_at_once(judge: Judge) -> None:
    judged = judge("""\
stage: sft
deepspeed: zero9
batch: {global: 0}
expect: {liger: maybe}
colour: red
learning_rate: 1
args:
  model_name_or_path: m
  dataset_mixer_list: [a, 1]
  use_liger_kernal: true
  use_flash_attn: true
  chat_template: tulu
  mixer_list: [a, 1.0]
  num_train_epochs: two
  dataset_cache_mode: s3
  push_to_hub: false
  seed: 1
  seed: 2
  learning_rat: 1e-5
""")
    assert brief(judged) == [
        "2: bad-deepspeed (launch)",
        "3: bad-batch (launch)",
        "4: bad-expect (launch)",
        "5: unknown-option (launch)",
        "6: unknown-option (launch)",
        "9: one-sample (run)",
        "10: unknown-key (parser)",
        "11: removed-key (parser)",
        "12: renamed-key (launch)",
        "13: renamed-key (parser)",
        "14: bad-value (parser)",
        "15: bad-value (parser)",
        "16: beaker-without-push (parser)",
        "18: duplicate-key (launch)",
        "19: abbreviated-key (launch)",
    ]
    assert {finding.file for finding in judged.findings} == {str(judged.config.path)}


@pytest.mark.parametrize(
    "line, code, words",
    [
        ("use_liger_kernal: true", "unknown-key", ["FlatArguments", "mean `use_liger_kernel`?"]),
        ("use_flash_attn: true", "removed-key", ["#1567", "delete the line"]),
        ("chat_template: a", "renamed-key", ["write `chat_template_name`", "silently take it"]),
        ("num_epochs: 2", "renamed-key", ["DPO's name", "write `num_train_epochs`"]),
        ("beta: 5", "unknown-key", ["available only in: dpo on open_instruct, dpo on trl"]),
        ("deepspeed: zero2", "unknown-key", ["it goes beside `args:`"]),
        ("learning-rate: 1", "abbreviated-key", ["write `learning_rate`"]),
        ("no_push_to_hub: true", "negated-key", ["write `push_to_hub: true` or `push"]),
        ("frobnicate: 1", "unknown-key", [f"at {PIN[:12]} has no such argument"]),
        ("seed: [1, 2]", "bad-value", ["takes one value, got 2", "type is int", "finetune.py:"]),
        ("learning_rate: -1e-5", "bad-value", ["read as a flag"]),
        ("dataset_cache_mode: no", "bad-value", ["not one of hf, local", "put the text in quotes"]),
        ("packing: []", "bad-value", ["an empty list", "read as true"]),
        ("exp_name: {a: 1}", "bad-value", ["a mapping", '{"a": 1}']),
        ("oe_eval_tasks: [a, null]", "bad-value", ["an entry is"]),
        ("exp_name: no", "bool-as-text", ["get the text False", "quotes"]),
    ],
)
def test_a_finding_says_what_to_write(judge: Judge, line: str, code: str, words: list[str]) -> None:
    finding = only(judge(f"{SFT}  {line}\n"))
    assert finding.code == code
    assert finding.line == 10
    for part in words:
        assert part in f"{finding.message} {finding.help}"


def test_trl_names_its_own_class(judge: Judge) -> None:
    judged = judge(f"{TRL}  max_seq_length: 8\n  packing_: true\n")
    finding = judged.findings[0]
    assert "`max_seq_length` is not a field of SFTConfig" in finding.message
    assert "write `max_length`" in str(finding.help)


def test_an_abbreviation_counts_for_what_upstream_takes_it_for(judge: Judge) -> None:
    text = SFT.replace("push_to_hub: false", "push_to_hu: false")
    judged = judge(text, "try_launch_beaker_eval_jobs=true")
    assert codes(judged) == {"abbreviated-key", "beaker-without-push"}


def test_the_mixer_mapping_is_explained_and_nothing_else_is_said_of_data(judge: Judge) -> None:
    judged = judge(SFT.replace("dataset_mixer_list: [a, 1.0]", "dataset_mixer: {a: 1.0}"))
    assert "write the sets as `dataset_mixer_list:" in str(only(judged).help)


def test_a_forgotten_stage_is_guessed_and_the_rest_is_judged(judge: Judge) -> None:
    text = DPO.replace("stage: dpo\n", "backend: open_instruct\n")
    judged = judge(f"{text}  frobnicate: 1\n")
    assert brief(judged) == ["1: bad-stage (launch)", "8: unknown-key (parser)"]
    assert judged.stage == "dpo"


@pytest.fixture
def judge_older(write: Write) -> Judge:
    """Judge by a commit whose DPO has SFT's names for its data and epochs, and `dpo_beta`."""
    names = sorted(BACKENDS["open_instruct"].STAGES["sft"].names.needed)
    for script, own in (("finetune", "report_to"), ("dpo_tune_cache", "dpo_beta")):
        lines = ["from dataclasses import dataclass", "@dataclass", "class FlatArguments:"]
        for name in (*names, "dataset_name", own):
            lines.append(f"    {name}: str = None")
        lines.append("    dataset_mixer: dict = None")
        lines.append("args = ArgumentParserPlus((FlatArguments,)).parse()\n")
        module = write(f"oi/open_instruct/{script}.py", "\n".join(lines))
    locator = Locator(checkout=module.parent.parent, allow_unpinned=True)

    def judge_text(text: str, name: str = "a.yaml") -> Judged:
        return stage.judge_stage_file(load.load(write(name, text)), locator=locator)

    return judge_text


NAMELESS = "stage: sft\nargs:\n  model_name_or_path: m\n"


def test_another_commit_is_judged_by_its_own_names(judge_older: Judge) -> None:
    def errors(text: str) -> dict[str, str]:
        findings = judge_older(text).findings
        return {f.code: str(f.help) for f in findings if f.severity == "error"}

    text = "stage: dpo\nargs:\n  model_name_or_path: m\n  dataset_mixer: {a: 1.0}\n"
    assert "`dataset_mixer_list: [" in errors(text)["bad-value"]
    # of that commit's list, which has no default, the other sources of data are no rivals
    assert errors(f"{NAMELESS}  dataset_name: x\n") == {}
    assert "no-data" in errors(NAMELESS)


def test_a_key_that_only_the_pin_has_is_said_to_be_there(judge_older: Judge) -> None:
    judged = judge_older(f"{NAMELESS}  dataset_name: x\n  packing: true\n  chat_template: a\n")
    assert "unpinned-checkout" in codes(judged)
    help = {finding.key: str(finding.help) for finding in judged.findings}
    assert "it is one at the pin (open_instruct/finetune.py:" in help["args.packing"]
    # nor is a key to be renamed to one that is not there
    assert "chat_template_name" not in help["args.chat_template"]


def test_a_flat_file_of_another_commit_is_guessed_by_its_names(judge_older: Judge) -> None:
    assert judge_older("dataset_name: x\nreport_to: wandb\n", name="dpo.yaml").stage == "sft"
    assert judge_older("dataset_name: x\nnum_train_epochs: 1\ndpo_beta: 5\n").stage == "dpo"


def test_the_wrong_stage_is_one_finding(judge: Judge) -> None:
    judged = judge(SFT, asked="dpo")
    assert brief(judged) == ["1: wrong-stage (launch)"]
    assert "launch sft " in str(only(judged).help)
    assert judged.stage is None


@pytest.mark.parametrize(
    "text, name, expected",
    [
        ("mixer_list: [a]\nbeta: 5\n", "a.yaml", "dpo"),
        ("seed: 1\n", "a.yaml", "sft"),
        ("seed: 1\n", "my_dpo.yaml", "dpo"),
        # as upstream wrote them before January 2026
        ("num_train_epochs: 1\ngradient_checkpointing: true\ndpo_beta: 5\n", "a.yaml", "dpo"),
    ],
)
def test_the_stage_of_a_flat_file_is_guessed(
    judge: Judge, text: str, name: str, expected: str
) -> None:
    assert judge(text, name=name).stage == expected
    assert judge(text, name=name, asked="sft").stage == "sft"


WRAPPED = """\
num_gpus: 8
open_instruct:
  script: open_instruct/finetune.py
  deepspeed_config: zero3
  args:
    model_name_or_path: m
    dataset_mixer_list: a 1.0
    checkpointing_steps: 10
    push_to_hub: false
    try_launch_beaker_eval_jobs: false
    learning_rate: 1e-4
"""


def test_the_wrapped_shape(judge: Judge) -> None:
    valid = stage.validate(judge(WRAPPED))
    assert valid.options.stage == "sft"
    assert valid.options.gpus == 8
    assert valid.options.deepspeed_name == "zero3"
    assert valid.values["dataset_mixer_list"] == ["a", "1.0"]
    text = WRAPPED.replace("deepspeed_config: zero3", "deepspeed_conf: x")
    judged = judge(f"{text}    sede: 1\n")
    assert brief(judged) == ["4: unknown-option (launch)", "12: unknown-key (parser)"]


@pytest.mark.parametrize(
    "text",
    [
        "stage: sft\nstage: sft\nargs: {}\n",
        "stage: sft\nargs: {1: 2, [a]: b}\n",
        "stage: [sft]\nbackend: {a: 1}\nexpect: {liger: [x]}\nbatch: x\nargs: 5\n",
        "stage: sft\nbackend: {a: 1}\nexpect: {liger: [x]}\nbatch: x\ndeepspeed: [1]\n",
        "a: " + "[" * 5000,
        "stage: sft\nargs: {a: '${'}\n",
    ],
    ids=["twice", "keys", "types", "options", "depth", "interpolation"],
)
@pytest.mark.parametrize("command", ["validate-config", "sft"])
def test_a_bad_file_ends_with_exit_code_3_and_a_place(
    write: Write, capsys: pytest.CaptureFixture[str], text: str, command: str
) -> None:
    path = str(write("a.yaml", text))
    words = ["--gpus", "0", "--dry-run"] if command == "sft" else []
    assert main([command, path, *words, "--format", "json"]) == 3
    findings = json.loads(capsys.readouterr().out)["findings"]
    errors = [finding for finding in findings if finding["severity"] == "error"]
    assert errors
    for finding in errors:
        assert finding["file"] == path
        assert finding["line"]


OLMO_2 = "stage: dpo\nargs: {model_name_or_path: allenai/OLMo-2-1124-7B, mixer_list: [a/b, 1.0]"
PACKED_SFT = (
    "stage: sft\nargs: {model_name_or_path: o/m, dataset_mixer_list: [a, 1.0], packing: true"
)
LIGER = "expect: {liger: engaged}\n"
ISOLATED = "expect: {packing: isolated}\n"
ONE_ROW = "batch: {global: 8, per_device: 1}\n"
NOTHING_TO_PACK = "has nothing to pack"


@pytest.mark.parametrize(
    "text, severity, words",
    [
        (f"{LIGER}{OLMO_2}, packing: true}}", "error", "is not true"),
        (f"on_violation: warn\n{ISOLATED}{OLMO_2}}}", "warning", "is not true"),
        (f"script: dpo_olmo_core\n{LIGER}{OLMO_2}}}", "error", "dpo.py has no"),
        (f"{ISOLATED}{ONE_ROW}{PACKED_SFT}}}", "error", NOTHING_TO_PACK),
        (f"{ISOLATED}{PACKED_SFT}, per_device_train_batch_size: 1}}", "error", NOTHING_TO_PACK),
    ],
    ids=["off", "only warn", "script", "one row", "one row by an argument"],
)
def test_what_is_not_asked_for_cannot_be_expected(
    judge: Judge, text: str, severity: str, words: str
) -> None:
    judged = judge(text)
    (finding,) = [f for f in judged.findings if f.code == "impossible-expectation"]
    assert finding.severity == severity
    assert finding.line in (1, 2)
    assert "cannot hold" in finding.message
    assert words in finding.message
    assert ("packing-of-one" in codes(judged)) is (words == NOTHING_TO_PACK)


def test_what_is_asked_for_can_be_expected(judge: Judge) -> None:
    both = "expect: {liger: engaged, packing: isolated}\n"
    possible = [
        f"{both}{OLMO_2}, use_liger_kernel: true, packing: true}}",
        f"{ISOLATED}batch: {{global: 8, per_device: 2}}\n{PACKED_SFT}}}",
    ]
    for text in possible:
        assert not codes(judge(text)) & {"impossible-expectation", "packing-of-one"}
    # nothing is expected, but nothing is packed
    assert "packing-of-one" in codes(judge(f"{ONE_ROW}{PACKED_SFT}}}"))


@pytest.mark.parametrize(
    "text, setting, severities",
    [
        (SFT, "max_train_steps=6", ["warning"]),
        (SFT, "max_train_steps=8", []),
        (TRL, "max_steps=7", ["warning"]),
        (TRL, "max_steps=-1", []),
    ],
)
def test_a_trend_needs_steps(write: Write, text: str, setting: str, severities: list[str]) -> None:
    config = load.load(write("a.yaml", f"expect: {{trend: falling}}\n{text}"), [setting])
    findings = stage.judge_stage_file(config, locator=Snapshot()).findings
    about_trend = [finding for finding in findings if finding.key == "expect.trend"]
    assert [finding.severity for finding in about_trend] == severities


def test_any_trend_is_possible() -> None:
    assert stage.find_trend_fault(options.Options(stage="sft", expect={"trend": "any"}), 1) is None


def test_the_script_may_be_an_override(judge: Judge) -> None:
    judged = judge(f"{OLMO_2}}}", "script=dpo_olmo_core")
    assert judged.schema is not None
    assert judged.schema.script == "open_instruct/dpo.py"
