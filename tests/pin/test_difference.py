"""What lies between two commits of open-instruct, and what that does to stage files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import STAGE_FILES, Write
from repositories import UTILS, commit, declared, git, script, transformation

from launcher.cli.main import main
from launcher.errors import Exit, NotReady, UsageError
from launcher.pin import difference, pin
from launcher.pin.difference import (
    ArgumentDifference,
    CommitDifference,
    ConfigDifference,
    StageDifference,
)
from launcher.upstream import locate
from launcher.upstream.trainers import BACKENDS

PIN = BACKENDS["open_instruct"].PIN

OLD_SFT = script(
    more="""
clip_norm: float = -1.0
checkpointing_steps: Optional[str] = None
warmup_ratio: float = 0.03
use_lora: bool = False
lora_rank: int = 64
seed: int = 42
bell: int = 1
tokens: List[str] = field(default_factory=list)
portion: float = 0.5
""",
    reads="""
if args.use_lora:
    use(args.lora_rank)
use(args.clip_norm, args.checkpointing_steps, args.warmup_ratio, args.seed, args.tokens, args.portion)
logger.info("Attempting to apply liger-kernel.")
""",
)
NEW_SFT = script(
    more="""
clip_grad_norm: float = -1.0
checkpointing_steps: int = 500
warmup_ratio: float = 0.1
use_lora: bool = False
lora_rank: int = 64
seed: int = 42
bell: int = 2
tokens: list[str] = field(default_factory=list)
use_liger_kernel: bool = False
portion: float = 0.5

def __post_init__(self):
    if self.portion > 1:
        raise ValueError("too much")
""",
    reads="""
use(args.lora_rank)
use(args.clip_grad_norm, args.checkpointing_steps, args.warmup_ratio, args.tokens, args.portion)
use(args.use_liger_kernel, args.use_lora)
logger.info("Applying kernels of Liger now.")
""",
)
CONFIG = """
stage: sft
args:
  model_name_or_path: m
  dataset_mixer_list: [set, "64"]
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
  checkpointing_steps: 100
  {more}
"""


@dataclass(frozen=True)
class Repo:
    path: Path
    old: str
    new: str

    def diff(self, *configs: Path, words: Sequence[str] = ()) -> CommitDifference:
        commits = pin.find_commits(words or (self.old, self.new), self.path, {})
        return difference.between(commits, configs)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was read of a source is kept for the tests that come after."""
    return tmp_path_factory.mktemp("facts")


@pytest.fixture(autouse=True)
def _read_once(facts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(facts))


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """Two commits: SFT changed in every way, DPO's arguments moved into a file of their own."""
    path = tmp_path_factory.mktemp("upstream") / "open-instruct"
    old = commit(
        path,
        {
            "__init__.py": "", "utils.py": UTILS, "finetune.py": OLD_SFT,
            "dpo_tune_cache.py": script(exp_name="dpo"),
            "dataset_transformation.py": transformation(),
        },
        "one",
    )  # fmt: skip
    names = {"data": "mixer_list", "epochs": "num_epochs"}
    new = commit(
        path,
        {
            "finetune.py": NEW_SFT,
            "dpo_utils.py": "from dataclasses import dataclass, field\n"
            + declared(owner="DPOExperimentConfig", exp_name="dpo", **names),
            "dpo_tune_cache.py": script(
                owner="DPOExperimentConfig", here=False,
                imports="from open_instruct.dpo_utils import DPOExperimentConfig", **names,
            ),
            "dataset_transformation.py": transformation("v1", "A cached dataset is at"),
        },
        "two (#7)",
    )  # fmt: skip
    return Repo(path, old, new)


def changes(told: StageDifference, name: str) -> dict[str, ArgumentDifference]:
    return {change.what: change for change in told.changes if change.name == name}


def renames(told: StageDifference) -> dict[str, str | None]:
    return {change.name: change.to for change in told.changes if change.what == "renamed"}


def only(told: CommitDifference) -> ConfigDifference:
    (one,) = told.configs
    return one


