"""Which source is looked at, whether it is the pin, and what schema comes out of it."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkouts
import pytest
from conftest import NO_PACKAGES, Write

from launcher.errors import InvalidConfig, NotReady, Severity
from launcher.pin import snapshot
from launcher.upstream import locate
from launcher.upstream.locate import Upstream
from launcher.upstream.source.packages import Folder, find_package
from launcher.upstream.trainers import BACKENDS

NEEDED = sorted(BACKENDS["open_instruct"].STAGES["sft"].names.needed)
FINETUNE = (
    "from dataclasses import dataclass\n@dataclass\nclass FlatArguments:\n    seed: int = 7\n"
    "    brand_new: str = 'x'\n" + "".join(f"    {name}: int = 1\n" for name in NEEDED)
)
TOKENIZER = "from dataclasses import dataclass\n@dataclass\nclass TokenizerConfig:\n    use_fast: bool = True\n"

Checkout = Callable[..., Path]


@pytest.fixture
def fake(write: Write) -> Checkout:
    """A checkout of two files, at no commit."""

    def made(name: str = "open-instruct", finetune: str = FINETUNE) -> Path:
        write(f"{name}/open_instruct/dataset_transformation.py", TOKENIZER)
        return write(f"{name}/open_instruct/finetune.py", finetune).parent.parent

    return made


@pytest.fixture(scope="session", params=checkouts.COMMITS)
def known_root(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """A known commit, and a checkout of it."""
    return request.param, checkouts.require(request.param)


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LAUNCH_OPEN_INSTRUCT", raising=False)
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path / "nowhere")
    monkeypatch.setattr(locate, "FOUND_IN", ())


def pin_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files of `root` the pinned ones."""
    facts = dict(locate.snapshot("open_instruct"))
    facts["files"] = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*.py")
    }
    monkeypatch.setattr(locate, "snapshot", lambda backend: facts)


def test_only_the_snapshot() -> None:
    source = locate.locate("open_instruct")
    assert (source.root, source.source, source.pinned) == (None, "snapshot", True)
    assert source.version == BACKENDS["open_instruct"].PIN
    assert "the committed snapshot" in source.describe()


def test_the_order_of_places(fake: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: fake(name) for name in ("named", "variable", "submodule", "found")}
    monkeypatch.setattr(locate, "FOUND_IN", (Path("/nowhere"), places["found"]))
    assert locate.locate("open_instruct").root == places["found"]
    assert locate.locate("open_instruct").is_named is False
    monkeypatch.setattr(locate, "SUBMODULE", places["submodule"])
    assert locate.locate("open_instruct").source == "submodule"
    environ = {"LAUNCH_OPEN_INSTRUCT": str(places["variable"])}
    assert locate.locate("open_instruct", environ=environ).root == places["variable"]
    named = locate.locate("open_instruct", environ=environ, checkout=places["named"])
    assert (named.root, named.source, named.is_named) == (places["named"], "--open-instruct", True)


