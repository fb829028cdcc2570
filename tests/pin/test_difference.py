"""What lies between two commits of open-instruct, and what that does to stage files."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPOSITORY, Write
from repositories import UTILS, commit, declared, git, script, transformation

from launcher.cli.main import main
from launcher.errors import Exit, NotReady, UsageError, select_errors
from launcher.pin import difference, pin
from launcher.pin.difference import (
    ArgumentDifference,
    CommitDifference,
    ConfigDifference,
    StageDifference,
)
from launcher.upstream import locate
from launcher.upstream.open_instruct import PIN

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
use(args.clip_norm, args.checkpointing_steps, args.warmup_ratio)
use(args.seed, args.tokens, args.portion)
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


def stage_file(more: str = "") -> str:
    return f"""
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

    def diff(self, *configs: Path, old: str = "", new: str = "") -> CommitDifference:
        commits = pin.find_commits((old or self.old, new or self.new), self.path, {})
        return difference.compare_commits(commits, configs)

    def diff_back(self, *configs: Path) -> CommitDifference:
        return self.diff(*configs, old=self.new, new=self.old)

    def commit_after_new(self, name: str, text: str | None) -> str:
        """A commit that changes one file of the newer one, or removes it."""
        git(self.path, "checkout", "-q", "--detach", self.new)
        changed = commit(self.path, {name: text}, f"change {name}")
        git(self.path, "checkout", "-q", "main")
        return changed


@pytest.fixture(scope="module")
def facts_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("facts")


@pytest.fixture(autouse=True)
def _read_sources_once(facts_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(facts_cache))


OLD_FILES = {
    "__init__.py": "",
    "utils.py": UTILS,
    "finetune.py": OLD_SFT,
    "dpo_tune_cache.py": script(exp_name="dpo"),
    "dataset_transformation.py": transformation(),
}
DPO_CLASS = declared(
    owner="DPOExperimentConfig", exp_name="dpo", data="mixer_list", epochs="num_epochs"
)
NEW_DPO = script(
    owner="DPOExperimentConfig",
    here=False,
    imports="from open_instruct.dpo_utils import DPOExperimentConfig",
    data="mixer_list",
    epochs="num_epochs",
)
NEW_FILES = {
    "finetune.py": NEW_SFT,
    "dpo_utils.py": f"from dataclasses import dataclass, field\n{DPO_CLASS}",
    "dpo_tune_cache.py": NEW_DPO,
    "dataset_transformation.py": transformation("v1", "A cached dataset is at"),
}


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """Two commits: SFT changed in every way, DPO's arguments moved into a file of their own."""
    path = tmp_path_factory.mktemp("upstream") / "open-instruct"
    old = commit(path, OLD_FILES, "one")
    new = commit(path, NEW_FILES, "two (#7)")
    return Repo(path, old, new)


def changes(stage: StageDifference, name: str) -> dict[str, ArgumentDifference]:
    """What changed of an argument, by the kind of the change."""
    return {change.what: change for change in stage.changes if change.name == name}


def kinds(stage: StageDifference, name: str) -> set[str]:
    return set(changes(stage, name))


def new_names(stage: StageDifference) -> dict[str, str | None]:
    return {change.name: change.to for change in stage.changes if change.what == "renamed"}


def only_config(diff: CommitDifference) -> ConfigDifference:
    (config,) = diff.configs
    return config


def changed_defaults(config: ConfigDifference) -> set[str]:
    """The arguments that a file leaves to defaults which changed."""
    return {change.name for change in config.defaults}


def text_of(diff: CommitDifference) -> str:
    return "\n".join(difference.render_difference(diff))


def test_every_kind_of_change_of_an_argument_is_told(repo: Repo) -> None:
    sft = repo.diff().stages["sft"]

    renamed = changes(sft, "clip_norm")["renamed"]
    assert renamed.to == "clip_grad_norm"
    assert (renamed.old or "").startswith("open_instruct/finetune.py:")
    assert "#7" in (renamed.why or "")
    steps = changes(sft, "checkpointing_steps")
    assert (steps["type"].before, steps["type"].after) == ("Optional[str]", "int")
    assert (steps["default"].before, steps["default"].after) == ("none", "500")
    assert kinds(sft, "warmup_ratio") == {"default"}
    assert kinds(sft, "seed") == {"unread"}
    assert kinds(sft, "use_liger_kernel") == {"added"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("use_lora", "it is still read"),
        ("tokens", "only the spelling of its type changed"),
        ("model_name_or_path", "only its line moved"),
    ],
)
def test_an_argument_that_means_the_same_did_not_change(name: str, reason: str, repo: Repo) -> None:
    assert kinds(repo.diff().stages["sft"], name) == set(), reason


def test_the_version_of_the_dataset_cache_is_compared(repo: Repo) -> None:
    diff = repo.diff()
    assert diff.old.cache is None
    assert diff.new.cache == "v1"
    assert diff.cache_moved
    assert "version none -> v1" in text_of(diff)


