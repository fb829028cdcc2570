"""What upstream does at a commit: by its source, by its history, and never by a guess."""

from pathlib import Path

import checkouts
import pytest
from repositories import commit

from launcher.machine.git import CommitTree, Repository
from launcher.upstream import behaviour, facts, locate
from launcher.upstream.behaviour import BEHAVIOURS, Behaviour
from launcher.upstream.open_instruct import BASELINE, PIN, STAGES
from launcher.upstream.source.packages import Sources

DESCRIBED = [key for key, entry in STAGES.items() if not entry.behaves_as]
"""Scripts with behaviours of their own; the others share those of one of these."""
CHANGES = [
    (known, change)
    for known in BEHAVIOURS
    for change in (known.since, known.until)
    if change is not None
]


def answers(repository: Repository, revision: str, key: str) -> dict[str, bool | None]:
    full = repository.commit(revision)
    if full is None:
        pytest.skip(f"{checkouts.missing(checkouts.NEWEST)}: the history lacks {revision}")
    sources = Sources({"open_instruct": CommitTree(repository, full, "open_instruct")})
    return behaviour.observe_behaviours(sources, key, STAGES[key].script)


@pytest.fixture(scope="module")
def history() -> Repository:
    return Repository(checkouts.require(checkouts.NEWEST))


@pytest.mark.parametrize(
    ("known", "change"), CHANGES, ids=[f"{known.name}-{change}" for known, change in CHANGES]
)
def test_the_commit_that_brought_or_ended_a_behaviour(
    history: Repository, known: Behaviour, change: str
) -> None:
    """The source shows the change between that commit and the one before it."""
    begins = change == known.since
    for key in known.scripts:
        before = answers(history, f"{change}^", key)[known.name]
        after = answers(history, change, key)[known.name]
        assert (before, after) == (not begins, begins), key


@pytest.mark.parametrize("commit_name", checkouts.COMMITS)
@pytest.mark.parametrize("key", DESCRIBED)
def test_every_behaviour_is_known_at_a_known_commit(commit_name: str, key: str) -> None:
    root = checkouts.require(commit_name)
    source = locate.locate("open_instruct", checkout=root)
    schema = locate.load_schema(source, key, allow_unpinned=True)
    assert schema.behaviours.keys() == {known.name for known in behaviour.of_script(key)}
    assert None not in schema.behaviours.values()


@pytest.mark.parametrize("key", DESCRIBED)
def test_history_says_the_same_as_the_source(history: Repository, key: str) -> None:
    dated = [known.name for known in behaviour.of_script(key) if known.since or known.until]
    for revision in (PIN, checkouts.NEWEST):
        by_history = behaviour.completed({}, key, history, revision)
        by_source = answers(history, revision, key)
        assert {name: by_history[name] for name in dated} == {
            name: by_source[name] for name in dated
        }


@pytest.mark.parametrize("commit_name", (BASELINE, checkouts.NEWEST))
@pytest.mark.parametrize("key", DESCRIBED)
def test_a_snapshot_holds_the_behaviours_of_its_commit(commit_name: str, key: str) -> None:
    """All that came or went did so between these two."""
    known_facts = locate.known_facts("open_instruct", commit_name)
    schema = facts.schema_of(
        known_facts, locate.BACKENDS["open_instruct"], key, "snapshot", commit_name
    )
    assert schema.behaviours.keys() == {known.name for known in behaviour.of_script(key)}
    is_newest = commit_name == checkouts.NEWEST
    for known in behaviour.of_script(key):
        if known.since is not None:
            assert schema.does(known.name) is is_newest
        if known.until is not None:
            assert schema.does(known.name) is not is_newest


def test_a_source_that_shows_neither_form_is_not_guessed_at(tmp_path: Path) -> None:
    """Nor does a history tell that was cut off, or that is another project's."""
    root = tmp_path / "open-instruct"
    revision = commit(root, {"dpo.py": "def main(args): train(args)\n"}, "rewritten")
    repository = Repository(root)
    unknown = answers(repository, revision, "dpo_olmo_core")
    assert set(unknown.values()) == {None}
    complete = behaviour.completed(unknown, "dpo_olmo_core", repository, revision)
    # the whole history is here, and none of the changes is in it
    assert complete["guards-negative-clipping"] is True
    assert complete["one-split-a-set"] is False
    assert complete["cuts-rows"] is None
