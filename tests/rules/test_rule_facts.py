"""Which facts a rule needs, and which say more than it."""

from pathlib import Path

from rule_findings import values_of

from launcher.rules import registry
from launcher.rules.context import Context, Machine, Split


def codes(**known: object) -> set[str]:
    args = {
        "torch_compile": True,
        "pad_to_multiple_of": 512,
        "optim": "adamw_8bit",
        "fsdp": "full_shard",
    }
    context = Context(
        values=values_of("trl-sft", args), environ={"PATH": "", "HOME": "/nonexistent"}, **known
    )  # type: ignore[arg-type]
    return {finding.code for finding in registry.apply_in(context)}


def test_a_rule_speaks_only_where_the_facts_that_it_needs_are_known() -> None:
    facts = {
        "no-compiler": {"machine": Machine()},
        "optim-missing": {"packages": {"flash-attn": "2.8.3"}},
        "fsdp-alone": {"split": Split(processes=1, devices=1)},
    }
    for code, known in facts.items():
        assert code not in codes()
        assert code in codes(**known)


def test_what_a_run_has_of_its_own_says_more_than_its_folder(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    here = {"machine": Machine(), "output": tmp_path}
    assert "finished-output" in codes(**here)
    assert "finished-output" not in codes(**here, attempts=1)
    # nobody looks at the folders of another machine
    assert "finished-output" not in codes(output=tmp_path)