def test_every_kind_of_change_of_an_argument(repo: Repo) -> None:
    told = repo.diff().stages["sft"]
    renamed = changes(told, "clip_norm")["renamed"]
    assert (renamed.to, (renamed.old or "").partition(":")[0]) == (
        "clip_grad_norm", "open_instruct/finetune.py",
    )  # fmt: skip
    assert renamed.why is not None and "#7" in renamed.why
    typed = changes(told, "checkpointing_steps")
    assert (typed["type"].before, typed["type"].after) == ("Optional[str]", "int")
    assert (typed["default"].before, typed["default"].after) == ("none", "500")
    assert changes(told, "warmup_ratio").keys() == {"default"}
    assert changes(told, "seed").keys() == {"unread"}
    assert changes(told, "use_lora").keys() == set()
    assert changes(told, "use_liger_kernel").keys() == {"added"}
    # what only the spelling of a type changed is no change
    assert not changes(told, "tokens")
    # and what moved by some lines neither
    assert not changes(told, "model_name_or_path")


def test_the_cache_and_the_mirror_image(repo: Repo) -> None:
    told = repo.diff()
    assert (told.old.cache, told.new.cache, told.cache_moved) == (None, "v1", True)
    # backwards is the mirror image
    told = repo.diff(words=(repo.new, repo.old))
    assert (told.ahead, told.behind) == (0, 1)
    assert changes(told.stages["sft"], "clip_grad_norm")["renamed"].to == "clip_norm"
    assert changes(told.stages["sft"], "seed").keys() == {"read"}


def test_a_script_that_is_not_there(repo: Repo, write: Write) -> None:
    git(repo.path, "checkout", "-q", "-b", "without", repo.new)
    gone = commit(repo.path, {"dpo_tune_cache.py": None}, "no DPO any more")
    git(repo.path, "checkout", "-q", "main")
    sft = write("sft.yaml", CONFIG.format(more=""))
    dpo = write("dpo.yaml", "stage: dpo\nargs: {model_name_or_path: m, mixer_list: [a, '1.0']}\n")
    told = repo.diff(sft, dpo, words=(repo.new, gone))
    assert "it has no open_instruct/dpo_tune_cache.py" in told.stages["dpo"].unreadable["new"]
    assert not told.stages["sft"].changes
    first, second = told.configs
    assert (first.valid, first.worse) == ((True, True), False)
    assert (second.valid, second.worse) == ((True, None), True)
    assert told.exit_code is Exit.CONFIG
    assert repo.diff(words=(repo.new, gone)).exit_code is Exit.CONFIG
    assert repo.diff(words=(gone, repo.new)).exit_code is Exit.OK


def test_broken_source_is_said(repo: Repo) -> None:
    git(repo.path, "checkout", "-q", "-b", "broken", repo.new)
    broken = commit(repo.path, {"finetune.py": "class FlatArguments\n"}, "broken")
    git(repo.path, "checkout", "-q", "main")
    told = repo.diff(words=(repo.old, broken))
    assert "cannot be read" in told.stages["sft"].unreadable["new"]
    assert renames(told.stages["dpo"])["dataset_mixer_list"] == "mixer_list"


def test_a_renamed_key_makes_a_file_invalid(repo: Repo, write: Write) -> None:
    config = write("a.yaml", CONFIG.format(more="clip_norm: 1.0"))
    told = repo.diff(config)
    one = only(told)
    assert (one.valid, one.worse, told.exit_code) == ((True, False), True, Exit.CONFIG)
    assert "args.clip_norm" in {finding.key for finding in one.appeared}
    text = "\n".join(difference.lines(told))
    assert "valid -> INVALID" in text
    back = only(repo.diff(config, words=(repo.new, repo.old)))
    assert (back.valid, back.worse) == ((False, True), False)
    assert "args.clip_norm" in {finding.key for finding in back.vanished}


def test_files_of_two_commits(repo: Repo, write: Write) -> None:
    one = only(repo.diff(write("a.yaml", CONFIG.format(more=""))))
    relied = {change.name for change in one.defaults}
    # nothing reads `bell`, and the file sets `checkpointing_steps`
    assert relied & {"warmup_ratio", "bell"} == {"warmup_ratio"}
    own = only(repo.diff(write("b.yaml", CONFIG.format(more="warmup_ratio: 0.03"))))
    assert "warmup_ratio" not in {change.name for change in own.defaults}
    assert not own.worse
    # a refusal that the file meets
    one = only(repo.diff(write("a.yaml", CONFIG.format(more="portion: 3"))))
    assert one.valid == (True, False)
    assert "refused-by-source" in {finding.code for finding in one.appeared}
    # tokens are taken out
    token = "hf_" + "a" * 34
    config = write("a.yaml", CONFIG.format(more=f"clip_norm: 1.0\n  exp_name: {token}"))
    told = repo.diff(config)
    assert token not in json.dumps(told.as_json()) + "\n".join(difference.lines(told))
    # files for another backend are named and left alone
    config = write("a.yaml", "stage: sft\nbackend: trl\nargs: {dataset_name: d}\n")
    told = repo.diff(config)
    assert (only(told).stage, told.exit_code) == (None, Exit.OK)
    assert "  for another backend than open-instruct" in difference.lines(told)


