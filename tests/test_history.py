"""What became of an argument: from the committed table, and from git histories of all shapes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from launcher import history, upstream
from launcher.backends import BACKENDS
from launcher.git import Repository
from launcher.history import Event
from launcher.lineage import Lineage, pull_request

SFT, DPO, OLMO = (f"open_instruct/{name}.py" for name in ("finetune", "dpo_tune_cache", "dpo"))
MAIN = "parser = ArgumentParserPlus((FlatArguments,))"


def arguments(*fields: str, name: str = "FlatArguments", bases: str = "", main: str = MAIN) -> str:
    """A script with one dataclass."""
    body = "\n".join(f"    {text}" for text in fields) or "    pass"
    return f"@dataclass\nclass {name}{bases}:\n{body}\n\n\n{main}\n"


@dataclass
class Checkout:
    """A git repository with an `open_instruct` package, committed to file by file."""

    root: Path
    count: int = 0
    commits: list[str] = field(default_factory=list)

    def git(self, *words: str) -> str:
        day = f"2031-01-{self.count % 28 + 1:02}T12:00:00+0000"
        environ = os.environ | {"GIT_COMMITTER_DATE": day, "GIT_AUTHOR_DATE": day}
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        done = subprocess.run(
            ["git", *identity, "-c", "commit.gpgsign=false", "-C", str(self.root), *words],
            check=True, capture_output=True, text=True, env=environ,
        )  # fmt: skip
        return done.stdout.strip()

    def commit(self, subject: str, files: Mapping[str, str | None]) -> str:
        """Write the files (None: delete), commit; returns the commit."""
        self.count += 1
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                path.unlink()
            else:
                path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", subject)
        self.commits.append(self.git("rev-parse", "HEAD"))
        return self.commits[-1]

    def of(self, key: str, script: str = SFT, head: str = "HEAD") -> tuple[Event, ...]:
        return history.of(key, script, Repository(self.root), head=head)

    def last(self, key: str, script: str = SFT) -> str:
        """The newest event in one line, with the commit as its number, 0 the first."""
        found = self.of(key, script)
        if not found:
            return "nothing"
        at = self.commits.index(found[0].commit)
        return f"{found[0].what} {found[0].to or ''}@{at}".replace(" @", "@")


@pytest.fixture
def repo(tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    root.mkdir()
    checkout = Checkout(root)
    checkout.git("init", "-q")
    return checkout


# ------------------------------------------------------------------------------------ the real history


def test_the_table_tells_of_flash_attention() -> None:
    newest = history.of("use_flash_attn", SFT)[0]
    assert history.sentence(newest) == "removed by #1567 (9e8e2187c, 2026-03-30)"
    assert (newest.owner, newest.file, newest.line) == ("FlatArguments", SFT, 102)
    dpo = history.of("use_flash_attn", DPO)[0]
    assert (dpo.what, dpo.see, dpo.owner) == ("removed", ("attn_implementation",), "ModelConfig")


RENAMED = {
    "dataset_mixer_list": "mixer_list",
    "dataset_mixer_list_splits": "mixer_list_splits",
    "dataset_transform_fn": "transform_fn",
    "dataset_target_columns": "target_columns",
    "dataset_cache_mode": "cache_mode",
    "dataset_local_cache_dir": "local_cache_dir",
    "dataset_skip_cache": "skip_cache",
    "dataset_config_hash": "config_hash",
    "dpo_beta": "beta",
    "dpo_loss_type": "loss_type",
    "dpo_gamma_beta_ratio": "gamma_beta_ratio",
    "dpo_label_smoothing": "label_smoothing",
    "clip_grad_norm": "max_grad_norm",
    "num_train_epochs": "num_epochs",
    "wandb_project_name": "wandb_project",
    "shard_degree": "fsdp_shard_degree",
    "num_replicas": "fsdp_num_replicas",
    # as flags of argparse, the first of them back under its old name today
    "beta": "dpo_beta",
    "use_paged_optimizer": "dpo_use_paged_optimizer",
}


@pytest.mark.parametrize("script", [DPO, OLMO])
def test_every_rename_of_the_table_was_checked_by_eye(script: str) -> None:
    found = {event.key: event.to for event in history.events(script) if event.what == "renamed"}
    assert found == RENAMED


def test_sft_renamed_nothing_and_says_what_it_removed() -> None:
    gone = {event.key for event in history.events(SFT) if event.gone}
    assert not any(event.to for event in history.events(SFT))
    assert gone >= {"use_flash_attn", "run_name", "reduce_loss", "overwrite_output_dir", "dpo_beta"}


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("backend", ["open_instruct", "trl"])
def test_the_table_agrees_with_the_snapshot(backend: str, stage: str) -> None:
    """An argument that is there was last added; one that went away is not there."""
    script = BACKENDS[backend].STAGES[stage].script
    fields = {key.partition(".")[2] for key in upstream.snapshot(backend)["stages"][stage]}
    newest: dict[str, Event] = {}
    for event in history.events(script):
        newest.setdefault(event.key, event)
    assert {key for key, event in newest.items() if event.gone}.isdisjoint(fields)
    if backend == "open_instruct":
        assert {key for key, event in newest.items() if not event.gone} == fields


def test_the_table_holds_facts_only() -> None:
    scripts = [SFT, DPO, OLMO, "trl/scripts/sft.py", "trl/scripts/dpo.py"]
    for event in (event for script in scripts for event in history.events(script)):
        assert re.fullmatch(r"[0-9a-f]{40}|", event.commit)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d|", event.date)
        assert (event.commit and event.date) or event.release
        assert event.line > 0 and event.file.endswith(".py")
        assert (event.what == "renamed") == (event.to is not None)
    path = upstream.REPOSITORY / "launcher" / "snapshots" / "history.json"
    assert max(map(len, path.read_text().splitlines())) < 250


@pytest.mark.slow
def test_the_table_is_the_history_of_the_checkout(checkout: Path) -> None:
    repository, pin = Repository(checkout), BACKENDS["open_instruct"].PIN
    if repository.commit(pin) is None or repository.is_shallow():
        pytest.skip("the checkout has no history")
    lineage = Lineage(repository, "open_instruct")
    for script in (SFT, DPO, OLMO):
        assert set(lineage.events(script, pin)) == set(history.events(script))
    # there the DPO arguments were one flat class in the script
    head = repository.commit("6b3964bc")
    assert head is not None
    told = history.events(DPO, repository, head=head)
    assert set(told) == set(lineage.events(DPO, head)) and told


def test_at_an_older_commit_nothing_is_known_of_later_ones(checkout: Path) -> None:
    repository = Repository(checkout)
    if repository.commit("9e8e2187c~1") is None:
        pytest.skip("the checkout has no history")
    assert history.of("use_flash_attn", SFT, repository, head="9e8e2187c~1")[0].what == "added"
    assert history.of("use_flash_attn", SFT, repository, head="9e8e2187c")[0].what == "removed"
    assert history.of("anything", OLMO, repository, head="6b3964bc") == ()


def test_at_the_commit_of_the_table_no_process_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", fail)
    pin = BACKENDS["open_instruct"].PIN
    assert history.of("use_flash_attn", SFT, Repository(tmp_path), head=pin)[0].pull == 1567
    assert history.of("max_seq_length", "trl/scripts/sft.py", Repository(tmp_path))


@pytest.mark.parametrize(
    ("key", "stage", "said"),
    [
        ("max_seq_length", "sft", "renamed to `max_length` by #3704 (e102ac8df, trl 0.20.0, "),
        ("use_liger", "sft", "renamed to `use_liger_kernel` by #3364 (a8cfca6d0, trl 0.18.0, "),
        ("num_of_sequences", "sft", "removed by #3364 (a8cfca6d0, trl 0.18.0, 2025-04-26); see "),
        ("max_prompt_length", "dpo", "removed by #3906 (e3b7897c8, trl 0.29.0, 2026-02-19)"),
        ("evaluation_strategy", "dpo", "renamed to `eval_strategy` in transformers 4.51"),
        ("no_cuda", "sft", "renamed to `use_cpu` in transformers 5.0"),
        ("per_gpu_train_batch_size", "sft", "removed in transformers 5.0; see `per_device_"),
        ("warmup_ratio", "sft", "renamed to `warmup_steps` in transformers 5.15"),
    ],
)
def test_trl(key: str, stage: str, said: str) -> None:
    assert history.sentence(history.of(key, f"trl/scripts/{stage}.py")[0]).startswith(said)


def test_what_never_was_an_argument_has_no_history() -> None:
    for key in ("", "use_flash", "learning_rat", ".*", "use_flash_attn$", "-S--foo", "a\nb", "ä"):
        assert history.of(key, SFT) == ()
    assert history.of("use_flash_attn", "elsewhere/train.py") == ()


def test_successors() -> None:
    assert history.successor("dataset_mixer_list", DPO) == "mixer_list"
    assert history.successor("use_flash_attn", DPO) is None
    assert history.successor("beta", DPO) is None, "it is there"
    assert history.successor("use_paged_optimizer", DPO) == "dpo_use_paged_optimizer"
    assert history.successor("nothing", DPO) is None


# ---------------------------------------------------------------------------------- other histories


def test_removed_renamed_and_moved(repo: Checkout) -> None:
    repo.commit(
        "start", {SFT: arguments("lr: float = 1.0", "old_name: int = 3", "gone: bool = True")}
    )
    repo.commit(
        "Rename (#7)", {SFT: arguments("lr: float = 1.0", "new_name: int = 3", "gone: bool = True")}
    )
    repo.commit("Remove (#8)", {SFT: arguments("lr: float = 1.0", "new_name: int = 3")})
    base = arguments("lr: float = 1.0", "new_name: int = 3", name="Base", main="")
    script = "from open_instruct import base_args\n" + arguments(bases="(base_args.Base)")
    repo.commit("Move", {"open_instruct/base_args.py": base, SFT: script})
    assert repo.last("old_name") == "renamed new_name@1"
    assert repo.last("gone") == "removed@2"
    assert repo.last("lr") == repo.last("new_name").replace("@1", "@0") == "added@0"
    gone = repo.of("gone")[0]
    assert (gone.owner, gone.file, gone.line, gone.pull) == ("FlatArguments", SFT, 5, 8)
    assert history.sentence(gone) == f"removed by #8 ({gone.commit[:9]}, 2031-01-04)"
    assert [event.what for event in repo.of("gone")] == ["removed", "added"]
    assert history.successor("old_name", SFT, Repository(repo.root)) == "new_name"


def test_a_base_class_dropped_and_a_class_left_out_of_the_parser(repo: Checkout) -> None:
    both = arguments("a: int = 1", name="A", main="") + arguments("b: str = ''", name="B", main="")
    repo.commit("0", {"open_instruct/parts.py": both})
    imports = "from .parts import A, B as Second\n"
    third = arguments("c: float | None = None", name="C", bases="(A)", main="")
    repo.commit("1", {SFT: f"{imports}{third}ArgumentParserPlus((C, Second))"})
    repo.commit("2", {SFT: f"{imports}{third.replace('(A)', '')}ArgumentParserPlus((C, Second))"})
    repo.commit("3", {SFT: f"{imports}{third}HfArgumentParser(C)"})
    assert repo.last("b") == "removed@3"
    assert [(e.what, repo.commits.index(e.commit)) for e in repo.of("a")] == [
        ("added", 3), ("removed", 2), ("added", 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "to"),
    [
        # in the same place, with the same type and default
        ("chat_template: str | None = None", "chat_template_name: str | None = None", True),
        # a default of its own
        ("num_train_epochs: int = 2", "num_epochs: int = 3", True),
        # the same type, spelt otherwise
        (
            "dataset_mixer_list: Optional[List[str]] = None",
            "mixer_list: list[str] | None = None",
            True,
        ),
        # one name says nothing of the other
        ("gradient_checkpointing: bool = False", "activation_memory_budget: float = 1.0", False),
        ("seed: int = 1", "timeout: int = 1", False),
        ("report_to: str = 'all'", "report_to_url: int = 0", False),
    ],
)
def test_what_counts_as_a_rename(repo: Checkout, before: str, after: str, to: bool) -> None:
    repo.commit("0", {SFT: arguments("first: int = 0", before, "last: str = 'x'")})
    repo.commit("1", {SFT: arguments("first: int = 0", after, "last: str = 'x'")})
    old, new = (text.partition(":")[0] for text in (before, after))
    event = repo.of(old)[0]
    assert (event.what, event.to) == (("renamed", new) if to else ("removed", None))
    # what took its place is told all the same
    assert to or event.see == (new,)


def test_code_that_reads_the_new_name_proves_a_rename(repo: Checkout) -> None:
    def script(name: str, at: int) -> str:
        fields = ["a: int = 1", "b: int = 2", "c: int = 3"]
        fields.insert(at, f"{name}: float = -1")
        return arguments(*fields) + f"if args.{name} > 0:\n    clip(args.{name})\n"

    repo.commit("0", {SFT: script("clip_grad_norm", 0)})
    repo.commit("1", {SFT: script("max_norm", 3)})
    assert repo.last("clip_grad_norm") == "renamed max_norm@1"


def test_one_argument_replaces_one_other_at_most(repo: Checkout) -> None:
    repo.commit("0", {SFT: arguments("mixer: str = ''", "mixer_name: str = ''", "z: int = 0")})
    repo.commit("1", {SFT: arguments("mixer_list: str = ''", "z: int = 0")})
    assert (
        sum(event.what == "renamed" for key in ("mixer", "mixer_name") for event in repo.of(key))
        <= 1
    )
    repo.commit(
        "2", {SFT: arguments("mixer_list_a: str = ''", "mixer_list_b: str = ''", "z: int = 0")}
    )
    assert repo.of("mixer_list")[0].what == "removed"


def test_an_alias_that_went_away_was_a_rename(repo: Checkout) -> None:
    old = textwrap.indent("def __post_init__(self):\n    self.length = self.size_of\n", "    ")
    fields = ["length: int = 1", "size_of: int | None = None", "words: int | None = field(default=None, "
              "metadata={'help': 'Deprecated. Use `length` instead.'})"]  # fmt: skip
    repo.commit("0", {SFT: arguments(*fields, main=old + MAIN)})
    repo.commit("1", {SFT: arguments("length: int = 1")})
    assert repo.last("size_of") == "renamed length@1"
    assert repo.last("words") == "removed@1"
    assert repo.of("words")[0].see == ("length",)


def test_back_and_gone_again(repo: Checkout) -> None:
    there, gone = arguments("a: int = 1", "flag: bool = False"), arguments("a: int = 1")
    for text in (there, gone, there, gone):
        repo.commit("x", {SFT: text})
    assert [repo.commits.index(event.commit) for event in repo.of("flag")] == [3, 2, 1, 0]
    assert repo.last("flag") == "removed@3"


def test_commits_that_cannot_be_read_are_passed_over(repo: Checkout) -> None:
    repo.commit("0", {SFT: arguments("a: int = 1", "b: str = ''", "c: int = 0")})
    repo.commit("1: broken", {SFT: "def (:\n"})
    repo.commit("2: no parser", {SFT: "print('nothing yet')\n"})
    repo.commit("3: names nothing", {SFT: "from open_instruct.lost import FlatArguments\n" + MAIN})
    repo.commit("4", {SFT: arguments("a: int = 1", "b: str = ''")})
    repo.commit("5: broken to this day", {SFT: "\0"})
    assert repo.last("c") == "removed@4"
    assert repo.last("b") == "added@0"


def test_from_argparse_to_dataclasses(repo: Checkout) -> None:
    flags = "parser = argparse.ArgumentParser()\nparser.add_argument('-l', '--lr', type=float)\n"
    flags += "parser.add_argument('--low-mem', action='store_true')\n"
    repo.commit("0", {SFT: flags})
    repo.commit("1", {SFT: arguments("lr: float | None = None")})
    assert repo.last("lr") == "added@0"
    assert repo.last("low_mem") == "removed@1"


def test_a_script_under_another_name(repo: Checkout) -> None:
    fields = [f"a{i}: int = {i}" for i in range(6)]
    repo.commit("0", {"open_instruct/dpo_tune.py": arguments(*fields, "early: int = 0")})
    repo.commit("1", {"open_instruct/dpo_tune.py": arguments(*fields)})
    # a copy that goes on beside the first, then a script that was there under a name of its own
    repo.commit(
        "2", {DPO: arguments(*fields, "late: int = 0"), "open_instruct/train.py": "x = 1\n"}
    )
    repo.commit("3", {DPO: arguments(*fields)})
    repo.commit("4", {DPO: None, "open_instruct/preferences.py": arguments(*fields)})
    assert repo.last("early", "open_instruct/preferences.py") == "removed@1"
    assert repo.last("late", "open_instruct/preferences.py") == "removed@3"


def test_a_pull_request_is_named_and_another_merge_passes_on(repo: Checkout) -> None:
    names = ("squashed", "merged", "pulled", "kept")
    fields = {name: f"{name}: int = 1" for name in names}

    def without(*gone: str) -> dict[str, str]:
        return {SFT: arguments(*(text for name, text in fields.items() if name not in gone))}

    repo.commit("0", without())
    repo.git("switch", "-qc", "feature")
    repo.commit("drop it", without("merged"))
    repo.git("switch", "-q", "main")
    repo.git("merge", "-q", "--no-ff", "feature", "-m", "Merge pull request #12 from me/feature")
    request = repo.git("rev-parse", "HEAD")
    repo.git("switch", "-qc", "elsewhere")
    repo.commit("drop it there (#13)", without("merged", "pulled"))
    repo.git("switch", "-q", "main")
    repo.commit("note", {"README": "x"})
    repo.git("merge", "-q", "--no-ff", "elsewhere", "-m", "Merge branch 'main' of example.org")
    repo.commit("Tidy (#14)", without("merged", "pulled", "squashed"))
    merged, pulled, squashed = (repo.of(name)[0] for name in ("merged", "pulled", "squashed"))
    assert (merged.commit, merged.pull) == (request, 12)
    assert (pulled.commit, pulled.pull) == (repo.commits[2], 13)
    assert squashed.pull == 14
    assert repo.last("kept") == "added@0"


@pytest.mark.parametrize(
    ("subject", "number"),
    [
        ("Automatic attention (#1567)", 1567),
        ('Revert "Drop it (#3)" (#4)', 4),
        ("Merge pull request #61 from allenai/multi-node", 61),
        ("Fixes #12 for good", None),
        ("see (#12) there", None),
        ("", None),
    ],
)
def test_pull_request_numbers(subject: str, number: int | None) -> None:
    assert pull_request(subject) == number


def test_a_shallow_history_says_what_it_holds_and_the_table_the_rest(
    repo: Checkout, tmp_path: Path
) -> None:
    repo.commit(
        "0", {SFT: arguments("a: int = 1", "dpo_beta: float = 0.1", "use_flash_attn: bool = True")}
    )
    repo.commit("1", {SFT: arguments("a: int = 1", "use_flash_attn: bool = True")})
    repo.commit("2", {SFT: arguments("a: int = 1", "b: int = 2", "use_flash_attn: bool = True")})
    repo.git("clone", "-q", "--depth", "2", f"file://{repo.root}", str(tmp_path / "shallow"))
    shallow = Checkout(tmp_path / "shallow", commits=repo.commits)
    assert shallow.last("b") == "added@2"
    assert shallow.of("a") == (), "when it came is not seen"
    # it is there, so what the table says of its removal has not happened yet
    assert all(not event.gone for event in shallow.of("use_flash_attn")[:1])
    # not there, and not seen: the table's word
    assert history.sentence(shallow.of("run_name")[0]).startswith("removed by #747")
    assert shallow.of("dpo_beta")[0].pull == 277


def test_a_clone_without_older_files_says_nothing_of_them(repo: Checkout, tmp_path: Path) -> None:
    repo.commit("0", {SFT: arguments("a: int = 1", "b: int = 2", "use_flash_attn: bool = True")})
    repo.commit("1", {SFT: arguments("a: int = 1", "use_flash_attn: bool = True")})
    repo.git("config", "uploadpack.allowFilter", "true")
    target = tmp_path / "partial"
    repo.git("clone", "-q", "--filter=blob:none", f"file://{repo.root}", str(target))
    partial = Checkout(target, commits=repo.commits)
    missing = ("rev-list", "--objects", "--missing=print", "--all")
    before = partial.git(*missing)
    assert before.count("?") == 1
    assert partial.of("b") == ()
    assert all(not event.gone for event in partial.of("use_flash_attn")[:1]), "it is there"
    assert partial.of("run_name")[0].pull == 747
    assert partial.git(*missing) == before, "something was fetched"


def test_a_history_of_its_own_is_asked_first(repo: Checkout) -> None:
    repo.commit("0", {SFT: arguments("a: int = 1", "use_flash_attn: bool = True")})
    repo.commit("Our way (#3)", {SFT: arguments("a: int = 1")})
    assert repo.of("use_flash_attn")[0].pull == 3
    assert {event.pull for event in repo.of("use_flash_attn")} == {3, None}
    assert repo.of("run_name")[0].pull == 747


def test_commits_beyond_the_table(checkout: Path, tmp_path: Path) -> None:
    pin = BACKENDS["open_instruct"].PIN
    if Repository(checkout).commit(pin) is None or Repository(checkout).is_shallow():
        pytest.skip("the checkout has no history")
    fork = Checkout(tmp_path / "fork")
    Checkout(tmp_path).git("clone", "-q", "--shared", "--bare", str(checkout), str(fork.root))

    def committed(subject: str, tree: str, edits: Mapping[str, Path], *parents: str) -> str:
        fork.git("read-tree", tree)
        for name, path in edits.items():
            blob = fork.git("hash-object", "-w", str(path))
            fork.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{name}")
        written = fork.git("write-tree", "--missing-ok")
        ancestry = (word for parent in parents for word in ("-p", parent))
        return fork.git("commit-tree", written, *ancestry, "-m", subject)

    text = (checkout / SFT).read_text()
    assert "    clip_grad_norm: float" in text
    edited = tmp_path / "finetune.py"
    edited.write_text(text.replace("clip_grad_norm", "grad_clip_norm"))
    own = committed("Ours (#9999)", pin, {SFT: edited}, pin)
    found = fork.of("clip_grad_norm", head=own)
    assert [event.what for event in found] == ["renamed", "added"]
    assert (found[0].to, found[0].commit, found[0].pull) == ("grad_clip_norm", own, 9999)
    assert fork.of("use_flash_attn", head=own) == history.of("use_flash_attn", SFT)
    assert history.events(DPO, Repository(fork.root), head=own) == history.events(DPO)
    # an older line that has merged the newest upstream into itself
    old = committed("note", f"{pin}~40", {"NOTE": edited}, f"{pin}~40")
    merged = committed("Merge remote-tracking branch 'origin/main' into old", pin, {}, old, pin)
    assert fork.of("use_flash_attn", head=old)[0].what == "added"
    assert fork.of("use_flash_attn", head=merged) == history.of("use_flash_attn", SFT)
    assert set(history.events(DPO, Repository(fork.root), head=merged)) == set(history.events(DPO))


def test_no_git_no_repository_no_commits(
    repo: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = history.of("use_flash_attn", SFT)
    assert repo.of("use_flash_attn") == table, "an empty history"
    repo.commit("unrelated", {"README": "x"})
    assert repo.of("use_flash_attn") == table
    assert repo.of("use_flash_attn", head="no-such-branch") == table
    assert repo.of("use_flash_attn", head="--all") == table
    assert repo.of("use_flash_attn", head="f" * 40) == table
    empty = tmp_path / "empty"
    empty.mkdir()
    for root in (empty, tmp_path / "missing"):
        assert history.of("use_flash_attn", SFT, Repository(root)) == table
    monkeypatch.setenv("PATH", str(empty))
    assert history.of("use_flash_attn", SFT, Repository(repo.root)) == table


def test_a_folder_inside_a_larger_repository(repo: Checkout) -> None:
    repo.commit("0", {f"vendor/{SFT}": arguments("a: int = 1", "b: int = 2")})
    repo.commit(
        "1", {f"vendor/{SFT}": arguments("a: int = 1"), SFT: arguments("elsewhere: int = 1")}
    )
    found = history.of("b", SFT, Repository(repo.root / "vendor"))
    assert (found[0].what, found[0].commit, found[0].file) == ("removed", repo.commits[1], SFT)


def test_settings_of_the_user_change_nothing(repo: Checkout) -> None:
    repo.commit("0", {SFT: arguments("a: int = 1", "b: int = 2")})
    repo.commit("1", {SFT: arguments("a: int = 1")})
    for name, value in {
        "log.showRoot": "false", "log.diffMerges": "off", "diff.renames": "copies", "color.ui": "always",
        "log.showSignature": "true", "diff.noprefix": "true", "core.abbrev": "4", "log.decorate": "full",
        "diff.external": "false",
    }.items():  # fmt: skip
        repo.git("config", name, value)
    assert repo.last("b") == "removed@1"
    assert repo.last("a") == "added@0"


def test_keys_are_never_patterns_or_options(repo: Checkout) -> None:
    repo.commit("0", {SFT: arguments("a: int = 1", "aa: int = 2")})
    repo.commit("1", {SFT: arguments("a: int = 1")})
    for key in ("a.", "a+", "[a", "(", "-S--foo", "--output=x", "a: int", "", " aa", "\\", "a\0"):
        assert repo.of(key) == ()


def test_the_committed_form_goes_there_and_back() -> None:
    def event(key: str, commit: str) -> Event:
        return Event(
            key=key, what="added", owner="A", file="p/a.py", line=3, commit=commit * 40,
            date="2031-01-01",
        )  # fmt: skip

    first = replace(event("a", "1"), what="renamed", to="b", pull=4)
    second = replace(event("c", "2"), what="removed", see=("d",), release="p 1.0")
    third = event("c", "3")
    scripts = {"p/a.py": [second, third], "p/b.py": [first, second]}
    text = history.as_json("f" * 40, scripts, ["1" * 40, "2" * 40, "3" * 40, "4" * 40])
    table = history.from_json(json.loads(text))
    assert (table.commit, table.order) == ("f" * 40, ("1" * 40, "2" * 40, "3" * 40))
    assert (table.of("p/a.py"), table.of("p/b.py")) == ((second, third), (first, second))
    assert table.of("p/c.py") == history.from_json(None).of("p/a.py") == ()
