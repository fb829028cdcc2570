"""What upstream does at a commit: by its source, by its history, and never by a guess."""

from pathlib import Path

import checkouts
import pytest
from repositories import commit

from launcher.machine.git import CommitTree, Repository
from launcher.upstream import behaviour, locate
from launcher.upstream.behaviour import BEHAVIOURS, Behaviour
from launcher.upstream.open_instruct import PIN, STAGES
from launcher.upstream.source.packages import Sources

SCRIPTS = [key for key, entry in STAGES.items() if not entry.behaves_as]
"""Scripts with behaviours of their own; the others share those of one of these."""
BEGINNINGS = [change for change in BEHAVIOURS if change.since]
ENDS = [change for change in BEHAVIOURS if change.until]


def name_of(change: Behaviour) -> str:
    return change.name


def read_at(repository: Repository, revision: str, key: str) -> dict[str, bool | None]:
    """The behaviours of a script, as its source at a commit shows them."""
    full = repository.commit(revision)
    if full is None:
        pytest.skip(f"{checkouts.missing(checkouts.NEWEST)}: the history lacks {revision}")
    sources = Sources({"open_instruct": CommitTree(repository, full, "open_instruct")})
    return behaviour.observe_behaviours(sources, key, STAGES[key].script)


@pytest.fixture(scope="module")
def history() -> Repository:
    return Repository(checkouts.require(checkouts.NEWEST))


@pytest.mark.parametrize("change", BEGINNINGS, ids=name_of)
def test_a_behaviour_begins_with_its_commit(history: Repository, change: Behaviour) -> None:
    for key in change.scripts:
        before = read_at(history, f"{change.since}^", key)
        after = read_at(history, str(change.since), key)
        assert (before[change.name], after[change.name]) == (False, True), key


@pytest.mark.parametrize("change", ENDS, ids=name_of)
def test_a_behaviour_ends_with_its_commit(history: Repository, change: Behaviour) -> None:
    for key in change.scripts:
        before = read_at(history, f"{change.until}^", key)
        after = read_at(history, str(change.until), key)
        assert (before[change.name], after[change.name]) == (True, False), key


@pytest.mark.parametrize("commit_name", checkouts.COMMITS)
@pytest.mark.parametrize("key", SCRIPTS)
def test_every_behaviour_is_known_at_a_known_commit(commit_name: str, key: str) -> None:
    source = locate.locate("open_instruct", checkout=checkouts.require(commit_name))
    behaviours = locate.load_schema(source, key, allow_unpinned=True).behaviours
    assert behaviours.keys() == {entry.name for entry in behaviour.list_behaviours(key)}
    assert None not in behaviours.values()


@pytest.mark.parametrize("revision", [PIN, checkouts.NEWEST])
@pytest.mark.parametrize("key", SCRIPTS)
def test_the_history_says_what_the_source_shows(
    history: Repository, key: str, revision: str
) -> None:
    by_history = behaviour.complete_answers({}, key, history, revision)
    by_source = read_at(history, revision, key)
    for change in behaviour.list_behaviours(key):
        if change.since or change.until:
            assert by_history[change.name] == by_source[change.name], change.name


def test_a_source_that_shows_neither_form_is_not_guessed_at(tmp_path: Path) -> None:
    """Nor does the history of another project tell."""
    root = tmp_path / "open-instruct"
    revision = commit(root, {"dpo.py": "def main(args): train(args)\n"}, "rewritten")
    repository = Repository(root)

    unknown = read_at(repository, revision, "dpo_olmo_core")
    assert set(unknown.values()) == {None}

    # the whole history is here, and none of the changes is in it
    complete = behaviour.complete_answers(unknown, "dpo_olmo_core", repository, revision)
    assert complete["guards-negative-clipping"] is True
    assert complete["one-split-a-set"] is False
    assert complete["cuts-rows"] is None