def test_the_way_back_is_the_mirror_image(repo: Repo) -> None:
    diff = repo.diff_back()
    assert (diff.ahead, diff.behind) == (0, 1)
    assert changes(diff.stages["sft"], "clip_grad_norm")["renamed"].to == "clip_norm"
    assert kinds(diff.stages["sft"], "seed") == {"read"}


def test_a_file_whose_script_is_gone_gets_worse(repo: Repo, write: Write) -> None:
    gone = repo.commit_after_new("dpo_tune_cache.py", None)
    sft = write("sft.yaml", stage_file())
    dpo = write("dpo.yaml", "stage: dpo\nargs: {model_name_or_path: m, mixer_list: [a, '1.0']}\n")

    diff = repo.diff(sft, dpo, old=repo.new, new=gone)

    assert "it has no open_instruct/dpo_tune_cache.py" in diff.stages["dpo"].unreadable["new"]
    assert not diff.stages["sft"].changes
    of_sft, of_dpo = diff.configs
    assert of_sft.valid == (True, True)
    assert not of_sft.worse
    assert of_dpo.valid == (True, None)
    assert of_dpo.worse
    assert diff.exit_code is Exit.CONFIG
    assert repo.diff(old=gone, new=repo.new).exit_code is Exit.OK


def test_a_script_that_cannot_be_read_leaves_the_others(repo: Repo) -> None:
    broken = repo.commit_after_new("finetune.py", "class FlatArguments\n")
    stages = repo.diff(new=broken).stages
    assert "cannot be read" in stages["sft"].unreadable["new"]
    assert new_names(stages["dpo"])["dataset_mixer_list"] == "mixer_list"


def test_a_renamed_key_makes_a_file_invalid(repo: Repo, write: Write) -> None:
    path = write("a.yaml", stage_file("clip_norm: 1.0"))

    diff = repo.diff(path)
    config = only_config(diff)
    assert config.valid == (True, False)
    assert config.worse
    assert diff.exit_code is Exit.CONFIG
    assert "args.clip_norm" in {finding.key for finding in config.appeared}
    assert "valid -> INVALID" in text_of(diff)

    back = only_config(repo.diff_back(path))
    assert back.valid == (False, True)
    assert not back.worse
    assert "args.clip_norm" in {finding.key for finding in back.vanished}


def test_a_file_is_told_of_the_changed_defaults_that_it_relies_on(repo: Repo, write: Write) -> None:
    config = only_config(repo.diff(write("a.yaml", stage_file())))
    assert "warmup_ratio" in changed_defaults(config)
    # nothing reads `bell`
    assert "bell" not in changed_defaults(config)

    config = only_config(repo.diff(write("a.yaml", stage_file("warmup_ratio: 0.03"))))
    assert "warmup_ratio" not in changed_defaults(config)
    assert not config.worse


def test_a_new_refusal_that_a_file_meets_is_told(repo: Repo, write: Write) -> None:
    config = only_config(repo.diff(write("a.yaml", stage_file("portion: 3"))))
    assert config.valid == (True, False)
    assert "refused-by-source" in {finding.code for finding in config.appeared}


def test_no_token_is_shown(repo: Repo, write: Write) -> None:
    token = "hf_" + "a" * 34
    diff = repo.diff(write("a.yaml", stage_file(f"clip_norm: 1.0\n  exp_name: {token}")))
    assert token not in json.dumps(diff.as_json())
    assert token not in text_of(diff)


def test_a_file_for_another_backend_is_named_and_left_alone(repo: Repo, write: Write) -> None:
    path = write("a.yaml", "stage: sft\nbackend: trl\nargs: {dataset_name: d}\n")
    diff = repo.diff(path)
    assert only_config(diff).stage is None
    assert diff.exit_code is Exit.OK
    assert "  for another backend than open-instruct" in text_of(diff)