def test_an_argument_that_must_be_given_now(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "open-instruct"
    shared = {"__init__.py": "", "utils.py": UTILS, "dataset_transformation.py": transformation()}
    old = commit(path, {**shared, "finetune.py": OLD_SFT}, "one")
    required = OLD_SFT.replace("seed: int = 42", "seed: int")
    new = commit(path, {**shared, "finetune.py": required}, "two")
    one = only(Repo(path, old, new).diff(write("a.yaml", CONFIG.format(more=""))))
    assert (one.valid, one.worse) == ((True, False), True)
    (fault,) = (f for f in one.appeared if f.severity == "error")
    assert (fault.code, fault.key) == ("missing-argument", "args.seed")
    assert "open_instruct/finetune.py:" in fault.message
    assert "seed" in {change.name for change in one.defaults}
    given = only(Repo(path, old, new).diff(write("b.yaml", CONFIG.format(more="seed: 42"))))
    assert given.valid == (True, True) and not given.worse


def test_the_text_counts_what_concerns_no_file(repo: Repo, write: Write) -> None:
    config = write("a.yaml", CONFIG.format(more=""))
    brief = "\n".join(difference.lines(repo.diff(config)))
    assert "--all shows them" in brief and "\n  renamed:" not in brief
    full = "\n".join(difference.lines(repo.diff(config), everything=True))
    alone = "\n".join(difference.lines(repo.diff()))
    for text in (full, alone):
        assert "clip_norm -> clip_grad_norm" in text and "not read any more:" in text
    assert "version none -> v1" in brief


def test_the_words_that_name_two_commits(repo: Repo) -> None:
    for words in ((repo.old, repo.new), (f"{repo.old[:9]}..main",), ("main~1", "main")):
        found = pin.find_commits(words, repo.path, {})
        assert (found.old, found.new) == (repo.old, repo.new)
    assert pin.find_commits((f"{repo.old}..",), repo.path, {}).new == repo.new
    with pytest.raises(NotReady) as raised:
        pin.find_commits(("main",), repo.path, {})
    assert raised.value.findings[0].help == f"git -C {repo.path} fetch origin {PIN}"


@pytest.mark.parametrize("words", [("nonsense", "main"), ("--all", "main"), ("", "main"), ()])
def test_names_that_make_no_sense(repo: Repo, words: Sequence[str]) -> None:
    with pytest.raises(UsageError) as raised:
        pin.find_commits(words, repo.path, {})
    assert raised.value.findings[0].code == "unknown-commit"


def test_a_shallow_clone_says_how_to_get_the_rest(repo: Repo, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo.path}", "shallow")
    for word, help in (("HEAD~1", "--unshallow"), (repo.old, f"fetch origin {repo.old}")):
        with pytest.raises(NotReady, match="cut off") as raised:
            pin.find_commits((word, "HEAD"), tmp_path / "shallow", {})
        assert help in (raised.value.findings[0].help or "")
    told = difference.between(pin.find_commits(("HEAD", "HEAD"), tmp_path / "shallow", {}))
    assert told.shallow and not any(stage.changes for stage in told.stages.values())


def test_clones_that_will_do(repo: Repo, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(repo.path), "bare.git")
    for place in (tmp_path / "bare.git", repo.path / ".git"):
        commits = pin.find_commits((repo.old, repo.new), place, {})
        assert renames(difference.between(commits).stages["sft"]) == {"clip_norm": "clip_grad_norm"}


def test_the_documented_places_are_searched(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo.path}", "shallow")
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path)
    monkeypatch.setattr(locate, "FOUND_IN", (tmp_path / "nowhere", repo.path))
    assert pin.find_commits((repo.old, repo.new), None, {}).repository.root == repo.path
    named = {"LAUNCH_OPEN_INSTRUCT": str(tmp_path / "shallow")}
    with pytest.raises(NotReady):
        pin.find_commits((repo.old, repo.new), None, named)
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path / "nowhere")
    monkeypatch.setattr(locate, "FOUND_IN", ())
    with pytest.raises(NotReady) as raised:
        pin.find_commits((repo.old, repo.new), None, {})
    assert raised.value.findings[0].code == "no-repository"


