"""Mending: only the faulty spans change, nothing got worse, and what is not certain is left alone."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from verdicts import ask, words_of

from launcher.config import load
from launcher.errors import Finding, NotReady, errors
from launcher.stage import fix, stage
from launcher.stage.fix import Fix

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


def reasons(found: Fix) -> dict[str | None, str]:
    """Why a fault was left, by its key."""
    parts = {f.key: (f.help or "").partition("--fix leaves it: ") for f in found.left}
    return {key: why for key, (_, mark, why) in parts.items() if mark}


# what stands below `args:` before and after
MENDED = (
    (SFT + DATA, "use_flash_attn: true", ""),
    (SFT + DATA, "chat_template: tulu", "chat_template_name: tulu"),
    # renamed to what is there already
    (SFT + DATA, "max_length: 8\n  max_seq_length: 8", "max_seq_length: 8"),
    # renamed by a commit
    (DPO, "dpo_beta: 5 # five\n  dpo_loss_type: dpo_norm", "beta: 5 # five\n  loss_type: dpo_norm"),
    (SFT + DATA, "learning-rate: 1e-5", "learning_rate: 1e-5"),
    (SFT + DATA, "learning_rat: 1e-5", "learning_rate: 1e-5"),
    (
        SFT,
        "dataset_mixer:\n    # one\n    a: 1.0 # 1\n\n    'b': 0.5\n    # c: 1.0\n  seed: 1",
        "dataset_mixer_list:\n    # one\n    - a\n    - 1.0 # 1\n\n    - 'b'\n    - 0.5\n    # c: 1.0\n  seed: 1",
    ),
    # 1 among counts is one, among shares it is all
    (SFT, "dataset_mixer: {a: 1, b: 500}", "dataset_mixer_list: [a, 1, b, 500]"),
    (SFT, "dataset_mixer: {a: 1, b: 0.5}", "dataset_mixer_list: [a, 1.0, b, 0.5]"),
    (SFT + DATA, "dataset_mixer: {}", ""),
    (DPO, "gradient_checkpointing: true # m", "activation_memory_budget: 0.5 # m"),
)


def test_a_fault_is_mended_and_nothing_else_changes(write: Write) -> None:
    for head, before, after in MENDED:
        found = mended(write, f"{head}  {before}\n")
        assert found.after == head + (f"  {after}\n" if after else "")
        assert found.changes and not errors(found.left)


LEFT = (
    # the new name says otherwise
    (
        SFT + DATA + "  chat_template: a\n  chat_template_name: b\n",
        "chat_template",
        "another value",
    ),
    (
        SFT + "  dataset_mixer: {a: 1, b: 200, c: 0.5}\n",
        "dataset_mixer",
        "may be a share or a count",
    ),
    (SFT + "  dataset_mixer: {a: 9500.0}\n", "dataset_mixer", "neither a share nor a count"),
    (
        SFT + DATA + "  dataset_mixer: {a: 1.0}\n",
        "dataset_mixer",
        "`dataset_mixer_list` is there too",
    ),
    # an anchor that is still needed, what is interpolated elsewhere
    (
        SFT + DATA + "  use_flash_attn: &x true\n  packing: *x\n",
        "use_flash_attn",
        "undefined alias",
    ),
    (SFT + DATA + "  max_length: 8\n  seed: ${args.max_length}\n", "max_length", "max_length"),
    (TRL + "  mixer_list: [a, 1.0]\n", "mixer_list", "one set"),
    # a ratio that may be a number of steps
    (TRL + "  warmup_ratio: 0.1\n", "warmup_ratio", "takes another value"),
)


def test_what_is_not_certain_is_left_and_said(write: Write) -> None:
    for text, key, why in LEFT:
        path = write("a.yaml", text)
        os.utime(path, (1, 1))
        found = fix.of_file(path)
        fix.apply(found)
        assert found.after == text and not found.changes
        assert path.stat().st_mtime == 1
        assert why in reasons(found)[f"args.{key}"]
        assert any(f.key == f"args.{key}" for f in errors(found.left))


def test_there_is_no_guessing(write: Write) -> None:
    for line in ("use_liger_kernal: true", "checkpointing_steps: epoch"):
        assert not mended(write, SFT + DATA + f"  {line}\n").changed


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


def test_what_nothing_reads_is_deleted(write: Write) -> None:
    text = (
        SFT
        + DATA
        + "  # many\n  preprocessing_num_workers: 8 # CPUs\n  hf_metadata_dataset:\n  - a\n"
    )
    assert mended(write, text).after == SFT + DATA + "  # many\n"
    # what nothing reads stays where another key needs it
    text = SFT + "  dataset_name: a\n  dataset_config_name: b\n"
    found = mended(write, text)
    assert not found.changed
    assert "`dataset_name`" in reasons(found)["args.dataset_config_name"]
    # forms of yaml
    for before, after in SHAPED:
        assert mended(write, before).after == (before if after is None else after)
    # a flat file keeps the stage that it is taken for
    found = mended(write, "model_name_or_path: m\nfsdp_shard_degree: 2\n")
    assert not found.changed
    assert "sft stage" in reasons(found)["args.fsdp_shard_degree"]


def test_what_does_nothing_and_was_wanted_stays(write: Write) -> None:
    found = mended(write, SFT + DATA + "  max_train_samples: 200\n")
    assert not found.changed
    assert "args.max_train_samples" in [f.key for f in found.left]


def test_changes_name_the_lines_of_the_file_as_it_was(write: Write) -> None:
    text = SFT + DATA + ("  use_flash_attn: true\n  seed: 1\n  chat_template: a\n  max_length: 7\n")
    assert [f"line {change.line}: {change.what}" for change in mended(write, text).changes] == [
        "line 5: `use_flash_attn: true` deleted: removed upstream by #1567 (9e8e2187c): attention is "
        "detected from what is installed",
        "line 7: `chat_template` -> `chat_template_name`",
        "line 8: `max_length` -> `max_seq_length`",
    ]


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
FIXED = (
    FAULTY.replace('    "use_flash_attn": true   # goes\r\n', "")
    .replace("'chat_template'", "'chat_template_name'")
    .replace("dataset_mixer:", "dataset_mixer_list:")
    .replace(
        '"a/b":   1.0    # ä\r\n        c: 0.5',
        '- "a/b"\r\n        - 1.0    # ä\r\n        - c\r\n        - 0.5',
    )
)


@pytest.mark.parametrize(
    ("mark", "end", "last"), [(b"", "\n", ""), (b"\xef\xbb\xbf", "\r\n", "\n\n  # end\n")]
)
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


SHAPED = (
    # the key of a multi-line value, a list that is not indented
    (
        "use_flash_attn: >-\n  a\n\n  b\n\n# after\nmodel_name_or_path: m\n",
        "\n# after\nmodel_name_or_path: m\n",
    ),
    ("use_flash_attn:\n- a\n- - b\n  - c # d\nmodel_name_or_path: m\n", "model_name_or_path: m\n"),
    # the end of a file without a line end
    ("model_name_or_path: m\n# c\nuse_flash_attn: a", "model_name_or_path: m\n# c"),
    # a value below its key
    ("chat_template:\n  # why\n  tulu\n", "chat_template_name:\n  # why\n  tulu\n"),
    # a flow mapping, what is merged in
    ("{use_flash_attn: true, seed: 1}\n", None),
    ("<<: {use_flash_attn: true, max_length: 3}\nseed: 1\n", None),
    # JSON
    ('{"seed": 1, "max_length": 2}\n', '{"seed": 1, "max_seq_length": 2}\n'),
    ("!!str chat_template: a\nseed: 1\n", "!!str chat_template_name: a\nseed: 1\n"),
)


def test_every_shape(write: Write) -> None:
    for text in (
        "open_instruct:\n  script: open_instruct/finetune.py\n  args:\n    {}: 1 # a\n    x: 2\nname: n\n",
        "open_instruct: {{script: finetune.py, args: {{{}: 1, x: 2}}}}\n",
        "args: {{{}: 1, x: 2}}\nstage: sft\n",
        "{}: 1\nx: 2\n",
    ):
        assert mended(write, text.format("max_length")).after == text.format("max_seq_length")


def test_parents_are_not_edited(write: Write) -> None:
    parent = write("base.yaml", SFT + DATA + "  chat_template: a\n  use_flash_attn: true\n")
    before = parent.read_bytes()
    found = mended(write, "extends: base.yaml\nargs:\n  max_length: 3\n")
    assert found.after == "extends: base.yaml\nargs:\n  max_seq_length: 3\n"
    assert parent.read_bytes() == before
    assert {f.file for f in errors(found.left)} == {str(parent)}
    assert str(parent) in reasons(found)["args.chat_template"]
    write("base.yaml", SFT + DATA + "  chat_template: a\n  chat_template_name: c\n")
    found = mended(write, "extends: base.yaml\nargs:\n  chat_template: b\n")
    assert found.after == "extends: base.yaml\nargs:\n  chat_template_name: b\n"
    assert load.load(found.path).args["chat_template_name"] == "b"


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
        before = stage.judge(load.load(copy))
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


def test_the_shipped_files_keep_their_comments_and_other_values(
    shipped: dict[str, tuple[Any, Fix]],
) -> None:
    for before, found in shipped.values():
        assert not fix.of_file(found.path).changed
        after = load.load(found.path)
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
        after = stage.judge(load.load(found.path))
        assert after.stage == before.stage and after.schema is not None
        requests += [
            {"stage": judged.stage, "words": words_of(after.schema, dict(judged.config.args))}
            for judged in (before, after)
        ]
    _, *answers = ask("open_instruct", checkout, requests)
    assert all(answer is not None for answer in answers[::2])
    refused = {n for n, answer in zip(shipped, answers[1::2], strict=True) if answer is not None}
    assert refused == NOT_MECHANICAL.keys()