def test_an_argument_that_must_be_given_now(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "open-instruct"
    old = commit(path, OLD_FILES, "one")
    required = OLD_SFT.replace("seed: int = 42", "seed: int")
    new = commit(path, {"finetune.py": required}, "two")
    repo = Repo(path, old, new)

    config = only_config(repo.diff(write("a.yaml", stage_file())))
    assert config.valid == (True, False)
    (error,) = select_errors(config.appeared)
    assert error.code == "missing-argument"
    assert error.key == "args.seed"
    assert "open_instruct/finetune.py:" in error.message
    assert "seed" in changed_defaults(config)

    config = only_config(repo.diff(write("b.yaml", stage_file("seed: 42"))))
    assert config.valid == (True, True)


def test_the_text_only_counts_the_changes_that_concern_no_file(repo: Repo, write: Write) -> None:
    diff = repo.diff(write("a.yaml", stage_file()))
    brief = text_of(diff)
    assert "--all shows them" in brief
    assert "\n  renamed:" not in brief

    complete = "\n".join(difference.render_difference(diff, everything=True))
    assert "clip_norm -> clip_grad_norm" in complete
    assert "not read any more:" in complete


def test_words_that_name_two_commits(repo: Repo) -> None:
    for words in (
        (repo.old, repo.new),
        (f"{repo.old[:9]}..main",),
        (f"{repo.old}..",),
        ("main~1", "main"),
    ):
        commits = pin.find_commits(words, repo.path, {})
        assert commits.old == repo.old
        assert commits.new == repo.new


def test_a_pin_that_was_never_fetched_says_how(repo: Repo) -> None:
    with pytest.raises(NotReady) as raised:
        pin.find_commits(("main",), repo.path, {})
    assert raised.value.findings[0].help == f"git -C {repo.path} fetch origin {PIN}"


@pytest.mark.parametrize("words", [("nonsense", "main"), ("--all", "main"), ("", "main"), ()])
def test_words_that_name_no_commits_are_refused(repo: Repo, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as raised:
        pin.find_commits(words, repo.path, {})
    assert raised.value.findings[0].code == "unknown-commit"


@pytest.fixture
def shallow(repo: Repo, tmp_path: Path) -> Path:
    """A clone with the newest commit alone."""
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo.path}", "shallow")
    return tmp_path / "shallow"


def help_without(commit: str, shallow: Path) -> str:
    """What is advised where a clone lacks a commit."""
    with pytest.raises(NotReady, match="cut off") as raised:
        pin.find_commits((commit, "HEAD"), shallow, {})
    return raised.value.findings[0].help or ""


def test_a_shallow_clone_says_how_to_get_the_rest(repo: Repo, shallow: Path) -> None:
    assert "--unshallow" in help_without("HEAD~1", shallow)
    assert f"fetch origin {repo.old}" in help_without(repo.old, shallow)
    commits = pin.find_commits(("HEAD", "HEAD"), shallow, {})
    assert difference.compare_commits(commits).shallow


def test_a_bare_clone_and_a_git_folder_will_do(repo: Repo, tmp_path: Path) -> None:
    bare = tmp_path / "bare.git"
    git(tmp_path, "clone", "-q", "--bare", str(repo.path), str(bare))
    for place in (bare, repo.path / ".git"):
        diff = Repo(place, repo.old, repo.new).diff()
        assert new_names(diff.stages["sft"]) == {"clip_norm": "clip_grad_norm"}


def test_a_repository_is_searched_in_the_documented_places(
    repo: Repo, shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (repo.old, repo.new)
    # tmp_path is no repository, and a shallow clone lies below it
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path)
    monkeypatch.setattr(locate, "FOUND_IN", (tmp_path / "nowhere", repo.path))
    assert pin.find_commits(words, None, {}).repository.root == repo.path

    with pytest.raises(NotReady):
        pin.find_commits(words, None, {"LAUNCH_OPEN_INSTRUCT": str(shallow)})

    monkeypatch.setattr(locate, "FOUND_IN", ())
    with pytest.raises(NotReady) as raised:
        pin.find_commits(words, None, {})
    assert raised.value.findings[0].code == "no-repository"


def test_folders_and_pipelines_stand_for_their_stage_files(
    repo: Repo, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "stage: sft\nargs: {model_name_or_path: m, dataset_mixer_list: [a, 1.0]}\n"
    stage = write("files/sft.yaml", text)
    write("files/b.yml", text)

    overriding = "stages:\n  - {config: files/sft.yaml, with: {clip_norm: 2.0}}\n"
    config = only_config(repo.diff(write("pipeline.yaml", overriding)))
    assert config.path.name == "sft.yaml"
    assert "renamed-key" in {finding.code for finding in config.appeared}

    # a stage file that a pipeline names as it is counts once
    pipeline = write("pipeline.yaml", "stages:\n  - {config: files/sft.yaml}\n")
    only_config(repo.diff(pipeline, stage))

    words = ["pin", "diff", repo.old, repo.new, "--open-instruct", str(repo.path)]
    main([*words, "-c", str(stage.parent), "--format", "json"])
    configs = json.loads(capsys.readouterr().out)["data"]["configs"]
    assert sorted(Path(config["path"]).name for config in configs) == ["b.yml", "sft.yaml"]


def test_the_real_scripts_of_the_known_commits(checkout: Path) -> None:
    try:
        commits = pin.find_commits(("45901fd0", "e6c3044a"), checkout, {})
    except (NotReady, UsageError):
        pytest.skip("the checkout's history lacks a known commit")

    diff = difference.compare_commits(
        commits, [REPOSITORY / "configs" / "smoke" / "dpo_qwen7b.yaml"]
    )

    dpo = diff.stages["dpo"]
    assert kinds(dpo, "data_loader_seed") == {"added"}
    clipped = changes(dpo, "max_grad_norm")["default"]
    assert (clipped.before, clipped.after) == ("-1", "none")
    assert changes(dpo, "model_name_or_path")["default"].after == "required"
    assert (diff.old.cache, diff.new.cache) == ("v6", "v7")
    assert diff.exit_code is Exit.OK
    assert "max_grad_norm" in changed_defaults(only_config(diff))