@pytest.mark.parametrize(
    ("name", "words"),
    [("empty", "is empty"), ("other", "does not hold one"), ("no", "is not there")],
)
def test_a_named_place_that_holds_no_checkout(
    write: Write, tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    write("other/README.md", "")
    for environ, checkout in (
        ({"LAUNCH_OPEN_INSTRUCT": str(tmp_path / name)}, None),
        ({}, tmp_path / name),
    ):
        with pytest.raises(NotReady, match=words) as raised:
            locate.locate("open_instruct", environ=environ, checkout=checkout)
        (finding,) = raised.value.findings
        assert finding.code == "no-checkout"
        # where it was named, and nothing of the submodule, which was not
        source = "LAUNCH_OPEN_INSTRUCT" if environ else "--open-instruct"
        assert source in finding.message and str(tmp_path / name) in finding.message
        assert "git" not in str(finding.help)


def test_packages_are_found_on_another_interpreters_path(tmp_path: Path) -> None:
    assert locate.locate("trl", search=(tmp_path,)).source == "snapshot"


def test_files_that_equal_the_snapshots_are_the_pin(
    fake: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fake()
    pin_to(root, monkeypatch)
    source = locate.locate("open_instruct", checkout=root)
    assert source.pinned and source.version == source.pin
    assert locate.unpinned(source, where_found="error", allowed=False) is None
    (root / "open_instruct" / "finetune.py").write_text(f"{FINETUNE}\n# edited\n")
    source = locate.locate("open_instruct", checkout=root)
    assert source.changed == ("open_instruct/finetune.py",)
    assert not source.pinned
    assert source.as_json()["changed_files"] == ["open_instruct/finetune.py"]


@pytest.mark.parametrize(
    ("is_named", "where_found", "allowed", "severity"),
    [
        (False, "warning", False, "warning"),
        (False, "error", False, "error"),
        (True, "warning", False, "error"),
        (True, "error", False, "error"),
        (False, "error", True, "warning"),
        (True, "error", True, "warning"),
    ],
)
def test_what_is_said_of_another_commit(
    is_named: bool, where_found: Severity, allowed: bool, severity: str
) -> None:
    source = Upstream(
        backend="open_instruct", root=Path("/x"), source="found", is_named=is_named, pin="a" * 40,
        version="b" * 40, changed=("open_instruct/finetune.py",),
    )  # fmt: skip
    found = locate.unpinned(source, where_found=where_found, allowed=allowed)
    assert found is not None
    assert (found.severity, found.code) == (severity, "unpinned-checkout")
    assert "a" * 40 in found.message and "b" * 40 in found.message


@pytest.mark.parametrize(
    ("version", "stash", "checkout"),
    [
        ("a" * 40 + "+edited", True, False),
        ("b" * 40 + "+edited", True, True),
        ("b" * 40, False, True),
    ],
)
def test_an_edit_is_not_undone_by_a_checkout(version: str, stash: bool, checkout: bool) -> None:
    source = Upstream(
        backend="open_instruct", root=Path("/x"), source="found", is_named=True, pin="a" * 40,
        version=version, changed=("open_instruct/finetune.py",),
    )  # fmt: skip
    found = locate.unpinned(source, where_found="error", allowed=True)
    assert found is not None and found.help is not None
    assert ("git -C /x stash" in found.help, "checkout aaaaaaaaaaaa" in found.help) == (
        stash,
        checkout,
    )


def test_other_releases_of_trl_are_read_and_noted() -> None:
    source = Upstream(
        backend="trl", root=Path("/x"), source="installed", is_named=True, pin="trl 1", version="trl 2",
        changed=("trl/x.py",),
    )  # fmt: skip
    found = locate.unpinned(source, where_found="error", allowed=False)
    assert found is not None and (found.severity, found.code) == ("note", "other-version")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_the_snapshot_has_every_name_that_we_use(backend: str, stage: str) -> None:
    source = locate.locate(backend, search=())
    schema = locate.load_schema(source, stage)
    assert schema.source == "snapshot"
    entry = BACKENDS[backend].STAGES[stage]
    names = entry.names
    used = {
        names.model, names.data, names.output, names.per_device, names.accumulation, names.epochs,
    }  # fmt: skip
    used |= {
        names.max_steps, names.max_length, names.logging_steps, names.liger,
        names.packing or "seed",
    }  # fmt: skip
    assert used | entry.splits | entry.hints.keys() | entry.derived.keys() <= schema.fields.keys()
    # a moved key is none of this script's, what it became is
    assert not {key for key in entry.moved if key in schema.fields}
    assert {moved.to for moved in entry.moved.values()} - {None} <= schema.fields.keys()


def test_another_commit_is_read_only_where_that_is_allowed(fake: Checkout) -> None:
    source = locate.locate("open_instruct", checkout=fake())
    assert locate.load_schema(source, "sft").source == "snapshot"
    schema = locate.load_schema(source, "sft", allow_unpinned=True)
    assert (schema.source, list(schema.fields)) == (
        "source",
        ["seed", "brand_new", *NEEDED, "use_fast"],
    )
    assert schema.fields["seed"].default == 7


@pytest.mark.parametrize(
    "text",
    [
        "from dataclasses import *\n@dataclass\nclass FlatArguments:\n    seed: int = 1\n",
        "\0",
        "class B: ...\nclass FlatArguments(B, B): ...\n",
    ],
)
def test_another_commit_that_cannot_be_read(fake: Checkout, text: str) -> None:
    source = locate.locate("open_instruct", checkout=fake(finetune=text))
    with pytest.raises(InvalidConfig) as raised:
        locate.load_schema(source, "sft", allow_unpinned=True)
    assert raised.value.findings[0].code == "unreadable-source"


def test_a_snapshot_is_what_its_commit_gives(known_root: tuple[str, Path]) -> None:
    commit, root = known_root
    if find_package("olmo_core") is None:
        pytest.skip(NO_PACKAGES)
    taken = snapshot.take("open_instruct", root)
    assert json.loads(json.dumps(taken)) == locate.known_facts("open_instruct", commit), (
        "make snapshot"
    )


def test_the_commit_of_a_checkout_decides_which_facts_serve(
    known_root: tuple[str, Path], tmp_path: Path
) -> None:
    commit, root = known_root
    source = locate.locate("open_instruct", checkout=root)
    assert (source.version, source.release, source.pinned) == (commit, commit, True)
    assert locate.unpinned(source, where_found="error", allowed=False) is None
    schema = locate.load_schema(source, "dpo")
    assert (schema.source, schema.version) == ("snapshot", commit)
    # without a git history the files tell
    copy = tmp_path / "copy"
    shutil.copytree(root / "open_instruct", copy / "open_instruct")
    assert locate.locate("open_instruct", checkout=copy).version == commit


def test_of_checkouts_that_are_found_the_pin_comes_first(
    fake: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies in the usual place: the search goes on past it, and comes back to the first one."""
    fake("oi")
    beside = fake("oi-other", f"{FINETUNE}# at the pin\n")
    monkeypatch.setattr(locate, "FOUND_IN", (tmp_path / "oi",))
    assert locate.locate("open_instruct").root == tmp_path / "oi"
    pin_to(beside, monkeypatch)
    assert locate.locate("open_instruct").root == beside
    # a place that is named is taken as it is
    environ = {"LAUNCH_OPEN_INSTRUCT": str(tmp_path / "oi")}
    assert locate.locate("open_instruct", environ=environ).root == tmp_path / "oi"


@pytest.mark.slow
def test_the_snapshot_is_what_the_pinned_packages_give() -> None:
    source = locate.locate("trl")
    if source.root is None or not source.pinned:
        pytest.skip(f"{NO_PACKAGES}: {source.pin}")
    assert_current("trl", snapshot.take("trl"))


def assert_current(backend: str, taken: dict[str, Any]) -> None:
    assert json.loads(json.dumps(taken)) == locate.snapshot(backend), "make snapshot"


def test_packages_may_lie_in_several_places(tmp_path: Path) -> None:
    """A user's own site-packages beside the system's: each package has its own folder."""
    for name, site in (("trl", "mine"), ("transformers", "theirs")):
        (tmp_path / site / name).mkdir(parents=True)
        (tmp_path / site / name / "__init__.py").touch()
        (tmp_path / site / f"{name}-9.1.dist-info").mkdir()
    source = locate.locate("trl", search=[tmp_path / "mine", tmp_path / "theirs"])
    assert source.root == tmp_path / "mine"
    assert source.packages["transformers"] == Folder(tmp_path / "theirs" / "transformers")
    assert source.version == "trl 9.1, transformers 9.1"
