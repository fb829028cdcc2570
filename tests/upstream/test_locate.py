"""Which source is looked at, whether it is the pin, and what schema comes out of it."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import checkouts
import pytest
from conftest import NO_PACKAGES, Write

from launcher.errors import Finding, InvalidConfig, NotReady, Severity
from launcher.pin import snapshot
from launcher.upstream import locate
from launcher.upstream.locate import Upstream
from launcher.upstream.open_instruct import PIN
from launcher.upstream.source.packages import Folder, find_package
from launcher.upstream.trainers import BACKENDS

NEEDED = sorted(BACKENDS["open_instruct"].STAGES["sft"].names.needed)
FIELDS = "".join(f"    {name}: int = 1\n" for name in NEEDED)
FINETUNE = f"""
from dataclasses import dataclass
@dataclass
class FlatArguments:
    seed: int = 7
    brand_new: str = 'x'
{FIELDS}"""
TOKENIZER = """
from dataclasses import dataclass
@dataclass
class TokenizerConfig:
    use_fast: bool = True
"""

Environment = pytest.MonkeyPatch
MakeCheckout = Callable[..., Path]


@pytest.fixture
def checkout_at(write: Write) -> MakeCheckout:
    """Write a checkout of two files, without a git history."""

    def make(name: str = "open-instruct", finetune: str = FINETUNE) -> Path:
        write(f"{name}/open_instruct/dataset_transformation.py", TOKENIZER)
        return write(f"{name}/open_instruct/finetune.py", finetune).parent.parent

    return make


@pytest.fixture(scope="session", params=checkouts.COMMITS)
def commit(request: pytest.FixtureRequest) -> str:
    """A known commit."""
    return str(request.param)


@pytest.fixture(scope="session")
def root(commit: str) -> Path:
    """A checkout of the known commit."""
    return checkouts.require(commit)


@pytest.fixture(autouse=True)
def _nothing_found(monkeypatch: Environment, tmp_path: Path) -> None:
    monkeypatch.delenv("LAUNCH_OPEN_INSTRUCT", raising=False)
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path / "nowhere")
    monkeypatch.setattr(locate, "FOUND_IN", ())


def pin_to(root: Path, monkeypatch: Environment) -> None:
    """Make the files of a checkout the pinned ones."""
    facts = dict(locate.load_snapshot("open_instruct"))
    facts["files"] = {}
    for path in root.rglob("*.py"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        facts["files"][path.relative_to(root).as_posix()] = digest
    monkeypatch.setattr(locate, "load_snapshot", lambda backend: facts)


def test_without_a_checkout_the_committed_snapshot_is_used() -> None:
    source = locate.locate("open_instruct")
    assert source.root is None
    assert source.source == "snapshot"
    assert source.pinned
    assert source.version == PIN
    assert "the committed snapshot" in source.describe()


def test_places_are_searched_in_their_order(
    checkout_at: MakeCheckout, monkeypatch: Environment
) -> None:
    found = checkout_at("found")
    monkeypatch.setattr(locate, "FOUND_IN", (Path("/nowhere"), found))
    source = locate.locate("open_instruct")
    assert source.root == found
    assert not source.is_named

    monkeypatch.setattr(locate, "SUBMODULE", checkout_at("submodule"))
    assert locate.locate("open_instruct").source == "submodule"

    variable = checkout_at("variable")
    environ = {"LAUNCH_OPEN_INSTRUCT": str(variable)}
    assert locate.locate("open_instruct", environ=environ).root == variable

    named = checkout_at("named")
    source = locate.locate("open_instruct", environ=environ, checkout=named)
    assert source.root == named
    assert source.source == "--open-instruct"
    assert source.is_named


def test_of_checkouts_that_are_found_one_at_the_pin_comes_first(
    checkout_at: MakeCheckout, monkeypatch: Environment
) -> None:
    usual = checkout_at("oi")
    beside = checkout_at("oi-other", f"{FINETUNE}# at the pin\n")
    monkeypatch.setattr(locate, "FOUND_IN", (usual,))
    assert locate.locate("open_instruct").root == usual

    pin_to(beside, monkeypatch)
    assert locate.locate("open_instruct").root == beside
    # a place that is named is taken as it is
    environ = {"LAUNCH_OPEN_INSTRUCT": str(usual)}
    assert locate.locate("open_instruct", environ=environ).root == usual


@pytest.mark.parametrize(
    ("name", "reason"),
    [("empty", "is empty"), ("other", "does not hold one"), ("no", "is not there")],
)
def test_a_named_place_without_a_checkout_is_an_error(
    name: str, reason: str, write: Write, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    write("other/README.md", "")
    place = tmp_path / name

    with pytest.raises(NotReady, match=reason) as by_option:
        locate.locate("open_instruct", environ={}, checkout=place)
    environ = {"LAUNCH_OPEN_INSTRUCT": str(place)}
    with pytest.raises(NotReady, match=reason) as by_variable:
        locate.locate("open_instruct", environ=environ)

    for raised, source in ((by_option, "--open-instruct"), (by_variable, "LAUNCH_OPEN_INSTRUCT")):
        (finding,) = raised.value.findings
        assert finding.code == "no-checkout"
        assert source in finding.message
        assert str(place) in finding.message
        # the submodule was not named, and is not to be filled
        assert "git" not in str(finding.help)


def test_files_that_equal_those_of_the_snapshot_are_the_pin(
    checkout_at: MakeCheckout, monkeypatch: Environment
) -> None:
    root = checkout_at()
    pin_to(root, monkeypatch)
    source = locate.locate("open_instruct", checkout=root)
    assert source.pinned
    assert locate.report_unpinned(source, where_found="error", allowed=False) is None

    (root / "open_instruct" / "finetune.py").write_text(f"{FINETUNE}\n# edited\n")
    source = locate.locate("open_instruct", checkout=root)
    assert not source.pinned
    assert source.as_json()["changed_files"] == ["open_instruct/finetune.py"]


OF_PIN = "a" * 40
OTHER = "b" * 40


def finding_about(
    *,
    version: str = OTHER,
    is_named: bool = True,
    where_found: Severity = "error",
    allowed: bool = False,
) -> Finding:
    """What is said of a checkout that is not at the pin."""
    source = Upstream(
        backend="open_instruct",
        root=Path("/x"),
        source="found",
        is_named=is_named,
        pin=OF_PIN,
        version=version,
        changed=("open_instruct/finetune.py",),
    )
    finding = locate.report_unpinned(source, where_found=where_found, allowed=allowed)
    assert finding is not None
    assert finding.code == "unpinned-checkout"
    return finding


@pytest.mark.parametrize("where_found", ["warning", "error"])
def test_a_checkout_of_another_commit_has_the_severity_of_its_place(where_found: Severity) -> None:
    assert finding_about(is_named=True, where_found=where_found).severity == "error"
    assert finding_about(is_named=False, where_found=where_found).severity == where_found
    assert finding_about(where_found=where_found, allowed=True).severity == "warning"


def test_both_commits_are_named() -> None:
    message = finding_about().message
    assert OF_PIN in message
    assert OTHER in message


@pytest.mark.parametrize(
    ("version", "stashes", "checks_out"),
    [(f"{OF_PIN}+edited", True, False), (f"{OTHER}+edited", True, True), (OTHER, False, True)],
)
def test_an_edit_is_stashed_and_another_commit_checked_out(
    version: str, stashes: bool, checks_out: bool
) -> None:
    help = finding_about(version=version).help or ""
    assert ("git -C /x stash" in help) is stashes
    assert ("checkout aaaaaaaaaaaa" in help) is checks_out


def test_another_release_of_trl_is_read_and_noted() -> None:
    source = Upstream(
        backend="trl",
        root=Path("/x"),
        source="installed",
        is_named=True,
        pin="trl 1",
        version="trl 2",
        changed=("trl/x.py",),
    )
    finding = locate.report_unpinned(source, where_found="error", allowed=False)
    assert finding is not None
    assert (finding.severity, finding.code) == ("note", "other-version")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_the_snapshot_has_every_name_that_launch_uses(backend: str, stage: str) -> None:
    fields = locate.load_schema(locate.locate(backend, search=()), stage).fields
    entry = BACKENDS[backend].STAGES[stage]
    names = entry.names
    used = {names.model, names.data, names.output, names.per_device, names.accumulation}
    used |= {names.epochs, names.max_steps, names.max_length, names.logging_steps, names.liger}
    if names.packing:
        used.add(names.packing)
    used |= entry.splits
    used |= entry.hints.keys()
    used |= entry.derived.keys()
    assert used <= fields.keys()
    for key, moved in entry.moved.items():
        assert key not in fields
        assert moved.to is None or moved.to in fields


def test_another_commit_is_read_only_where_that_is_allowed(checkout_at: MakeCheckout) -> None:
    source = locate.locate("open_instruct", checkout=checkout_at())
    assert locate.load_schema(source, "sft").source == "snapshot"

    schema = locate.load_schema(source, "sft", allow_unpinned=True)
    assert schema.source == "source"
    assert list(schema.fields) == ["seed", "brand_new", *NEEDED, "use_fast"]
    assert schema.fields["seed"].default == 7


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(FINETUNE.replace(FIELDS, ""), id="names missing"),
        pytest.param("\0", id="no Python"),
        pytest.param("class B: ...\nclass FlatArguments(B, B): ...\n", id="no order of bases"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error(text: str, checkout_at: MakeCheckout) -> None:
    source = locate.locate("open_instruct", checkout=checkout_at(finetune=text))
    with pytest.raises(InvalidConfig) as raised:
        locate.load_schema(source, "sft", allow_unpinned=True)
    assert raised.value.findings[0].code == "unreadable-source"


def test_a_snapshot_is_what_its_commit_gives(commit: str, root: Path) -> None:
    if find_package("olmo_core") is None:
        pytest.skip(NO_PACKAGES)
    facts = json.loads(json.dumps(snapshot.take("open_instruct", root)))
    assert facts == locate.load_known_facts("open_instruct", commit), "make snapshot"


@pytest.mark.slow
def test_the_snapshot_is_what_the_pinned_packages_give() -> None:
    source = locate.locate("trl")
    if source.root is None or not source.pinned:
        pytest.skip(f"{NO_PACKAGES}: {source.pin}")
    facts = json.loads(json.dumps(snapshot.take("trl")))
    assert facts == locate.load_snapshot("trl"), "make snapshot"


def test_the_commit_of_a_checkout_decides_which_facts_are_used(
    commit: str, root: Path, tmp_path: Path
) -> None:
    source = locate.locate("open_instruct", checkout=root)
    assert (source.version, source.release) == (commit, commit)
    assert source.pinned
    schema = locate.load_schema(source, "dpo")
    assert (schema.source, schema.version) == ("snapshot", commit)

    # without a git history the files tell
    copy = tmp_path / "copy"
    shutil.copytree(root / "open_instruct", copy / "open_instruct")
    assert locate.locate("open_instruct", checkout=copy).version == commit


def test_packages_may_lie_in_several_places(tmp_path: Path) -> None:
    """A user's own site-packages beside the system's: each package has its own folder."""
    mine = tmp_path / "mine"
    theirs = tmp_path / "theirs"
    for site, name in ((mine, "trl"), (theirs, "transformers")):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").touch()
        (site / f"{name}-9.1.dist-info").mkdir()

    source = locate.locate("trl", search=[mine, theirs])

    assert source.root == mine
    assert source.packages["transformers"] == Folder(theirs / "transformers")
    assert source.version == "trl 9.1, transformers 9.1"


def test_without_packages_on_the_path_of_an_interpreter_the_snapshot_is_used(
    tmp_path: Path,
) -> None:
    assert locate.locate("trl", search=(tmp_path,)).source == "snapshot"
