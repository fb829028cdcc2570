"""Mending: only the faulty spans change, and what is not certain is left alone."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Write
from verdicts import ask, words_of

from launcher.config import load
from launcher.errors import Finding, NotReady, select_errors
from launcher.stage import fix, stage
from launcher.stage.fix import Fix
from launcher.stage.stage import Judged

BARE_SFT = "stage: sft\nargs:\n  model_name_or_path: m\n"
SFT = f"{BARE_SFT}  dataset_mixer_list: [a, 1.0]\n"
DPO = "stage: dpo\nargs:\n  model_name_or_path: m\n  mixer_list: [a, 1.0]\n"
TRL = "stage: sft\nbackend: trl\nargs:\n  model_name_or_path: m\n  dataset_name: d\n"


def mend(write: Write, text: str, name: str = "a.yaml") -> Fix:
    """The fix of a file; it is written, loads, and there is nothing more to mend in it."""
    path = write(name, text)
    mended = fix.fix_file(path)
    fix.apply(mended)
    assert path.read_bytes().decode("utf-8-sig") == mended.after
    again = fix.fix_file(path)
    assert not again.changed
    assert not again.changes
    return mended


def reasons(mended: Fix) -> dict[str | None, str]:
    """Why a fault was left, by its key."""
    texts = {}
    for finding in mended.left:
        _, mark, why = str(finding.help).partition("--fix leaves it: ")
        if mark:
            texts[finding.key] = why
    return texts


# lines below `args:` before and after
MENDED = [
    (SFT, "use_flash_attn: true", ""),
    (SFT, "chat_template: tulu", "chat_template_name: tulu"),
    # renamed to what is there already
    (SFT, "max_length: 8\n  max_seq_length: 8", "max_seq_length: 8"),
    # renamed by a commit
    (DPO, "dpo_beta: 5 # five\n  dpo_loss_type: dpo_norm", "beta: 5 # five\n  loss_type: dpo_norm"),
    (SFT, "learning-rate: 1e-5", "learning_rate: 1e-5"),
    (SFT, "learning_rat: 1e-5", "learning_rate: 1e-5"),
    (
        BARE_SFT,
        "dataset_mixer:\n    # one\n    a: 1.0 # 1\n\n    'b': 0.5\n    # c: 1.0\n  seed: 1",
        "dataset_mixer_list:\n    # one\n    - a\n    - 1.0 # 1\n\n"
        "    - 'b'\n    - 0.5\n    # c: 1.0\n  seed: 1",
    ),
    # 1 among counts is one, among shares it is all
    (BARE_SFT, "dataset_mixer: {a: 1, b: 500}", "dataset_mixer_list: [a, 1, b, 500]"),
    (BARE_SFT, "dataset_mixer: {a: 1, b: 0.5}", "dataset_mixer_list: [a, 1.0, b, 0.5]"),
    (SFT, "dataset_mixer: {}", ""),
    (DPO, "gradient_checkpointing: true # m", "activation_memory_budget: 0.5 # m"),
]


@pytest.mark.parametrize("head, before, after", MENDED)
def test_a_fault_is_mended_and_nothing_else_changes(
    write: Write, head: str, before: str, after: str
) -> None:
    mended = mend(write, f"{head}  {before}\n")
    expected = f"{head}  {after}\n" if after else head
    assert mended.after == expected
    assert mended.changes
    assert not select_errors(mended.left)


LEFT = [
    # the new name says otherwise
    (SFT, "chat_template: a\n  chat_template_name: b", "another value"),
    (BARE_SFT, "dataset_mixer: {a: 1, b: 200, c: 0.5}", "may be a share or a count"),
    (BARE_SFT, "dataset_mixer: {a: 9500.0}", "neither a share nor a count"),
    (SFT, "dataset_mixer: {a: 1.0}", "`dataset_mixer_list` is there too"),
    # an anchor that is still needed, what is interpolated elsewhere
    (SFT, "use_flash_attn: &x true\n  packing: *x", "undefined alias"),
    (SFT, "max_length: 8\n  seed: ${args.max_length}", "max_length"),
    (TRL, "mixer_list: [a, 1.0]", "one set"),
    # a ratio that may be a number of steps
    (TRL, "warmup_ratio: 0.1", "takes another value"),
]


@pytest.mark.parametrize("head, lines, why", LEFT)
def test_what_is_not_certain_is_left_with_a_reason(
    write: Write, head: str, lines: str, why: str
) -> None:
    text = f"{head}  {lines}\n"
    path = write("a.yaml", text)
    os.utime(path, (1, 1))
    mended = fix.fix_file(path)
    fix.apply(mended)
    assert mended.after == text
    assert not mended.changed
    assert path.stat().st_mtime == 1
    key = f"args.{lines.partition(':')[0]}"
    assert why in reasons(mended)[key]
    assert key in [finding.key for finding in select_errors(mended.left)]


@pytest.mark.parametrize(
    "line", ["use_liger_kernal: true", "checkpointing_steps: epoch", "max_train_samples: 200"]
)
def test_a_misspelt_name_and_a_value_that_was_wanted_stay(write: Write, line: str) -> None:
    mended = mend(write, f"{SFT}  {line}\n")
    assert not mended.changed


def test_the_rest_is_mended_although_one_is_left(write: Write) -> None:
    lines = "  max_length: long\n  use_flash_attn: true\n  chat_template: a\n  model_name: x\n"
    mended = mend(write, SFT + lines)
    assert mended.after == f"{SFT}  max_length: long\n  chat_template_name: a\n  model_name: x\n"
    assert reasons(mended).keys() == {"args.max_length", "args.model_name"}


def test_what_nothing_reads_is_deleted(write: Write) -> None:
    lines = "  # many\n  preprocessing_num_workers: 8 # CPUs\n  hf_metadata_dataset:\n  - a\n"
    assert mend(write, SFT + lines).after == f"{SFT}  # many\n"


def test_what_nothing_reads_stays_where_another_key_needs_it(write: Write) -> None:
    mended = mend(write, f"{BARE_SFT}  dataset_name: a\n  dataset_config_name: b\n")
    assert not mended.changed
    assert "`dataset_name`" in reasons(mended)["args.dataset_config_name"]


def test_a_flat_file_keeps_the_stage_that_it_is_taken_for(write: Write) -> None:
    mended = mend(write, "model_name_or_path: m\nfsdp_shard_degree: 2\n")
    assert not mended.changed
    assert "sft stage" in reasons(mended)["args.fsdp_shard_degree"]


def test_changes_name_the_lines_of_the_file_as_it_was(write: Write) -> None:
    lines = "  use_flash_attn: true\n  seed: 1\n  chat_template: a\n  max_length: 7\n"
    deleted, renamed, last = mend(write, SFT + lines).changes
    assert deleted.line == 5
    assert deleted.what == (
        "`use_flash_attn: true` deleted: removed upstream by #1567 (9e8e2187c): "
        "attention is detected from what is installed"
    )
    assert (renamed.line, renamed.what) == (7, "`chat_template` -> `chat_template_name`")
    assert (last.line, last.what) == (8, "`max_length` -> `max_seq_length`")


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
    wandb_project_name: *t"""
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
    wandb_project_name: *t"""


@pytest.mark.parametrize(
    "mark, end, last",
    [(b"", "\n", ""), (b"\xef\xbb\xbf", "\r\n", "\r\n\r\n  # end\r\n")],
    ids=["unix", "windows"],
)
def test_everything_else_stays_byte_for_byte(
    write: Write, mark: bytes, end: str, last: str
) -> None:
    faulty = FAULTY.replace("\r\n", end) + last
    fixed = FIXED.replace("\r\n", end) + last
    path = write("a.yaml", mark + faulty.encode())
    fix.apply(fix.fix_file(path))
    assert path.read_bytes() == mark + fixed.encode()
    assert not fix.fix_file(path).changed


MODEL = "model_name_or_path: m\n"
FORMS_OF_YAML = [
    ("use_flash_attn: >-\n  a\n\n  b\n\n# after\n" + MODEL, "\n# after\n" + MODEL),
    # a list that is not indented
    ("use_flash_attn:\n- a\n- - b\n  - c # d\n" + MODEL, MODEL),
    # the end of a file without a line end
    (MODEL + "# c\nuse_flash_attn: a", MODEL + "# c"),
    # a value below its key
    ("chat_template:\n  # why\n  tulu\n", "chat_template_name:\n  # why\n  tulu\n"),
    ('{"seed": 1, "max_length": 2}\n', '{"seed": 1, "max_seq_length": 2}\n'),
    ("!!str chat_template: a\nseed: 1\n", "!!str chat_template_name: a\nseed: 1\n"),
    ("{use_flash_attn: true, seed: 1}\n", None),
    ("<<: {use_flash_attn: true, max_length: 3}\nseed: 1\n", None),
]


@pytest.mark.parametrize("before, after", FORMS_OF_YAML)
def test_every_form_of_yaml(write: Write, before: str, after: str | None) -> None:
    assert mend(write, before).after == (after or before)


@pytest.mark.parametrize(
    "text",
    [
        "open_instruct:\n  script: open_instruct/finetune.py\n  args:\n    max_length: 1 # a\n",
        "open_instruct: {script: finetune.py, args: {max_length: 1, x: 2}}\n",
        "args: {max_length: 1, x: 2}\nstage: sft\n",
        "max_length: 1\nx: 2\n",
    ],
)
def test_every_shape_of_a_file(write: Write, text: str) -> None:
    assert mend(write, text).after == text.replace("max_length", "max_seq_length")


def test_parents_are_not_edited(write: Write) -> None:
    parent_text = f"{SFT}  chat_template: a\n  use_flash_attn: true\n"
    parent = write("base.yaml", parent_text)
    mended = mend(write, "extends: base.yaml\nargs:\n  max_length: 3\n")
    assert mended.after == "extends: base.yaml\nargs:\n  max_seq_length: 3\n"
    assert parent.read_text() == parent_text
    for finding in select_errors(mended.left):
        assert finding.file == str(parent)
    assert str(parent) in reasons(mended)["args.chat_template"]


def test_a_key_is_renamed_although_the_parent_has_the_new_name(write: Write) -> None:
    write("base.yaml", f"{SFT}  chat_template: a\n  chat_template_name: c\n")
    mended = mend(write, "extends: base.yaml\nargs:\n  chat_template: b\n")
    assert mended.after == "extends: base.yaml\nargs:\n  chat_template_name: b\n"
    assert load.load(mended.path).args["chat_template_name"] == "b"


FLASH = f"{SFT}  use_flash_attn: true\n"


def test_permissions_and_links_stay(write: Write, tmp_path: Path) -> None:
    path = write("sub/a.yaml", FLASH)
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(Path("sub") / "a.yaml")
    fix.apply(fix.fix_file(link))
    assert link.is_symlink()
    assert path.read_text() == SFT
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def refuse_to_apply(mended: Fix) -> Finding:
    with pytest.raises(NotReady) as refused:
        fix.apply(mended)
    (finding,) = refused.value.findings
    return finding


def test_a_read_only_file_is_refused(write: Write) -> None:
    path = write("a.yaml", FLASH)
    path.chmod(0o444)
    finding = refuse_to_apply(fix.fix_file(path))
    assert finding.code == "unwritable-file"
    assert finding.file == str(path)
    assert f"chmod u+w {path}" in str(finding.help)
    assert path.read_text() == FLASH


def test_a_file_that_was_changed_meanwhile_is_not_overwritten(write: Write) -> None:
    path = write("a.yaml", FLASH)
    mended = fix.fix_file(path)
    path.write_text(SFT)
    assert refuse_to_apply(mended).code == "file-changed"
    assert path.read_text() == SFT


# DPO counts steps: how many an epoch has is not in the file. The others write a key twice.
NOT_MECHANICAL = {
    "dpo/olmo_1b_mix_example.yaml": ["args.gradient_checkpointing"],
    "dpo/olmo_7b_17_inst.yaml": ["args.gradient_checkpointing"],
    "olmo2/olmo2_1124_32b_dpo.yaml": ["args.dataset_mixer"],
    "dpo/final_best_70b_dpo_config.yaml": ["args.checkpointing_steps"],
    "tulu3/tulu3_dpo_70b.yaml": ["args.checkpointing_steps"],
}


@dataclass(frozen=True)
class Shipped:
    """A file of the checkout before and after it is mended."""

    name: str
    before: Judged
    mended: Fix

    @property
    def left(self) -> list[str | None]:
        return refused_by_parser(self.mended.left)


def refused_by_parser(findings: tuple[Finding, ...]) -> list[str | None]:
    return [finding.key for finding in select_errors(findings) if finding.layer == "parser"]


def names_of_shipped(root: Path) -> list[str]:
    """Of the files under configs/train_configs those with other keys than the ones before."""
    names = []
    seen = set()
    for path in sorted(root.rglob("*.y*ml")):
        name = str(path.relative_to(root))
        keys = tuple(re.findall(r"^\w+:", path.read_text(), re.M))
        if keys not in seen or name in NOT_MECHANICAL:
            names.append(name)
        seen.add(keys)
    return names


@pytest.fixture(scope="module")
def shipped(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Shipped]:
    root = checkout / "configs" / "train_configs"
    copies = tmp_path_factory.mktemp("shipped")
    files = []
    for name in names_of_shipped(root):
        copy = copies / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, copy)
        before = stage.judge_stage_file(load.load(copy))
        mended = fix.fix_file(copy)
        fix.apply(mended)
        files.append(Shipped(name, before, mended))
    return files


def test_the_shipped_files_are_mended_but_for_five(shipped: list[Shipped]) -> None:
    left = {}
    for file in shipped:
        if file.left:
            left[file.name] = file.left
    assert left == NOT_MECHANICAL


def test_the_shipped_files_have_every_fault_in_its_place(shipped: list[Shipped]) -> None:
    for file in shipped:
        lines = file.mended.before.splitlines()
        for finding in file.before.findings:
            assert finding.file == str(file.mended.path)
            assert finding.line is not None
            if finding.severity == "error" and finding.layer == "parser":
                key = str(finding.key).removeprefix("args.").partition("[")[0]
                assert lines[finding.line - 1].lstrip().startswith(f"{key}:")


def comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.lstrip().startswith("#")]


def test_the_shipped_files_keep_their_comments_and_other_values(shipped: list[Shipped]) -> None:
    for file in shipped:
        mended = file.mended
        assert not fix.fix_file(mended.path).changed
        assert comments(mended.after) == comments(mended.before)
        after = load.load(mended.path)
        edited = {change.key.removeprefix("args.").partition(".")[0] for change in mended.changes}
        for key, value in file.before.config.args.items():
            assert key in edited or after.args[key] == value


@pytest.mark.slow
def test_upstreams_own_parser_takes_the_mended_files(
    checkout: Path, shipped: list[Shipped]
) -> None:
    requests = []
    for file in shipped:
        after = stage.judge_stage_file(load.load(file.mended.path))
        assert after.stage == file.before.stage
        for judged in (file.before, after):
            assert judged.schema is not None
            words = words_of(judged.schema, dict(judged.config.args))
            requests.append({"stage": judged.stage, "words": words})
    _, *answers = ask("open_instruct", checkout, requests)
    assert None not in answers[::2]
    refused = []
    for file, answer in zip(shipped, answers[1::2], strict=True):
        if answer is not None:
            refused.append(file.name)
    assert set(refused) == NOT_MECHANICAL.keys()
