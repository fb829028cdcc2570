"""Which trainer, stage or script it is, is asked nowhere but where trainers are described."""

import ast
from collections.abc import Iterator

from conftest import REPOSITORY

from launcher.upstream.trainers import BACKENDS

NAMES = {*BACKENDS, *(key for backend in BACKENDS.values() for key in backend.STAGES)}
PACKAGE = REPOSITORY / "launcher"
INSIDE = "workflows/rehearse/inside"
DESCRIPTIONS = {
    *(f"upstream/{name}.py" for name in BACKENDS),
    *(
        path.relative_to(PACKAGE).as_posix()
        for path in (PACKAGE / "upstream" / "scripts").glob("*.py")
    ),
    # what a new stage file holds for each of them
    "stage/draft.py",
    # what the scripts and files of other tools become for each of them
    "stage/conversion/commands.py",
    "stage/conversion/convert.py",
    "stage/conversion/data_sets.py",
    "stage/conversion/sources.py",
    "stage/conversion/tools/open_instruct.py",
    "stage/conversion/tools/trl.py",
    # how its scripts are called in the trainer's own Python
    *(f"{INSIDE}/{name}_stage.py" for name in BACKENDS),
}
ALLOWED = {
    # a key of the file's own, `open_instruct:`
    "config/load.py": ["'open_instruct' in names"],
    # the tool that a file was written for, and the trainer that such files are converted for
    "cli/commands/configs.py": ["backend != 'trl'"],
    # names of losses
    "plan/command.py": ["str(values.get('loss_type')) in ('dpo', 'dpo_norm')"],
    "rules/trl/arguments.py": ["loss != 'sft'"],
    "workflows/ladder/ladder.py": ["names <= {'dpo', 'dpo_norm', 'sigmoid'}"],
    # the package that has types of its dataclasses
    "pin/snapshot.py": ["backend == 'open_instruct'"],
    # what the path of an unknown file or script suggests
    "stage/stage.py": ["'dpo' in str(config.path).lower()"],
    "verdict/evidence.py": ["'dpo' in script", "'sft' in script"],
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """The name and the content of every module."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield path.relative_to(PACKAGE).as_posix(), tree


def comparisons(tree: ast.Module) -> list[str]:
    """The comparisons of a module with the name of a trainer, a stage or a script."""
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and constants(node) & NAMES:
            texts.append(ast.unparse(node))
    return sorted(texts)


def constants(node: ast.Compare) -> set[object]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


def test_nothing_asks_which_trainer_it_is() -> None:
    by_module = {}
    for name, tree in modules():
        texts = comparisons(tree)
        if texts and name not in DESCRIPTIONS:
            by_module[name] = texts
    assert by_module == {name: sorted(texts) for name, texts in ALLOWED.items()}


def test_nothing_but_the_description_of_a_script_reads_its_loop() -> None:
    """What follows from a loop is a property of `Entry`: no comparison of its name, and no table by
    it.
    """
    readers = set()
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "loop":
                readers.add(name)
    assert readers == {"upstream/entry.py"}