@pytest.fixture
def history(checkout: Path) -> Path:
    try:
        pin.find_commits(("pin", "pin"), checkout, {})
    except (NotReady, UsageError):
        pytest.skip("the checkout has no history")
    return checkout


def between(checkout: Path, old: str, new: str, *configs: Path) -> CommitDifference:
    try:
        commits = pin.find_commits((old, new), checkout, {})
    except (NotReady, UsageError):
        pytest.skip(f"the checkout's history lacks {old} or {new}")
    return difference.between(commits, configs)


def test_the_time_of_one_flat_class_without_liger(history: Path) -> None:
    told = between(history, "6b3964bc", "pin", *STAGE_FILES)
    dpo, sft = told.stages["dpo"], told.stages["sft"]
    assert changes(dpo, "use_liger_kernel").keys() == changes(sft, "use_liger_kernel").keys()
    assert "added" in changes(dpo, "use_liger_kernel")
    assert renames(dpo)["dataset_mixer_list"] == "mixer_list"
    assert renames(dpo)["num_train_epochs"] == "num_epochs"
    gone = changes(sft, "use_flash_attn")["removed"]
    assert gone.why is not None and "#1567" in gone.why
    assert "unread" in changes(sft, "tokenizer_name")
    # Optional[str] became str | None: no change
    assert not changes(sft, "config_name").keys() & {"type", "default"}
    assert (told.old.cache, told.new.cache) == (None, "v7")
    # the second DPO script was not there yet: its files cannot be judged by the old commit
    ours = [one for one in told.configs if one.stage in {"sft", "dpo"} and not one.reason]
    assert len(ours) > 5 and all(one.valid == (False, True) for one in ours)
    assert {one.valid for one in told.configs if one.reason} == {(None, True), (None, None)}
    assert told.exit_code is Exit.OK
    assert between(history, "pin", "6b3964bc", *STAGE_FILES).exit_code is Exit.CONFIG


def test_between_the_known_commits(history: Path) -> None:
    told = between(history, "45901fd0", "e6c3044a", *STAGE_FILES)
    assert {"added"} == changes(told.stages["dpo"], "data_loader_seed").keys()
    clipped = changes(told.stages["dpo"], "max_grad_norm")
    assert (clipped["default"].before, clipped["default"].after) == ("-1", "none")
    assert changes(told.stages["dpo"], "model_name_or_path")["default"].after == "required"
    assert (told.old.cache, told.new.cache, told.exit_code) == ("v6", "v7", Exit.OK)
    relying = [one for one in told.configs if one.stage == "dpo"]
    names = [{change.name for change in one.defaults} for one in relying]
    assert relying and all("max_grad_norm" in found for found in names)


def test_a_folder_and_the_stages_of_a_pipeline(
    repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "stage: sft\nargs: {model_name_or_path: m, dataset_mixer_list: [a, 1.0]}\n"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "sft.yaml").write_text(text)
    (tmp_path / "files" / "b.yml").write_text(text)
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text("stages:\n  - {config: files/sft.yaml, with: {clip_norm: 2.0}}\n")
    told = repo.diff(pipeline)
    assert [one.path.name for one in told.configs] == ["sft.yaml"]
    assert "renamed-key" in {finding.code for finding in only(told).appeared}
    # a stage file that a pipeline names as it is counts once
    pipeline.write_text("stages:\n  - {config: files/sft.yaml}\n")
    only(repo.diff(pipeline, tmp_path / "files" / "sft.yaml"))
    words = f"pin diff {repo.old} {repo.new} --open-instruct {repo.path} --format json".split()
    main([*words, "-c", str(tmp_path / "files")])
    found = json.loads(capsys.readouterr().out)["data"]["configs"]
    assert sorted(Path(one["path"]).name for one in found) == ["b.yml", "sft.yaml"]
