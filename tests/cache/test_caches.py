"""Which cache folder belongs to a run: what changes it, what does not, and why it was missed."""

import contextlib
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from plans import from_text, make_plan

from launcher import files
from launcher.cache import diagnosis, folders, keys
from launcher.cache.diagnosis import Reason
from launcher.cache.keys import Cache
from launcher.errors import NotReady, UsageError
from launcher.plan import plan
from launcher.plan.plan import Plan
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

PACKAGES = {"transformers": "5.17.0", "tokenizers": "0.22.2", "trl": "1.16.0", "datasets": "5.2.0"}
SFT = """
stage: sft
args:
  model_name_or_path: model
  dataset_mixer_list: [data/a.jsonl, 1.0, data/b.jsonl, 0.5]
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
"""
DPO = SFT.replace("stage: sft", "stage: dpo").replace("dataset_mixer_list", "mixer_list")
TRL_SFT = """
stage: sft
backend: trl
args:
  model_name_or_path: model
  dataset_name: data
"""
TRL_DPO = TRL_SFT.replace("stage: sft", "stage: dpo")
STAGES = [SFT, DPO, TRL_SFT, TRL_DPO]
NAMES = ["sft", "dpo", "trl sft", "trl dpo"]
PRECOMPUTED = "precompute_ref_log_probs=true"
HUB_DPO = DPO.replace("model_name_or_path: model", "model_name_or_path: org/model")
HUB_DATA = SFT.replace("data/a.jsonl", "org/a").replace("data/b.jsonl", "org/b")


