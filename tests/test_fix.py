"""Mending: only the faulty spans change, nothing gets worse, and what is not certain is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parser_agreement import ask, words_of

from launcher import config, fix, stage
from launcher.errors import Finding, InvalidConfig, NotReady, errors
from launcher.fix import Fix

SFT = "stage: sft\nargs:\n  model_name_or_path: m\n"
DPO = "stage: dpo\nargs:\n  model_name_or_path: m\n  mixer_list: [a, 1.0]\n"
TRL = "stage: sft\nbackend: trl\nargs:\n  model_name_or_path: m\n  dataset_name: d\n"
DATA = "  dataset_mixer_list: [a, 1.0]\n"


def mended(write: Write, text: str, name: str = "a.yaml") -> Fix:
    """The fix of a file; it is written, loads, and there is nothing more to mend in it."""
    path = write(name, text)
    found = fix.of_file(path)
    fix.apply(found)
    assert path.read_bytes().decode("utf-8-sig") == found.after
    again = fix.of_file(path)
    assert not again.changed and not again.changes
    return found


def told(found: Fix) -> list[str]:
    return [str(change) for change in found.changes]


def reasons(found: Fix) -> dict[str | None, str]:
    """Why a fault was left, by its key."""
    return {
        f.key: (f.help or "").partition("--fix leaves it: ")[2]
        for f in found.left
        if "--fix leaves it: " in (f.help or "")
    }


# --- each fault ------------------------------------------------------------------------------------

MENDED = {
    "removed": (SFT + DATA + "  use_flash_attn: true\n", SFT + DATA),
    "renamed": (
        SFT + DATA + "  chat_template: tulu\n",
        SFT + DATA + "  chat_template_name: tulu\n",
    ),
    "renamed to what is there already": (
        SFT + DATA + "  max_length: 8\n  max_seq_length: 8\n",
        SFT + DATA + "  max_seq_length: 8\n",
    ),
    "renamed by a commit": (
        DPO + "  dpo_beta: 5 # five\n  dpo_loss_type: dpo_norm\n  dpo_label_smoothing: 0.0\n",
        DPO + "  beta: 5 # five\n  loss_type: dpo_norm\n  label_smoothing: 0.0\n",
    ),
    "renamed in a release": (
        TRL + "  no_cuda: true\n",
        TRL + "  use_cpu: true\n",
    ),
    "the other stage's name": (
        DPO + "  num_train_epochs: 2\n",
        DPO + "  num_epochs: 2\n",
    ),
    "dashes": (SFT + DATA + "  learning-rate: 1e-5\n", SFT + DATA + "  learning_rate: 1e-5\n"),
    "abbreviated": (SFT + DATA + "  learning_rat: 1e-5\n", SFT + DATA + "  learning_rate: 1e-5\n"),
    "another case": (SFT + DATA + "  Learning_Rate: 1\n", SFT + DATA + "  learning_rate: 1\n"),
    "camel case": (SFT + DATA + "  learningRate: 1\n", SFT + DATA + "  learning_rate: 1\n"),
    "one set": (
        SFT + "  dataset_name: a/b  # all\n",
        SFT + "  dataset_mixer_list: [a/b, 1.0]  # all\n",
    ),
    "one set with a comma": (
        SFT + "  dataset_name: a, b\n",
        SFT + '  dataset_mixer_list: ["a, b", 1.0]\n',
    ),
    "a mixer of shares": (
        SFT
        + "  dataset_mixer:\n    # one\n    a: 1.0 # 1\n\n    'b': 0.5\n    # c: 1.0\n  seed: 1\n",
        SFT + "  dataset_mixer_list:\n    # one\n    - a\n    - 1.0 # 1\n\n    - 'b'\n    - 0.5\n"
        "    # c: 1.0\n  seed: 1\n",
    ),
    "1 among shares is all": (
        SFT + "  dataset_mixer: {a: 1, b: 0.5}\n",
        SFT + "  dataset_mixer_list: [a, 1.0, b, 0.5]\n",
    ),
    "1 among counts is one": (
        SFT + "  dataset_mixer: {a: 1, b: 500}\n",
        SFT + "  dataset_mixer_list: [a, 1, b, 500]\n",
    ),
    "a share without a point": (
        SFT + "  dataset_mixer: {a: 1e-05}\n",
        SFT + '  dataset_mixer_list: [a, "0.00001"]\n',
    ),
    "a mixer over several lines": (
        SFT + "  dataset_mixer: {\n    a: 1.0, # x\n    b: 2.0e-1,\n  }\n",
        SFT + "  dataset_mixer_list: [\n    a, 1.0, # x\n    b, 2.0e-1,\n  ]\n",
    ),
    "an empty mixer": (SFT + DATA + "  dataset_mixer: {}\n", SFT + DATA),
    "DPO's mixer": (
        "stage: dpo\nargs:\n  model_name_or_path: m\n  dataset_mixer: {a: 1.0}\n",
        "stage: dpo\nargs:\n  model_name_or_path: m\n  mixer_list: [a, 1.0]\n",
    ),
    "checkpointing on": (
        DPO + "  gradient_checkpointing: true # m\n",
        DPO + "  activation_memory_budget: 0.5 # m\n",
    ),
    "TRL's length": (TRL + "  max_seq_length: 8\n", TRL + "  max_length: 8\n"),
}


@pytest.mark.parametrize("name", MENDED)
def test_a_fault_is_mended_and_nothing_else_changes(write: Write, name: str) -> None:
    before, after = MENDED[name]
    found = mended(write, before)
    assert found.after == after
    assert found.changes and not errors(found.left)


LEFT = {
    "the new name says otherwise": (
        SFT + DATA + "  chat_template: a\n  chat_template_name: b\n",
        "args.chat_template",
        "another value",
    ),
    "the value would be refused": (
        SFT + DATA + "  max_length: long\n",
        "args.max_length",
        "expected a whole number",
    ),
    "a value without counterpart": (
        SFT + DATA + "  max_steps: -1\n",
        "args.max_steps",
        "takes another value",
    ),
    "an amount that is two things": (
        SFT + "  dataset_mixer: {a: 1, b: 200, c: 0.5}\n",
        "args.dataset_mixer",
        "may be a share or a count",
    ),
    "an amount of nothing": (SFT + "  dataset_mixer: {a: 0}\n", "args.dataset_mixer", "no amount"),
    "an amount of too much": (SFT + "  dataset_mixer: {a: 9500.0}\n", "args.dataset_mixer", ""),
    "an amount that is none": (SFT + "  dataset_mixer: {a: all}\n", "args.dataset_mixer", ""),
    "a mixer beside a list": (
        SFT + DATA + "  dataset_mixer: {a: 1.0}\n",
        "args.dataset_mixer",
        "`dataset_mixer_list` is there too",
    ),
    "a mixer beside a set": (
        SFT + "  dataset_mixer: {a: 1.0}\n  dataset_name: b\n",
        "args.dataset_name",
        "`dataset_mixer` is there too",
    ),
    "a configuration of the set": (
        SFT + "  dataset_name: a\n  dataset_config_name: b\n",
        "args.dataset_name",
        "has no place",
    ),
    "a mixer with an anchor": (
        SFT + "  dataset_mixer: &x {a: 1.0}\n",
        "args.dataset_mixer",
        "an anchor",
    ),
    "an anchor that is still needed": (
        SFT + DATA + "  use_flash_attn: &x true\n  packing: *x\n",
        "args.use_flash_attn",
        "undefined alias",
    ),
    "what is interpolated elsewhere": (
        SFT + DATA + "  max_length: 8\n  seed: ${args.max_length}\n",
        "args.max_length",
        "max_length",
    ),
    "TRL takes no mixer": (TRL + "  mixer_list: [a, 1.0]\n", "args.mixer_list", "one set"),
    "a commit's new name is there too": (
        DPO + "  dpo_beta: 5\n  beta: 0.1\n",
        "args.dpo_beta",
        "`beta` is there too, with another value",
    ),
    "a ratio that may be a number of steps": (
        TRL + "  warmup_ratio: 0.1\n",
        "args.warmup_ratio",
        "takes another value",
    ),
    "TRL takes no template's name": (
        TRL + "  chat_template_name: tulu\n",
        "args.chat_template_name",
        "",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_certain_is_left_and_said(write: Write, name: str) -> None:
    text, key, why = LEFT[name]
    path = write("a.yaml", text)
    os.utime(path, (1, 1))
    found = fix.of_file(path)
    fix.apply(found)
    assert found.after == text and not found.changes and not found.diff()
    assert path.stat().st_mtime == 1
    assert key in reasons(found) and why in reasons(found)[key]
    assert any(f.key == key for f in errors(found.left))


@pytest.mark.parametrize(
    "line",
    [
        "use_liger_kernal: true",  # a guess would be right here, and a guess all the same
        "checkpointing_steps: 1.5",
        "dataset_mixer_list: [b, 1]",  # one sample may be meant
        "lr_scheduler: cosine_",
    ],
)
def test_there_is_no_guessing(write: Write, line: str) -> None:
    text = SFT + ("" if "mixer" in line else DATA) + f"  {line}\n"
    assert not mended(write, text).changed


def test_epochs_are_no_number_of_steps(write: Write) -> None:
    found = mended(write, DPO + "  checkpointing_steps: epoch\n")
    assert not found.changed
    assert [f.key for f in errors(found.left)] == ["args.checkpointing_steps"]


def test_the_rest_is_mended_although_one_is_left(write: Write) -> None:
    text = (
        SFT
        + DATA
        + "  max_length: long\n  use_flash_attn: true\n  chat_template: a\n  model_name: x\n"
    )
    found = mended(write, text)
    assert (
        found.after == SFT + DATA + "  max_length: long\n  chat_template_name: a\n  model_name: x\n"
    )
    assert reasons(found).keys() == {"args.max_length", "args.model_name"}


def test_two_wrong_names_for_one_key(write: Write) -> None:
    text = SFT + DATA + "  chat_template: a\n  chat-template-name: {}\n"
    same = mended(write, text.format("a"))
    assert same.after == SFT + DATA + "  chat_template_name: a\n"
    other = mended(write, text.format("b"))
    assert other.after.count("chat_template_name") == 1 and len(reasons(other)) == 1


DEAD = {
    "unread": ("  # many\n  preprocessing_num_workers: 8 # CPUs\n", "  # many\n"),
    "unread, and a list": ("  hf_metadata_dataset:\n  - a\n", ""),
    "unread, and says nothing": ("  use_slow_tokenizer: false\n", ""),
}


@pytest.mark.parametrize("name", DEAD)
def test_what_nothing_reads_is_deleted(write: Write, name: str) -> None:
    before, after = DEAD[name]
    assert mended(write, SFT + DATA + before).after == SFT + DATA + after


WANTED = {
    "max_train_samples": "200",  # a smoke run: in the mixer list it would be one
    "overwrite_cache": "true",
    "use_slow_tokenizer": "true",
    "tokenizer_name": "other",
    "use_8bit_optimizer": "true",  # read with QLoRA
}


@pytest.mark.parametrize("key", WANTED)
def test_what_does_nothing_and_was_wanted_stays(write: Write, key: str) -> None:
    found = mended(write, SFT + DATA + f"  {key}: {WANTED[key]}\n")
    assert not found.changed
    assert f"args.{key}" in [f.key for f in found.left]


def test_what_nothing_reads_stays_where_another_key_needs_it(write: Write) -> None:
    text = SFT + "  dataset_name: a\n  dataset_config_name: b\n"
    found = mended(write, text)
    assert not found.changed
    assert "`dataset_name`" in reasons(found)["args.dataset_config_name"]


def test_changes_name_the_lines_of_the_file_as_it_was(write: Write) -> None:
    text = SFT + DATA + (
        "  use_flash_attn: true\n  seed: 1\n  chat_template: a\n  max_length: 7\n"
    )  # fmt: skip
    assert told(mended(write, text)) == [
        "line 5: `use_flash_attn: true` deleted: removed upstream by #1567 (9e8e2187c): attention is "
        "detected from what is installed",
        "line 7: `chat_template` -> `chat_template_name`",
        "line 8: `max_length` -> `max_seq_length`",
    ]


def test_a_fix_as_json(write: Write) -> None:
    found = mended(write, SFT + DATA + "  max_length: 7\n")
    assert found.as_json() == {
        "path": str(found.path),
        "changed": True,
        "changes": [
            {"line": 5, "key": "args.max_length", "what": "`max_length` -> `max_seq_length`"}
        ],
    }


def test_a_flat_file_keeps_the_stage_that_it_is_taken_for(write: Write) -> None:
    found = mended(write, "model_name_or_path: m\nfsdp_shard_degree: 2\n")
    assert not found.changed
    assert "sft stage" in reasons(found)["args.fsdp_shard_degree"]


# --- how it is written -----------------------------------------------------------------------------

FAULTY = """\
# what this is   \r
stage: sft\r
args:\r
    model_name_or_path:   "m"\t# é 😀\r
    # above\r
    "use_flash_attn": true   # goes\r
