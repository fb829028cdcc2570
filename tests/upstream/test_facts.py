"""What was read of a source, as JSON and back, and the cache that remembers it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from unused_arguments import FINETUNE, HELPER

from launcher.upstream import facts, locate
from launcher.upstream.schema import Schema
from launcher.upstream.source.packages import Folder
from launcher.upstream.trainers import BACKENDS

BACKEND = BACKENDS["open_instruct"]

Facts = dict[str, Any]
Ask = Callable[[], Facts]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The package of a checkout."""
    folder = tmp_path / "checkout" / "open_instruct"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "finetune.py").write_text(FINETUNE, encoding="utf-8")
    (folder / "helper.py").write_text(HELPER, encoding="utf-8")
    return folder


@pytest.fixture
def stages_read(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The stages that were read, an entry for each time."""
    stages_of_reads: list[Sequence[str]] = []
    read = facts.read_facts

    def record(
        backend: Any, trees: Mapping[str, Any], externals: Mapping[str, Any], stages: Sequence[str]
    ) -> Facts:
        stages_of_reads.append(stages)
        return read(backend, trees, externals, stages)

    monkeypatch.setattr(facts, "read_facts", record)
    return stages_of_reads


@pytest.fixture
def ask(root: Path) -> Ask:
    """Ask for the facts of SFT, which the cache may hold."""
    return lambda: facts.read_cached_facts(BACKEND, {"open_instruct": Folder(root)}, {}, "sft")


def read_facts(root: Path, *stages: str) -> Facts:
    return facts.read_facts(BACKEND, {"open_instruct": Folder(root)}, {}, stages)


def schema_of(known: Facts, stage: str = "sft") -> Schema:
    return facts.build_schema(known, BACKEND, stage, "source", "x")


def cache_entries() -> list[Path]:
    return sorted(facts.cache_folder().glob("*.json"))


def test_facts_survive_json(root: Path) -> None:
    read = read_facts(root, "sft")
    schema = schema_of(read)
    kept = json.loads(json.dumps(read))
    assert schema_of(kept) == schema
    (place,) = schema.path.reads["lora_rank"]
    assert place.when == ("not cache_dataset_only", "use_lora")
    assert {"open_instruct/finetune.py", "open_instruct/helper.py"} <= set(schema.digests)


def test_a_script_that_is_not_there_has_no_schema(root: Path) -> None:
    with pytest.raises(LookupError, match="dpo"):
        schema_of(read_facts(root, "sft", "dpo"), "dpo")


@pytest.mark.parametrize(
    ("stage", "epochs", "rate"),
    [("dpo", 1, 2e-5), ("dpo_olmo_core", 1, 2e-5), ("sft_olmo_core", 3, 8e-5)],
)
def test_the_snapshot_keeps_the_defaults_of_each_script(
    stage: str, epochs: int, rate: float
) -> None:
    """SFT on OLMo-core parses DPO's dataclasses, and gives its parser defaults of its own."""
    fields = schema_of(dict(locate.load_snapshot("open_instruct")), stage).fields
    assert fields["num_epochs"].default == epochs
    assert fields["learning_rate"].default == rate


TRANSFORMATION = """
from open_instruct.helper import work
def one(row, *, size): ...
def two(row, **rest): ...
NAME = 'x'
CHAT_TEMPLATES = {'tulu': 'text', NAME: f'{NAME}'}
TRANSFORM_FNS = {'a': (one, 'map'), 'b': two, 'c': work}
GET_TOKENIZER_FN = {'a': one}
GET_TOKENIZER_FN['late'] = two
"""


def test_tables_by_name_are_known_unless_they_grow_later(root: Path) -> None:
    (root / "dataset_transformation.py").write_text(TRANSFORMATION, encoding="utf-8")
    assert read_facts(root, "sft")["tables"]["sft"] == {
        "CHAT_TEMPLATES": {"tulu": [], "x": []},
        "TRANSFORM_FNS": {"a": ["row", "size"], "b": ["row", "**"], "c": []},
    }


def test_a_type_of_another_package_that_the_pin_does_not_use(ask: Ask, root: Path) -> None:
    imported = "from olmo_core.nn.lm_head import LMLossImplementation\n"
    field = "spare: LMLossImplementation = LMLossImplementation.default"
    text = FINETUNE.replace("spare: int = 0", field)
    (root / "finetune.py").write_text(imported + text, encoding="utf-8")
    schema = schema_of(ask())
    assert schema.refusal("spare", ["fused_linear"]) is None
    assert "not one of default, fused_linear" in (schema.refusal("spare", ["fused"]) or "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def main(:\n", "invalid syntax"),
        ("x = 1\n", "no class FlatArguments"),
        (FINETUNE.replace("max_seq_length", "longest"), "it has no max_seq_length"),
    ],
)
def test_a_script_that_cannot_be_read_says_why(
    text: str, reason: str, root: Path, ask: Ask
) -> None:
    (root / "finetune.py").write_text(text, encoding="utf-8")
    with pytest.raises(LookupError, match=reason):
        schema_of(ask())


def test_a_second_question_reads_nothing(ask: Ask, stages_read: list[Sequence[str]]) -> None:
    assert ask() == ask()
    assert stages_read == [["sft"]]


def test_another_version_of_launch_reads_anew(
    ask: Ask, stages_read: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask()
    monkeypatch.setattr(facts, "FORM", facts.FORM + 1)
    ask()
    assert len(stages_read) == 2
    assert len(cache_entries()) == 2


@pytest.mark.parametrize(
    ("name", "reads_after_undoing"),
    [
        # each form of the script has an entry of its own
        ("finetune.py", 2),
        ("helper.py", 3),
    ],
)
def test_a_changed_file_is_read_again(
    name: str, reads_after_undoing: int, ask: Ask, root: Path, stages_read: list[Sequence[str]]
) -> None:
    ask()
    path = root / name
    before = path.read_text(encoding="utf-8")

    path.write_text(before.replace("def ", "\ndef ", 1), encoding="utf-8")
    ask()
    assert len(stages_read) == 2

    path.write_text(before, encoding="utf-8")
    ask()
    assert len(stages_read) == reads_after_undoing


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"files": {"nowhere": "00"}}', b"[" * 100_000])
def test_a_damaged_entry_is_replaced(
    content: bytes, ask: Ask, stages_read: list[Sequence[str]]
) -> None:
    before = ask()
    (entry,) = cache_entries()
    entry.write_bytes(content)
    assert ask() == before
    assert ask() == before
    assert len(stages_read) == 2


def test_a_cache_in_an_impossible_place_does_no_harm(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    assert ask()["stages"]["sft"]
