"""What was read of a source, as JSON and back, and the cache that remembers it."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from unused_arguments import FINETUNE, HELPER

from launcher.upstream import facts, locate
from launcher.upstream.source.packages import Folder
from launcher.upstream.trainers import BACKENDS

BACKEND = BACKENDS["open_instruct"]
Asked = Callable[[], dict[str, Any]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "open_instruct"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "finetune.py").write_text(FINETUNE, encoding="utf-8")
    (folder / "helper.py").write_text(HELPER, encoding="utf-8")
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The stages that were really read, one entry for each time."""
    done: list[Sequence[str]] = []
    really = facts.read_facts

    def read(
        backend: Any, trees: Mapping[str, Any], externals: Mapping[str, Any], stages: Sequence[str]
    ) -> dict[str, Any]:
        done.append(stages)
        return really(backend, trees, externals, stages)

    monkeypatch.setattr(facts, "read_facts", read)
    return done


@pytest.fixture
def ask(root: Path) -> Asked:
    return lambda: facts.cached(BACKEND, {"open_instruct": Folder(root)}, {}, "sft")


def entries() -> list[Path]:
    return sorted(facts.cache_folder().glob("*.json"))


def test_what_is_read_survives_json(root: Path) -> None:
    told = facts.read_facts(BACKEND, {"open_instruct": Folder(root)}, {}, ["sft", "dpo"])
    again = json.loads(json.dumps(told))
    one = facts.schema_of(told, BACKEND, "sft", "source", "x")
    other = facts.schema_of(again, BACKEND, "sft", "source", "x")
    assert one == other
    assert one.path.reads["lora_rank"][0].when == ("not cache_dataset_only", "use_lora")
    assert set(one.digests) == {
        "open_instruct/__init__.py", "open_instruct/finetune.py", "open_instruct/helper.py",
    } - ({"open_instruct/__init__.py"} - set(one.digests))  # fmt: skip
    with pytest.raises(LookupError, match="dpo"):
        facts.schema_of(told, BACKEND, "dpo", "source", "x")


@pytest.mark.parametrize(
    ("stage", "epochs", "rate"),
    [("dpo", 1, 2e-5), ("dpo_olmo_core", 1, 2e-5), ("sft_olmo_core", 3, 8e-5)],
)
def test_the_snapshot_keeps_the_defaults_of_each_script(
    stage: str, epochs: int, rate: float
) -> None:
    """SFT on OLMo-core parses DPO's dataclasses, and gives its parser defaults of its own."""
    fields = facts.schema_of(
        locate.snapshot("open_instruct"), BACKEND, stage, "snapshot", "x"
    ).fields
    assert (fields["num_epochs"].default, fields["learning_rate"].default) == (epochs, rate)


def test_mappings_that_names_are_looked_up_in(root: Path) -> None:
    (root / "dataset_transformation.py").write_text(
        "from open_instruct.helper import work\n"
        "def one(row, *, size): ...\n"
        "def two(row, **rest): ...\n"
        "NAME = 'x'\n"
        "CHAT_TEMPLATES = {'tulu': 'text', NAME: f'{NAME}'}\n"
        "TRANSFORM_FNS = {'a': (one, 'map'), 'b': two, 'c': work}\n"
        "GET_TOKENIZER_FN = {'a': one}\n"
        "GET_TOKENIZER_FN['late'] = two\n",
        encoding="utf-8",
    )
    told = facts.read_facts(BACKEND, {"open_instruct": Folder(root)}, {}, ["sft"])
    # what grows later is not known as a whole
    assert told["tables"]["sft"] == {
        "CHAT_TEMPLATES": {"tulu": [], "x": []},
        "TRANSFORM_FNS": {"a": ["row", "size"], "b": ["row", "**"], "c": []},
    }


@pytest.mark.parametrize("name", ["finetune.py", "helper.py"])
def test_a_changed_file_is_read_again(
    ask: Asked, root: Path, reads: list[Sequence[str]], name: str
) -> None:
    ask()
    path = root / name
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace("def ", "\ndef ", 1), encoding="utf-8")
    ask()
    assert len(reads) == 2
    # and what was known of the first form is not lost, where the script itself tells them apart
    path.write_text(before, encoding="utf-8")
    ask()
    assert len(reads) == (2 if name == "finetune.py" else 3)


def test_a_type_of_another_package_that_the_pin_does_not_use(ask: Asked, root: Path) -> None:
    text = FINETUNE.replace(
        "    spare: int = 0\n", "    spare: LMLossImplementation = LMLossImplementation.default\n"
    )
    imported = "from olmo_core.nn.lm_head import LMLossImplementation\n"
    (root / "finetune.py").write_text(imported + text, encoding="utf-8")
    known = facts.schema_of(ask(), BACKEND, "sft", "source", "x")
    assert known.refusal("spare", ["fused_linear"]) is None
    assert "not one of default, fused_linear" in (known.refusal("spare", ["fused"]) or "")


def test_a_cache_in_an_impossible_place(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    assert ask()["stages"]["sft"]


def test_a_second_question_reads_nothing_but_in_another_version_of_launch(
    ask: Asked, reads: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask() == ask()
    assert reads == [["sft"]]
    monkeypatch.setattr(facts, "FORM", facts.FORM + 1)
    ask()
    assert len(reads) == 2
    assert len(entries()) == 2


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"files": {"nowhere": "00"}}', b"[" * 100_000])
def test_a_damaged_entry_is_read_anew(
    ask: Asked, reads: list[Sequence[str]], content: bytes
) -> None:
    good = ask()
    (entry,) = entries()
    entry.write_bytes(content)
    assert ask() == good
    assert len(reads) == 2
    # and mended
    assert ask() == good
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def main(:\n", "invalid syntax"),
        ("x = 1\n", "no class FlatArguments"),
        (FINETUNE.replace("max_seq_length", "longest"), "it has no max_seq_length"),
    ],
)
def test_a_script_that_cannot_be_read_says_why(
    root: Path, ask: Asked, text: str, reason: str
) -> None:
    (root / "finetune.py").write_text(text, encoding="utf-8")
    told = ask()
    assert reason in told["unreadable"]["sft"]
    with pytest.raises(LookupError, match=re.escape(told["unreadable"]["sft"][:20])):
        facts.schema_of(told, BACKEND, "sft", "source", "x")