def weights(raw: bytes) -> bytes:
    """A safetensors file of one tensor."""
    tensor = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [0, len(raw)]}
    header = json.dumps({"a": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + raw


def rows(text: str) -> bytes:
    """Rows that SFT and DPO of both trainers can read."""
    lines = []
    for number in range(9):
        question = {"role": "user", "content": f"{text} {number}"}
        right = [question, {"role": "assistant", "content": "yes"}]
        wrong = [question, {"role": "assistant", "content": "no"}]
        lines.append(json.dumps({"messages": right, "chosen": right, "rejected": wrong}))
    return "\n".join(lines).encode() + b"\n"


@pytest.fixture
def project(write: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two data files and a model, and the working directory in it."""
    write("project/data/a.jsonl", rows("one"))
    write("project/data/b.jsonl", rows("two"))
    write("project/model/model.safetensors", weights(b"w" * 50))
    write("project/model/tokenizer.json", "{}")
    write("project/model/chat_template.jinja", "{{ messages }}")
    folder = write("project/model/config.json", '{"model_type": "qwen2"}').parent.parent
    monkeypatch.chdir(folder)
    return folder


def plan_stage(text: str, *overrides: str) -> Plan:
    """The plan of a stage file in the working directory."""
    return make_plan(from_text(Path.cwd(), text, *overrides))


def derive(
    text: str, *overrides: str, packages: Mapping[str, str] = PACKAGES, lenient: bool = False
) -> dict[str, Cache]:
    """The cache folders of a stage, by kind."""
    return derive_by_kind(plan_stage(text, *overrides), packages, lenient=lenient)


def derive_by_kind(
    plan: Plan, packages: Mapping[str, str] = PACKAGES, lenient: bool = False
) -> dict[str, Cache]:
    caches = keys.derive(plan, packages, lenient=lenient)
    return {cache.kind: cache for cache in caches}


def paths(text: str, *overrides: str, **options: Any) -> dict[str, Path]:
    """Their folders."""
    return {kind: cache.path for kind, cache in derive(text, *overrides, **options).items()}


def rewrite(path: Path, raw: bytes) -> None:
    """Write a file anew, with its old time of last write."""
    before = path.stat()
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("changed", ["data/a.jsonl", "model/chat_template.jinja"])
@pytest.mark.parametrize("text", STAGES, ids=NAMES)
def test_content_that_upstreams_key_does_not_see_changes_the_folder(
    project: Path, text: str, changed: str
) -> None:
    before = paths(text)
    rewrite(project / changed, rows("own"))
    now = paths(text)
    assert before
    assert before.keys() == now.keys()
    for kind, path in before.items():
        assert now[kind] != path


def test_a_retrained_model_changes_the_reference_alone(project: Path) -> None:
    before = paths(DPO)
    rewrite(project / "model/model.safetensors", weights(b"v" * 50))
    now = paths(DPO)
    assert now["dataset"] == before["dataset"]
    assert now["reference"] != before["reference"]


@pytest.mark.parametrize("text", [DPO, TRL_DPO], ids=["dpo", "trl dpo"])
def test_times_copies_and_places_change_nothing(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    before = paths(text)
    for path in project.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert paths(text) == before
    moved = tmp_path / "elsewhere" / "project"
    shutil.copytree(project, moved)
    shutil.rmtree(project)
    monkeypatch.chdir(moved)
    (moved / "model" / "README.md").write_text("what a training leaves beside a model")
    (moved / "model" / "trainer_state.json").write_text("{}")
    assert paths(text) == before


def test_what_upstreams_key_sees_is_left_to_it(project: Path) -> None:
    assert paths(SFT, "chat_template_name=tulu", "output_dir=x") == paths(SFT)
    shorter = derive(SFT, "max_seq_length=64")["dataset"]
    assert shorter.path == derive(SFT)["dataset"].path
    assert shorter.key["max_seq_length"] == 64


def test_data_of_the_hub_keep_the_shared_cache(project: Path) -> None:
    cache = derive(HUB_DATA)["dataset"]
    assert cache.arguments
    assert not cache.env
    assert derive(TRL_SFT, "dataset_name=org/a") == {}


def test_a_key_of_ones_own_is_left_alone(project: Path, write: Write) -> None:
    assert derive(SFT, "dataset_config_hash=abc") == {}
    words = ("config_hash=abc", "local_cache_dir=own")
    absent = paths(DPO, *words, lenient=True)
    assert set(absent) == {"reference"}
    write("project/own/abc/data.arrow", "1")
    first = paths(DPO, *words)
    assert first != absent
    write("project/own/abc/data.arrow", "2")
    assert paths(DPO, *words) != first


@pytest.mark.parametrize("text", [DPO, TRL_SFT], ids=["dpo", "trl sft"])
def test_another_release_of_what_tokenises_changes_the_folder(project: Path, text: str) -> None:
    before = paths(text)
    now = paths(text, packages={**PACKAGES, "transformers": "5.18.0"})
    for kind, path in before.items():
        assert now[kind] != path
    assert paths(text, packages={**PACKAGES, "wandb": "9"}) == before


@pytest.mark.parametrize(
    "file, kinds",
    [
        ("open_instruct/dataset_transformation.py", {"dataset", "reference"}),
        ("open_instruct/dpo_utils.py", {"reference"}),
        ("open_instruct/finetune.py", set()),
    ],
)
def test_upstreams_own_code_counts_by_content(project: Path, file: str, kinds: set[str]) -> None:
    stage = from_text(project, DPO)
    # as without a checkout: the snapshot knows the files of the pin
    stage = replace(stage, upstream=replace(stage.upstream, packages={}))
    digests = {**stage.schema.digests, file: "edited"}
    edited = replace(stage, schema=replace(stage.schema, digests=digests))

    before = derive_by_kind(make_plan(stage))
    after = derive_by_kind(make_plan(edited))

    changed = {kind for kind in before if after[kind].path != before[kind].path}
    assert changed == kinds


def test_what_makes_another_reference_model_changes_its_folder(project: Path, write: Write) -> None:
    before = paths(DPO)["reference"]
    config = write("project/other/config.json", "{}")
    other = paths(DPO, "config_name=other")["reference"]
    config.write_text('{"rope_theta": 1}')
    edited = paths(DPO, "config_name=other")["reference"]
    liger = paths(DPO, "use_liger_kernel=true")["reference"]
    assert len({before, other, edited, liger}) == 4
    assert paths(DPO, "learning_rate=1e-3", "num_epochs=3")["reference"] == before


def test_a_folder_of_the_user_holds_those_of_launch(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = derive(SFT, "dataset_local_cache_dir=cache")["dataset"]
    assert named.path.parent == project / "cache"
    assert named.arguments == {"dataset_local_cache_dir": str(named.path)}
    usual = derive(SFT)["dataset"]
    assert usual.path.parent == tmp_path / "cache" / "launch"

    monkeypatch.setenv(keys.REFERENCE_VARIABLE, str(tmp_path / "ref"))
    reference = derive(DPO)["reference"]
    assert reference.path.parent == tmp_path / "ref"
    monkeypatch.setenv(keys.DATASETS_VARIABLE, str(tmp_path / "hf"))
    dataset = derive(TRL_SFT)["dataset"]
    assert dataset.path.parent == tmp_path / "hf"


def test_the_command_gets_them_as_upstreams_own_options(project: Path) -> None:
    before = plan_stage(DPO)
    dataset, reference = keys.derive(before, PACKAGES)
    after = plan.complete_plan(before, keys.derive_arguments([dataset, reference]))
    assert after.values["local_cache_dir"] == str(dataset.path)
    assert after.arguments()["local_cache_dir"] == [str(dataset.path)]
    assert "data/a.jsonl" in after.derived["local_cache_dir"].why
    env = keys.derive_environment([dataset, reference])
    assert env[keys.REFERENCE_VARIABLE] == str(reference.path)
    assert Path(env[keys.DATASETS_VARIABLE]).parent == dataset.path
    assert not (project / "cache").exists()
    assert not dataset.path.exists()


def test_a_dry_run_may_name_what_is_not_here(project: Path) -> None:
    (project / "data" / "a.jsonl").unlink()
    assert derive(SFT, lenient=True)["dataset"].inputs[0].digest == "missing"
    with pytest.raises(NotReady) as caught:
        derive(SFT)
    assert caught.value.findings[0].code == "missing-file"


def test_trls_precomputed_reference_depends_on_what_its_key_leaves_out(project: Path) -> None:
    def path(*overrides: str) -> Path:
        return paths(TRL_DPO, *overrides)["dataset"]

    assert path("max_length=9") == path()
    precomputed = {
        path(PRECOMPUTED),
        path(PRECOMPUTED, "max_length=9"),
        path(PRECOMPUTED, "ld_alpha=0.5"),
    }
    assert len(precomputed) == 3
    assert path() not in precomputed
    # also for data of the hub
    hub = "dataset_name=org/a"
    assert path(hub, PRECOMPUTED) != path(hub, PRECOMPUTED, "max_length=9")


def test_a_model_that_is_not_here_is_noted(project: Path) -> None:
    dpo = plan_stage(HUB_DPO)
    (finding,) = keys.check_caches(dpo, keys.derive(dpo, PACKAGES))
    assert (finding.severity, finding.code) == ("note", "model-not-here")


def run_folder(name: str) -> RunFolder:
    folder = RunFolder(rundir.find_runs_root() / name)
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def fill(path: Path, kind: str, key: str = "0123456789") -> Path:
    """Leave in a folder what upstream does."""
    if kind == "reference":
        entry = path / f"{key}.pt"
        entry.write_bytes(b"p" * 1000)
        return entry
    entry = path / key
    entry.mkdir(exist_ok=True)
    for name in ("state.json", "dataset_info.json", "config.json"):
        (entry / name).write_text("{}")
    return entry


@contextlib.contextmanager
def hold(
    name: str, text: str, *overrides: str, attempt: int = 1, filled: bool = True
) -> Iterator[dict[str, Cache]]:
    """A run that holds its folders, and has filled them as upstream would."""
    caches = derive(text, *overrides)
    with folders.lock(tuple(caches.values()), run_folder(name), attempt):
        if filled:
            for cache in caches.values():
                fill(cache.path, cache.kind)
        yield caches


def use(name: str, text: str, *overrides: str) -> dict[str, Cache]:
    """The folders of a run that is over."""
    with hold(name, text, *overrides) as caches:
        return caches


def test_a_folder_is_listed_with_what_it_was_derived_from(project: Path) -> None:
    reference = use("r1", DPO)["reference"].path
    sources = files.read_json(reference / folders.RECORD)["inputs"]
    (model,) = [source for source in sources if source["role"] == "model"]
    assert model["name"] == "model"
    names = [file["name"] for file in model["shown"]["files"]]
    assert names == ["config.json", "model.safetensors"]

    (folder,) = [folder for folder in folders.list_folders() if folder.kind == "reference"]
    row = folder.row()
    assert row["state"] == "filled"
    assert row["runs"] == ["r1"]
    assert row["size"] > 1000
    assert row["last used"] < 60
    shown = folders.describe_row(row)
    assert set(folders.COLUMNS) <= shown.keys()
    assert shown["of"] == "data/a.jsonl, data/b.jsonl, model"
    assert shown["size"].endswith(" KiB")
    assert shown["age"].endswith("s")


def test_folders_elsewhere_are_found_again(project: Path, tmp_path: Path) -> None:
    caches = use("r1", SFT, f"dataset_local_cache_dir={tmp_path / 'disk'}")
    (folder,) = folders.list_folders()
    assert folder.path == caches["dataset"].path
    shutil.rmtree(tmp_path / "disk")
    assert folders.list_folders() == []


def test_a_half_written_set_is_removed_before_a_run(project: Path) -> None:
    caches = use("r1", DPO)
    dataset = caches["dataset"].path
    reference = caches["reference"].path
    half = dataset / "abcdef0123"
    half.mkdir()
    (half / "data-00000-of-00001.arrow").touch()
    (reference / "tmpabc.tmp").touch()
    (dataset / "notes").mkdir()
    (dataset / "datasets").mkdir()
    with hold("r2", DPO, filled=False):
        assert not half.exists()
        assert sorted(path.name for path in dataset.glob("[!.]*")) == [
            "0123456789",
            "datasets",
            folders.RECORD,
            "notes",
        ]
        assert not (reference / "tmpabc.tmp").exists()
        assert (reference / "0123456789.pt").exists()


def test_what_was_edited_while_a_run_began_spoils_what_it_made(project: Path) -> None:
    with hold("r1", DPO, filled=False) as caches:
        # between the launcher's look and upstream's
        (project / "data/a.jsonl").write_bytes(rows("own"))
        for cache in caches.values():
            fill(cache.path, cache.kind)
    discarded = []
    for cache in caches.values():
        discarded += [path.name for path in folders.discard_spoiled(cache) or ()]
    assert discarded == ["0123456789", "0123456789.pt"]
    assert [folder.entries() for folder in folders.list_folders()] == [[], []]


def test_rows_that_were_put_back_spoil_what_was_made_meanwhile_and_nothing_older(
    project: Path,
) -> None:
    use("r1", SFT)
    with hold("r2", SFT, filled=False) as caches:
        data = project / "data/a.jsonl"
        raw = data.read_bytes()
        rewrite(data, rows("own"))
        other = fill(caches["dataset"].path, "dataset", "fedcba9876")
        rewrite(data, raw)
    assert folders.discard_spoiled(caches["dataset"]) == [other]
    with hold("r3", SFT, filled=False) as caches:
        pass
    assert not folders.discard_spoiled(caches["dataset"])
    assert folders.list_folders()[0].entries() == ["0123456789"]


def clear(**options: Any) -> dict[str, str]:
    """Clear the known folders; the state of each afterwards, by kind."""
    return {
        result.kind: result.state for result in folders.clear(folders.list_folders(), **options)
    }


def test_clearing_takes_the_kind_and_age_that_were_asked_for(project: Path) -> None:
    caches = use("r1", DPO)
    everything = {"dataset": "would be removed", "reference": "would be removed"}
    assert clear(dry_run=True) == everything
    assert clear(older_than_s=60) == {"dataset": "kept", "reference": "kept"}
    assert clear(older_than_s=0, dry_run=True) == everything
    dataset = caches["dataset"].path
    assert dataset.is_dir()
    assert clear(kind="reference") == {"reference": "removed"}
    assert not caches["reference"].path.exists()
    assert clear() == {"dataset": "removed"}
    assert folders.list_folders() == []
    assert list(dataset.parent.glob("*-*")) == []


def test_a_folder_that_a_run_holds_is_kept(project: Path) -> None:
    with hold("r1", SFT):
        (result,) = folders.clear(folders.list_folders())
        assert result.state == "kept"
        assert result.reason == "a run uses it"
    assert clear() == {"dataset": "removed"}


def test_a_started_process_holds_on_when_the_launcher_is_gone(project: Path) -> None:
    caches = derive(SFT)
    with folders.lock(tuple(caches.values()), run_folder("r1"), 1) as locks:
        child = subprocess.Popen(["sleep", "600"], pass_fds=locks)
    try:
        assert clear() == {"dataset": "kept"}
    finally:
        child.kill()
        child.wait()
    assert clear() == {"dataset": "removed"}


@pytest.mark.parametrize("spoil", ["record", "name", "link"])
def test_nothing_else_is_deleted(project: Path, tmp_path: Path, spoil: str) -> None:
    path = use("r1", SFT)["dataset"].path
    (folder,) = folders.list_folders()
    other = tmp_path / "precious"
    if spoil == "record":
        (path / folders.RECORD).unlink()
    elif spoil == "name":
        # somebody copied the folder's contents to where other things are
        path = path.rename(other)
        folder = replace(folder, path=other)
    else:
        path.rename(other)
        path.symlink_to(other)
    (result,) = folders.clear([folder])
    assert result.state == "kept"
    assert (path / "0123456789" / "state.json").is_file()
    assert folders.list_folders() == []


def test_ages() -> None:
    assert folders.parse_age("30d") == 30 * 86400
    assert folders.parse_age("90m") == 5400
    assert folders.parse_age("1.5w") == 907200


@pytest.mark.parametrize("text", ["", "30", "-1d", "30 days"])
def test_an_age_without_a_unit_or_below_0_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        folders.parse_age(text)


def record_use(name: str, state: str, path: object = "") -> None:
    """Let the probe of a run record whether its dataset was found."""
    folder = run_folder(name).probe
    folder.mkdir(exist_ok=True)
    event = {"event": "dataset_cache", "state": state, "path": str(path)}
    with (folder / "rank-0.jsonl").open("a") as file:
        file.write('{"event": "start"}\n')
        file.write(f"{json.dumps(event)}\n")


def why(name: str) -> Reason:
    """Why the dataset of a run was found or not."""
    (reason,) = [
        reason for reason in diagnosis.explain_caches(run_folder(name)) if reason.kind == "dataset"
    ]
    return reason


def differences(name: str) -> list[str]:
    return [difference.text for difference in why(name).differences]


def test_an_edited_row_is_the_reason_of_a_miss(project: Path) -> None:
    use("r1", SFT)
    rewrite(project / "data/a.jsonl", rows("own"))
    use("r2", SFT)
    record_use("r2", "miss")
    reason = why("r2")
    assert reason.state == "miss"
    assert Path(str(reason.compared)).name == "r1"
    assert "r1" in reason.lines()[0]
    (difference,) = reason.differences
    assert difference.what == "data/a.jsonl"
    for words in (
        f"{len(rows('own')):,} bytes",
        "the same time",
        difference.before["digest"][:12],
        difference.now["digest"][:12],
    ):
        assert words in difference.text


def test_a_value_that_counts_only_now_is_no_reason(project: Path) -> None:
    use("r1", TRL_DPO)
    words = (PRECOMPUTED, "use_peft=true")
    with hold("r2", TRL_DPO, *words, filled=False):
        record_use("r2", "miss")
    # the reference is one of the model's weights, which count from now on
    first, *others = differences("r2")
    assert first == "`precompute_ref_log_probs` false -> true"
    for text in others:
        assert text.startswith("model/")
    with hold("r3", TRL_DPO, *words, "max_length=9", filled=False):
        record_use("r3", "miss")
    assert differences("r3") == ["`max_length` 1024 -> 9"]


def test_upstreams_own_record_is_the_last_resort(project: Path) -> None:
    def write_config(entry: Path, commit: str) -> None:
        config = {"dataset_configs": [{"dataset_commit_hash": commit}], "config_hash": entry.name}
        files.write_json(entry / "config.json", config)

    with hold("r1", SFT) as caches:
        write_config(caches["dataset"].path / "0123456789", "c1")
    with hold("r2", SFT, filled=False):
        entry = fill(caches["dataset"].path, "dataset", "fedcba9876")
        write_config(entry, "c2")
        record_use("r2", "miss", entry)
    key = "dataset_configs[0].dataset_commit_hash"
    assert differences("r2") == [f"upstream's `{key}` c1 -> c2"]


def test_the_newest_attempt_is_explained(project: Path) -> None:
    with hold("r1", SFT):
        record_use("r1", "miss")
    with hold("r1", SFT, attempt=2, filled=False):
        record_use("r1", "hit")
    assert why("r1").state == "hit"
    assert Path(str(why("r1").compared)).name == "r1"
    assert diagnosis.explain_caches(run_folder("r9")) == []