\r
    'chat_template'   : &t   tulu\r
    report_to:\r
    - wandb      # one\r
    wandb_entity: |-\r
        kept   \r
\r
    dataset_mixer: # sets\r
        "a/b":   1.0    # ä\r
        c: 0.5\r
    # below\r
    run_name: *t"""
FIXED = """\
# what this is   \r
stage: sft\r
args:\r
    model_name_or_path:   "m"\t# é 😀\r
    # above\r
\r
    'chat_template_name'   : &t   tulu\r
    report_to:\r
    - wandb      # one\r
    wandb_entity: |-\r
        kept   \r
\r
    dataset_mixer_list: # sets\r
        - "a/b"\r
        - 1.0    # ä\r
        - c\r
        - 0.5\r
    # below\r
    run_name: *t"""


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n  # end\n"])
def test_everything_else_stays_byte_for_byte(
    write: Write, mark: bytes, end: str, last: str
) -> None:
    name = "wandb_project_name"
    faulty, fixed = (
        (text.replace("run_name", name) + last).replace("\r", "").replace("\n", end).encode()
        for text in (FAULTY, FIXED)
    )
    path = write("a.yaml", mark + faulty)
    found = fix.of_file(path)
    fix.apply(found)
    assert path.read_bytes() == mark + fixed
    assert not fix.of_file(path).changed


SHAPED = {
    "the key of a multi-line value": (
        "use_flash_attn: >-\n  a\n\n  b\n\n# after\nmodel_name_or_path: m\n",
        "\n# after\nmodel_name_or_path: m\n",
    ),
    "a list that is not indented": (
        "use_flash_attn:\n- a\n- - b\n  - c # d\nmodel_name_or_path: m\n",
        "model_name_or_path: m\n",
    ),
    "nothing": ("model_name_or_path: m\nuse_flash_attn:\n", "model_name_or_path: m\n"),
    "the end of a file without a line end": (
        "model_name_or_path: m\n# c\nuse_flash_attn: a",
        "model_name_or_path: m\n# c",
    ),
    "the end of a document": (
        "--- # a\nmodel_name_or_path: m\nuse_flash_attn: a\n...\n",
        "--- # a\nmodel_name_or_path: m\n...\n",
    ),
    "a value below its key": (
        "chat_template:\n  # why\n  tulu\n",
        "chat_template_name:\n  # why\n  tulu\n",
    ),
    "a flow mapping": ("{use_flash_attn: true, seed: 1}\n", "{seed: 1}\n"),
    "its last key": ("{seed: 1, use_flash_attn: true}\n", "{seed: 1}\n"),
    "its only key": ("{max_train_steps: 1, args: }\n", None),
    "a key between two": (
        "{seed: 1,use_flash_attn: [a, {b: c}] , max_length: 2}",
        "{seed: 1,max_seq_length: 2}",
    ),
    "a key without a value": ("{use_flash_attn, seed: 1}\n", "{seed: 1}\n"),
    "lines of a flow mapping": (
        "{\n  # a\n  seed: 1, # b\n  use_flash_attn: true, # c\n  # d\n  lora_rank: 2 # e\n}\n",
        "{\n  # a\n  seed: 1, # b\n  # d\n  lora_rank: 2 # e\n}\n",
    ),
    "the last line of a flow mapping": (
        "{\n  seed: 1, # b\n  use_flash_attn: true # c\n}\n",
        "{\n  seed: 1, # b\n}\n",
    ),
    "JSON": ('{"seed": 1, "max_length": 2}\n', '{"seed": 1, "max_seq_length": 2}\n'),
    "what is merged in": (
        "<<: {use_flash_attn: true, max_length: 3}\nseed: 1\n",
        "<<: {max_seq_length: 3}\nseed: 1\n",
    ),
    "a written-out key": ("? use_flash_attn\n: true\nseed: 1\n", None),
    "a tagged key": ("!!str use_flash_attn: true\nseed: 1\n", "seed: 1\n"),
    "a tagged key that is renamed": ("!!str chat_template: a\nseed: 1\n", None),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPED)
def test_forms_of_yaml(write: Write, name: str) -> None:
    before, after = SHAPED[name]
    assert mended(write, before).after == (before if after is None else after)


@pytest.mark.parametrize(
    "text",
    [
        "open_instruct:\n  script: open_instruct/finetune.py\n  args:\n    {}: 1 # a\n    x: 2\nname: n\n",
        "open_instruct: {{script: finetune.py, args: {{{}: 1, x: 2}}}}\n",
        "args: {{{}: 1, x: 2}}\nstage: sft\n",
        "{}: 1\nx: 2\n",
    ],
)
def test_every_shape(write: Write, text: str) -> None:
    assert mended(write, text.format("max_length")).after == text.format("max_seq_length")


def test_a_shared_block_is_edited_only_where_that_changes_nothing_else(write: Write) -> None:
    text = "additional_model_arguments: &a {chat_template: x}\n<<: *a\nmodel_name_or_path: m\n"
    found = mended(write, text)
    assert not found.changed
    assert "another argument would change" in reasons(found)["args.chat_template"]


# --- several files ---------------------------------------------------------------------------------


def test_a_parent_is_not_edited(write: Write) -> None:
    parent = write("base.yaml", SFT + DATA + "  chat_template: a\n  use_flash_attn: true\n")
    before = parent.read_bytes()
    found = mended(write, "extends: base.yaml\nargs:\n  max_length: 3\n")
    assert found.after == "extends: base.yaml\nargs:\n  max_seq_length: 3\n"
    assert parent.read_bytes() == before
    assert {f.file for f in errors(found.left)} == {str(parent)}
    assert str(parent) in reasons(found)["args.chat_template"]


def test_a_key_of_both_files_is_mended_in_the_one_that_was_named(write: Write) -> None:
    write("base.yaml", SFT + DATA + "  chat_template: a\n  chat_template_name: c\n")
    found = mended(write, "extends: base.yaml\nargs:\n  chat_template: b\n")
    assert found.after == "extends: base.yaml\nargs:\n  chat_template_name: b\n"
    assert config.load(found.path).args["chat_template_name"] == "b"


def test_a_key_that_switches_its_parents_off_stays(write: Write) -> None:
    write("base.yaml", SFT + DATA + "  use_flash_attn: true\n")
    assert not mended(write, "extends: base.yaml\nargs:\n  use_flash_attn: null\n").changed


def test_a_mixer_that_two_files_write_stays(write: Write) -> None:
    write("base.yaml", SFT + "  dataset_mixer: {a: 1.0}\n")
    found = mended(write, "extends: base.yaml\nargs: {dataset_mixer: {b: 1.0}}\n")
    assert not found.changed
    assert "do not all stand there" in reasons(found)["args.dataset_mixer"]


# --- the file itself -------------------------------------------------------------------------------


def test_permissions_and_links_stay(write: Write, tmp_path: Path) -> None:
    path = write("sub/a.yaml", SFT + DATA + "  use_flash_attn: true\n")
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(Path("sub") / "a.yaml")
    fix.apply(fix.of_file(link))
    assert link.is_symlink() and path.read_text() == SFT + DATA
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.yaml"]


def test_a_read_only_file_is_refused_in_words(write: Write) -> None:
    path = write("a.yaml", SFT + DATA + "  use_flash_attn: true\n")
    path.chmod(0o444)
    found = fix.of_file(path)
    with pytest.raises(NotReady) as refused:
        fix.apply(found)
    (finding,) = refused.value.findings
    assert (finding.code, finding.file) == ("unwritable-file", str(path))
    assert f"chmod u+w {path}" in (finding.help or "")
    assert path.read_text() == found.before


def test_a_file_that_was_changed_meanwhile_is_not_overwritten(write: Write) -> None:
    path = write("a.yaml", SFT + DATA + "  use_flash_attn: true\n")
    found = fix.of_file(path)
    path.write_text(SFT)
    with pytest.raises(NotReady) as refused:
        fix.apply(found)
    assert refused.value.findings[0].code == "file-changed"
    assert path.read_text() == SFT
    path.unlink()
    with pytest.raises(NotReady):
        fix.apply(found)


@pytest.mark.parametrize("text", ["", "a: [", "- a\n", "a: 1\n---\nb: 2\n", b"\xff\xfe", "a: *x\n"])
def test_what_cannot_be_read_cannot_be_mended(write: Write, text: str | bytes) -> None:
    with pytest.raises(InvalidConfig):
        fix.of_file(write("a.yaml", text))


def test_the_diff_is_one_that_patch_takes(write: Write, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git")
    path = write("a.yaml", SFT + "  dataset_name: a\n  use_flash_attn: true")
    found = fix.of_file(path)
    patch = write("a.diff", found.diff().replace(str(path), "a.yaml"))
    subprocess.run(["git", "apply", "-p0", str(patch)], cwd=tmp_path, check=True)
    assert path.read_text() == found.after


# --- made-up files ---------------------------------------------------------------------------------

# Lines that are right, and what is said of them does not depend on the others.
GOOD = {
    "model_name_or_path": "m/n",
    "seed": "7",
    "learning_rate": "1.5e-5",
    "weight_decay": '"0.0"',
    "lr_scheduler_type": "'linear'",
    "report_to": "[wandb, tensorboard]",
    "output_dir": "out dir#1",
    "packing": "yes",
    "warmup_ratio": ".03",
}
MULTILINE = {"wandb_entity": "|-\n{in}some\n\n{in}text", "exp_name": ">\n{in}a b\n{in}c"}
FAULTS = {
    "use_flash_attn": "true",
    "chat_template": "tulu",
    "max_length": "4096",
    "lora_r": "8",
    "use-lora": "false",
    "per_device_train_batch_siz": "2",
    "Logging_Steps": "1",
    "add_bo": "True",
    "num_epochs": "3",
}
DATA_FAULTS = ["dataset_name", "dataset_mixer", "none"]


@dataclass(frozen=True)
class Made:
    """A file, the arguments in it that are right, and its comments: those that must stay, and all."""

    text: str
    good: dict[str, Any]
    above: tuple[str, ...]
    beside: tuple[str, ...]


@st.composite
def files(draw: st.DrawFn) -> Made:
    chosen = draw(st.lists(st.sampled_from(sorted(GOOD)), unique=True, max_size=6))
    faults = draw(st.lists(st.sampled_from(sorted(FAULTS)), unique=True, min_size=1, max_size=7))
    flow = draw(st.booleans())
    shape = draw(st.sampled_from(["stage", "wrapped"] if flow else ["stage", "wrapped", "flat"]))
    depth = {"stage": 1, "wrapped": 2, "flat": 0}[shape]
    step = draw(st.sampled_from(["  ", "    ", " "]))
    pairs = [(key, GOOD[key]) for key in chosen] + [(key, FAULTS[key]) for key in faults]
    if not flow:
        long = draw(st.lists(st.sampled_from(sorted(MULTILINE)), unique=True))
        pairs += [(key, MULTILINE[key]) for key in long]
    data = draw(st.sampled_from(DATA_FAULTS))
    amounts = draw(st.lists(st.sampled_from(["1", "1.0", "0.25", "300"]), min_size=1, max_size=3))
    if data == "dataset_name":
        pairs.append((data, "some/set"))
    elif data == "dataset_mixer":
        sets = [f"set/{index}: {amount}" for index, amount in enumerate(amounts)]
        inner = "\n{in}".join(["", *sets]) if not flow and draw(st.booleans()) else None
        pairs.append((data, inner if inner is not None else f"{{{', '.join(sets)}}}"))
    pairs = draw(st.permutations(pairs))
    lines, above, beside = [], [], []
    indent, deeper = step * (depth + flow), step * (depth + flow + 1)
    several = flow and draw(st.booleans())
    for number, (key, value) in enumerate(pairs):
        quote = draw(st.sampled_from(["", "", "'", '"']))
        told = not flow or several
        if told and draw(st.booleans()):
            above.append(f"# above {number} é: {{x, 'y")
            lines.append(f"{indent}{above[-1]}")
        if told and draw(st.integers(0, 4)) == 0:
            lines.append("")
        first, *rest = value.replace("{in}", deeper).split("\n")
        line = f"{quote}{key}{quote}:{' ' * draw(st.integers(1, 3))}{first}".rstrip()
        line = f"{indent if told else ''}{line}{',' if flow else ''}"
        if told and draw(st.booleans()):
            beside.append(f"# beside {number}")
            line += f"{' ' * draw(st.integers(1, 3))}{beside[-1]}"
        lines += [line, *rest]
    head = {
        "stage": ["stage: sft", "args:"],
        "wrapped": ["open_instruct:", f"{step}script: open_instruct/finetune.py", f"{step}args:"],
        "flat": ["# flat"],
    }[shape]
    if flow:
        head[-1] += " {"
        lines.append(f"{step * depth}}}")
    if shape == "wrapped" and draw(st.booleans()):
        lines.append("num_gpus: 8 # cards")
    end = draw(st.sampled_from(["\n", "\r\n"]))
    if flow and not several:
        tail = lines.pop() if lines[-1].startswith("num_gpus") else None
        text = end.join([*head[:-1], head[-1] + " ".join(line.strip() for line in lines)])
        text += "" if tail is None else f"{end}{tail}"
    else:
        text = end.join([*head, *lines])
    text += draw(st.sampled_from(["", end, f"{end}# last{end}"]))
    return Made(text, {key: GOOD[key] for key in chosen}, tuple(above), tuple(beside))


MECHANICAL = set(FAULTS) | {"dataset_name"}


@pytest.mark.slow
@settings(max_examples=100)
@given(made=files())
def test_a_made_up_file_is_mended_and_keeps_all_else(
    made: Made, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("made")
    path = folder / "a.yaml"
    path.write_bytes(made.text.encode())
    before = config.load(path)
    found = fix.of_file(path, stage_name="sft")
    fix.apply(found)
    after = config.load(path)
    assert path.read_bytes().decode() == found.after
    assert {k: after.args[k] for k in made.good} == {k: before.args[k] for k in made.good}
    assert {k: v for k, v in after.options.items()} == dict(before.options)
    for comment in made.above:
        assert comment in found.after
    gone = sum("deleted" in change.what for change in found.changes)
    assert sum(comment not in found.after for comment in made.beside) <= gone
    assert ("\r\n" in found.after) <= ("\r\n" in made.text)
    assert found.after.count("\r\n") in {0, found.after.count("\n")}
    assert found.after.endswith("\n") == made.text.endswith("\n")
    left = {(f.key or "").removeprefix("args.") for f in errors(found.left)}
    assert not left & MECHANICAL, [f for f in found.left if f.severity == "error"]
    again = fix.of_file(path, stage_name="sft")
    assert not again.changed


# --- the files that upstream ships -----------------------------------------------------------------

# DPO counts steps: how many an epoch has is not in the file. The others write a key twice.
NOT_MECHANICAL = {
    "dpo/olmo_1b_mix_example.yaml": ["args.gradient_checkpointing"],
    "dpo/olmo_7b_17_inst.yaml": ["args.gradient_checkpointing"],
    "olmo2/olmo2_1124_32b_dpo.yaml": ["args.dataset_mixer"],
    "dpo/final_best_70b_dpo_config.yaml": ["args.checkpointing_steps"],
    "tulu3/tulu3_dpo_70b.yaml": ["args.checkpointing_steps"],
}


@pytest.fixture(scope="module")
def shipped(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Fix]]:
    """Every file under configs/train_configs, mended in a copy: what it was judged, and its fix."""
    root = checkout / "configs" / "train_configs"
    copies = tmp_path_factory.mktemp("shipped")
    mended = {}
    for source in sorted(p for p in root.rglob("*") if p.suffix in {".yaml", ".yml"}):
        copy = copies / source.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        before = stage.judge(config.load(copy))
        found = fix.of_file(copy)
        fix.apply(found)
        mended[str(source.relative_to(root))] = before, found
    return mended


def refused_by_parser(found: tuple[Finding, ...]) -> list[str | None]:
    return [f.key for f in errors(found) if f.layer == "parser"]


@pytest.mark.slow
def test_the_shipped_files_are_mended_but_for_five(shipped: dict[str, tuple[Any, Fix]]) -> None:
    assert len(shipped) == 98
    assert all(refused_by_parser(before.findings) for before, _ in shipped.values())
    left = {name: refused_by_parser(found.left) for name, (_, found) in shipped.items()}
    assert {name: keys for name, keys in left.items() if keys} == NOT_MECHANICAL


def test_mending_the_shipped_files_twice_changes_nothing(
    shipped: dict[str, tuple[Any, Fix]],
) -> None:
    assert not any(fix.of_file(found.path).changed for _, found in shipped.values())


def test_the_shipped_files_keep_their_comments_and_other_values(
    shipped: dict[str, tuple[Any, Fix]],
) -> None:
    for before, found in shipped.values():
        after = config.load(found.path)
        edited = {change.key.removeprefix("args.").partition(".")[0] for change in found.changes}
        for key in before.config.args.keys() - edited:
            assert after.args[key] == before.config.args[key]
        alone = [line for line in found.before.splitlines() if line.lstrip().startswith("#")]
        kept = found.after.splitlines()
        assert [line for line in kept if line.lstrip().startswith("#")] == alone


@pytest.mark.slow
def test_upstreams_own_parser_takes_the_mended_files(
    checkout: Path, shipped: dict[str, tuple[Any, Fix]]
) -> None:
    requests = []
    for before, found in shipped.values():
        after = stage.judge(config.load(found.path))
        assert after.stage == before.stage and after.schema is not None
        requests += [
            {"stage": judged.stage, "words": words_of(after.schema, dict(judged.config.args))}
            for judged in (before, after)
        ]
    _, *answers = ask("open_instruct", checkout, requests)
    assert all(answer is not None for answer in answers[::2])
    refused = {n for n, answer in zip(shipped, answers[1::2], strict=True) if answer is not None}
    assert refused == NOT_MECHANICAL.keys()
