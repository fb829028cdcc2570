"""What the shell offers after a press of the tab key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import Write

from launcher import keys, upstream
from launcher.backends import BACKENDS
from launcher.completion import complete_key, complete_override


def names_of(backend: str, stage: str) -> set[str]:
    return {key.partition(".")[2] for key in upstream.snapshot(backend)["stages"][stage]}


def test_a_key_of_any_stage_and_backend() -> None:
    every = set.union(*(names_of(b, s) for b in BACKENDS for s in keys.STAGES))
    assert complete_key("") == sorted(every)
    assert complete_key("use_l") == ["use_liger_kernel", "use_lora"]
    assert complete_key("mixer_l") == ["mixer_list", "mixer_list_splits"]
    assert complete_key("max_s") == ["max_seq_length", "max_steps"]
    assert complete_key("nothing") == []


def test_the_stage_file_decides_which_names_are_offered(write: Write) -> None:
    ours = write("a.yaml", "stage: sft\nargs: {}\n")
    theirs = write("b.yaml", "stage: sft\nbackend: trl   # small\nargs: {}\n")
    unsaid = write("c.yaml", "extends: b.yaml\n")
    assert complete_override("sft", ours, [], "max_s") == ["max_seq_length="]
    assert complete_override("sft", theirs, [], "max_s") == ["max_steps=-1", "max_steps=null"]
    assert complete_override("sft", unsaid, [], "max_s") == ["max_seq_length=", "max_steps="]
    assert complete_override("dpo", ours, [], "dataset_mixer_l") == []
    assert complete_override("dpo", ours, [], "mixer_l") == ["mixer_list=", "mixer_list_splits="]


def test_without_a_file_that_can_be_read_every_name_is_offered() -> None:
    for path in (None, Path("missing.yaml"), Path()):
        assert complete_override("sft", path, [], "max_s") == ["max_seq_length=", "max_steps="]


def test_values_follow_the_last_name_left(write: Write) -> None:
    file = write("a.yaml", "stage: sft\n")

    def offered(incomplete: str) -> list[str]:
        return complete_override("sft", file, ["seed=1"], incomplete)

    assert offered("packi") == ["packing=true", "packing=false"]
    assert offered("packing=f") == ["packing=false"]
    assert offered("dataset_cache_mode=") == ["dataset_cache_mode=hf", "dataset_cache_mode=local"]
    assert offered("clip_g") == ["clip_grad_norm=-1", "clip_grad_norm=null"]
    assert offered("nothing=") == []


def test_launchs_own_options_are_offered(write: Write) -> None:
    file = write("a.yaml", "stage: sft\n")
    assert complete_override("sft", file, [], "deepsp") == [
        f"deepspeed={name}" for name in (*keys.DEEPSPEED, "none")
    ]
    assert complete_override("sft", file, [], "batch.") == ["batch.global=", "batch.per_device="]
    assert complete_override("sft", file, [], "expect.tr") == [
        f"expect.trend={state}" for state in keys.EXPECT["trend"]
    ]


def test_bash_takes_words_apart_at_the_equals_sign(write: Write) -> None:
    file = write("a.yaml", "stage: sft\n")
    assert complete_override("sft", file, ["seed=1", "packing"], "") == ["true", "false"]
    assert complete_override("sft", file, ["packing", "="], "t") == ["true"]
    assert complete_override("sft", file, ["nothing", "="], "t") == []
    assert "packing=" in complete_override("sft", file, ["seed=1"], "")


def test_what_is_offered_is_an_override_that_launch_takes(write: Write) -> None:
    from launcher import config, stage
    from launcher.errors import errors

    for backend, name in (("open_instruct", "sft"), ("trl", "dpo")):
        file = write("a.yaml", f"stage: {name}\nbackend: {backend}\nargs: {{}}\n")
        words = [
            word
            for key in complete_override(name, file, [], "")
            for word in complete_override(name, file, [], key)
            if not word.endswith("=")
        ]
        assert len(words) > 80
        for word in words[::3]:
            found = stage.judge(config.load(file, [word])).findings
            assert not [f for f in errors(found) if f.code.startswith("bad-")], (backend, word)


def test_a_key_costs_few_imports() -> None:
    code = (
        "import sys; from launcher.completion import complete_key; assert complete_key('use_l');"
        "print(*(m for m in sys.modules if m.startswith('launcher.') or m == 'yaml'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {"launcher.completion", "launcher.files", "launcher.snapshots"}
    assert set(done.stdout.split()) == modules
