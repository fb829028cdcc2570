"""Which cache folder belongs to a run: what changes it, what does not, and how that is told afterwards."""

import contextlib
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import from_text, planned

from launcher.cache import diagnosis, keys
from launcher.cache import folders as cache_folders
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
TRL = """
stage: {stage}
backend: trl
args:
  model_name_or_path: model
  dataset_name: data
"""
TEXTS = {
    "sft": SFT, "dpo": DPO, "trl sft": TRL.format(stage="sft"), "trl dpo": TRL.format(stage="dpo"),
}  # fmt: skip


def weights(raw: bytes) -> bytes:
    """A safetensors file of one tensor."""
    head = json.dumps({"a": {"dtype": "U8", "shape": [len(raw)], "data_offsets": [0, len(raw)]}})
    return struct.pack("<Q", len(head)) + head.encode() + raw


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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two data files and a model, and the working directory in it."""
    folder = tmp_path / "project"
    files = {
        "data/a.jsonl": rows("one"), "data/b.jsonl": rows("two"),
        "model/config.json": b'{"model_type": "qwen2"}',
        "model/model.safetensors": weights(b"w" * 50), "model/tokenizer.json": b"{}",
        "model/chat_template.jinja": b"{{ messages }}",
    }  # fmt: skip
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    monkeypatch.chdir(folder)
    return folder


def made(text: str, *overrides: str) -> Plan:
    """The plan of a stage file in the working directory."""
    return planned(from_text(Path.cwd(), TEXTS.get(text, text), *overrides))


def derived(
    text: str, *overrides: str, packages: Mapping[str, str] = PACKAGES, lenient: bool = False
) -> dict[str, Cache]:
    """The cache folders of a stage, by kind."""
    found = keys.derive(made(text, *overrides), packages, lenient=lenient)
    return {one.kind: one for one in found}


def paths(text: str, *overrides: str, **options: Any) -> dict[str, Path]:
    """Their folders."""
    return {kind: one.path for kind, one in derived(text, *overrides, **options).items()}


def rewrite(path: Path, raw: bytes) -> None:
    """Write a file anew, with its old time of last write."""
    was = path.stat()
    path.write_bytes(raw)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


CHANGES: Mapping[str, Callable[[Path], object]] = {
    "row": lambda p: rewrite(p / "data/a.jsonl", rows("own")),
    "template": lambda p: (p / "model/chat_template.jinja").write_bytes(b"other"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("text", TEXTS)
def test_content_that_upstreams_key_does_not_see_changes_the_folder(
    place: Path, text: str, change: str
) -> None:
    before = paths(text)
    CHANGES[change](place)
    now = paths(text)
    assert before.keys() == now.keys() and before
    assert all(now[kind] != before[kind] for kind in before)


def test_a_retrained_model_changes_the_reference_alone(place: Path) -> None:
    before = paths("dpo")
    rewrite(place / "model/model.safetensors", weights(b"v" * 50))
    now = paths("dpo")
    assert now["dataset"] == before["dataset"]
    assert now["reference"] != before["reference"]


@pytest.mark.parametrize("text", TEXTS)
def test_times_copies_and_places_change_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    before = paths(text)
    for path in place.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert paths(text) == before
    moved = tmp_path / "elsewhere" / "project"
    shutil.copytree(place, moved)
    shutil.rmtree(place)
    monkeypatch.chdir(moved)
    (moved / "model" / "README.md").write_text("what a training leaves beside a model")
    (moved / "model" / "trainer_state.json").write_text("{}")
    assert paths(text) == before


def test_what_upstreams_key_sees_is_left_to_it(place: Path) -> None:
    for override in ("max_seq_length=64", "chat_template_name=tulu", "output_dir=x"):
        assert paths("sft", override) == paths("sft")
    assert derived("sft", "max_seq_length=64")["dataset"].key["max_seq_length"] == 64
    # data of the hub keep the shared cache of datasets
    text = SFT.replace("data/a.jsonl", "org/a").replace("data/b.jsonl", "org/b")
    one = derived(text)["dataset"]
    assert one.arguments and not one.env
    assert derived("trl sft", "dataset_name=org/a") == {}
    # a key of ones own is left alone
    assert derived("sft", "dataset_config_hash=abc") == {}
    before = paths("dpo", "config_hash=abc", "local_cache_dir=own", lenient=True)
    assert set(before) == {"reference"}
    (place / "own" / "abc").mkdir(parents=True)
    (place / "own" / "abc" / "data.arrow").write_bytes(b"1")
    first = paths("dpo", "config_hash=abc", "local_cache_dir=own")
    (place / "own" / "abc" / "data.arrow").write_bytes(b"2")
    assert paths("dpo", "config_hash=abc", "local_cache_dir=own") != first != before


@pytest.mark.parametrize("text", ["dpo", "trl sft"])
def test_another_release_of_what_tokenises_changes_the_folder(place: Path, text: str) -> None:
    now = paths(text, packages={**PACKAGES, "transformers": "5.18.0"})
    assert all(now[kind] != path for kind, path in paths(text).items())
    assert paths(text, packages={**PACKAGES, "wandb": "9"}) == paths(text)


def test_upstreams_own_code_counts_by_content(place: Path) -> None:
    stage = from_text(place, DPO)
    # as without a checkout: the snapshot knows the files of the pin
    stage = replace(stage, upstream=replace(stage.upstream, packages={}))
    before = {one.kind: one.path for one in keys.derive(planned(stage), PACKAGES)}
    for label, kinds in (
        ("open_instruct/dataset_transformation.py", {"dataset", "reference"}),
        ("open_instruct/dpo_utils.py", {"reference"}),
        ("open_instruct/finetune.py", set[str]()),
    ):
        schema = replace(stage.schema, digests={**stage.schema.digests, label: "edited"})
        found = keys.derive(planned(replace(stage, schema=schema)), PACKAGES)
        assert {one.kind for one in found if one.path != before[one.kind]} == kinds


def test_what_makes_another_reference_model_changes_its_folder(place: Path) -> None:
    (place / "other").mkdir()
    (place / "other" / "config.json").write_text("{}")
    found = [
        paths("dpo", *overrides)["reference"]
        for overrides in ((), ("use_liger_kernel=true",), ("config_name=other",))
    ]
    (place / "other" / "config.json").write_text('{"rope_theta": 1}')
    found.append(paths("dpo", "config_name=other")["reference"])
    assert len(set(found)) == 4
    assert paths("dpo", "learning_rate=1e-3", "num_epochs=3")["reference"] == found[0]


def test_the_users_own_folder_holds_ours(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = derived("sft", "dataset_local_cache_dir=cache")["dataset"]
    assert one.path.parent == place / "cache"
    assert one.arguments == {"dataset_local_cache_dir": str(one.path)}
    assert derived("sft")["dataset"].path.parent == tmp_path / "cache" / "launch"
    monkeypatch.setenv(keys.REFERENCE_VARIABLE, str(tmp_path / "ref"))
    assert derived("dpo")["reference"].path.parent == tmp_path / "ref"
    monkeypatch.setenv(keys.DATASETS_VARIABLE, str(tmp_path / "hf"))
    assert derived("trl sft")["dataset"].path.parent == tmp_path / "hf"


def test_the_command_gets_them_as_upstreams_own_options(place: Path) -> None:
    before = made("dpo")
    found = keys.derive(before, PACKAGES)
    after = plan.completed(before, keys.derived(found))
    by_kind = {one.kind: one for one in found}
    assert after.values["local_cache_dir"] == str(by_kind["dataset"].path)
    assert after.arguments()["local_cache_dir"] == [str(by_kind["dataset"].path)]
    assert "data/a.jsonl" in after.derived["local_cache_dir"].why
    env = keys.environment(found)
    assert env[keys.REFERENCE_VARIABLE] == str(by_kind["reference"].path)
    assert Path(env[keys.DATASETS_VARIABLE]).parent == by_kind["dataset"].path
    assert not (place / "cache").exists()
    assert not by_kind["dataset"].path.exists()


def test_a_dry_run_may_name_what_is_not_here(place: Path) -> None:
    (place / "data" / "a.jsonl").unlink()
    assert derived("sft", lenient=True)["dataset"].inputs[0].digest == "missing"
    with pytest.raises(NotReady) as caught:
        derived("sft")
    assert caught.value.findings[0].code == "missing-file"


def test_trls_precomputed_reference_depends_on_what_its_key_leaves_out(place: Path) -> None:
    on = "precompute_ref_log_probs=true"
    found = [
        paths("trl dpo", *words)["dataset"]
        for words in ((), (on,), (on, "max_length=9"), (on, "ld_alpha=0.5"))
    ]
    assert len(set(found)) == 4
    assert paths("trl dpo", "max_length=9")["dataset"] == found[0]
    # also for data of the hub
    hub = ("dataset_name=org/a", on)
    assert paths("trl dpo", *hub) != paths("trl dpo", *hub, "max_length=9")


def test_a_model_that_is_not_here_is_said(place: Path) -> None:
    text = DPO.replace("model_name_or_path: model", "model_name_or_path: org/model")
    plan = made(text)
    found = keys.findings(plan, keys.derive(plan, PACKAGES))
    assert [(one.severity, one.code) for one in found] == [("note", "model-not-here")]


@contextlib.contextmanager
def used(
    name: str, text: str, *overrides: str, attempt: int = 1, fill: bool = True
) -> Iterator[dict[str, Cache]]:
    """A run that holds its folders, and has filled them as upstream would."""
    found = derived(text, *overrides)
    with cache_folders.lock(tuple(found.values()), run(name), attempt):
        for one in found.values() if fill else ():
            entry(one.path, one.kind)
        yield found


def run(name: str) -> RunFolder:
    """A run folder of that name."""
    folder = RunFolder(rundir.runs_root() / name)
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def entry(path: Path, kind: str, key: str = "0123456789") -> Path:
    """What upstream leaves in a folder."""
    if kind == "reference":
        (path / f"{key}.pt").write_bytes(b"p" * 1000)
        return path / f"{key}.pt"
    (path / key).mkdir(exist_ok=True)
    for name in ("state.json", "dataset_info.json", "config.json"):
        (path / key / name).write_text("{}")
    return path / key


def probed(name: str, *events: Mapping[str, Any]) -> None:
    """What the probe recorded of a run."""
    folder = run(name).probe
    folder.mkdir(exist_ok=True)
    with (folder / "rank-0.jsonl").open("a") as file:
        for event in ({"event": "start"}, *events):
            file.write(json.dumps(event) + "\n")


def test_a_folder_is_listed_with_what_it_was_derived_from(place: Path) -> None:
    with used("r1", "dpo") as found:
        record = json.loads((found["reference"].path / cache_folders.RECORD).read_text())
    by_role = {one["role"]: one for one in record["inputs"]}
    assert by_role["model"]["name"] == "model"
    shown = [one["name"] for one in by_role["model"]["shown"]["files"]]
    assert shown == ["config.json", "model.safetensors"]
    row = next(one.row() for one in cache_folders.known() if one.kind == "reference")
    assert (row["state"], row["runs"]) == ("filled", ["r1"])
    assert row["size"] > 1000 and row["last used"] < 60
    shown = cache_folders.shown(row)
    assert set(cache_folders.COLUMNS) <= shown.keys()
    assert shown["of"] == "data/a.jsonl, data/b.jsonl, model"
    assert shown["size"].endswith(" KiB") and shown["age"].endswith("s")


def test_folders_elsewhere_are_found_again(place: Path, tmp_path: Path) -> None:
    with used("r1", "sft", f"dataset_local_cache_dir={tmp_path / 'disk'}") as found:
        pass
    assert [one.path for one in cache_folders.known()] == [found["dataset"].path]
    shutil.rmtree(tmp_path / "disk")
    assert cache_folders.known() == []


def test_a_half_written_set_is_taken_away_before_a_run(place: Path) -> None:
    with used("r1", "dpo") as found:
        dataset, reference = found["dataset"].path, found["reference"].path
        half = dataset / "abcdef0123"
        half.mkdir()
        (half / "data-00000-of-00001.arrow").touch()
        (reference / "tmpabc.tmp").touch()
        (dataset / "notes").mkdir()
        (dataset / "datasets").mkdir()
    with used("r2", "dpo", fill=False):
        assert sorted(p.name for p in dataset.iterdir() if not p.name.startswith(".")) == [
            "0123456789", "datasets", cache_folders.RECORD, "notes",
        ]  # fmt: skip
        assert [p.name for p in reference.glob("*.*") if p.suffix in {".pt", ".tmp"}] == [
            "0123456789.pt"
        ]


def test_what_was_edited_while_a_run_began_spoils_what_it_made(place: Path) -> None:
    with used("r1", "dpo", fill=False) as found:
        # between the launcher's look and upstream's
        data = place / "data/a.jsonl"
        data.write_bytes(data.read_bytes().replace(b"one", b"own"))
        for one in found.values():
            entry(one.path, one.kind)
    gone = [
        path.name for one in found.values() for path in cache_folders.discard_spoiled(one) or ()
    ]
    assert gone == ["0123456789", "0123456789.pt"]
    assert cache_folders.known() and not any(one.entries() for one in cache_folders.known())


def test_rows_that_were_put_back_spoil_what_was_made_meanwhile_and_nothing_older(
    place: Path,
) -> None:
    with used("r1", "sft"):
        pass
    with used("r2", "sft", fill=False) as found:
        data = place / "data/a.jsonl"
        raw = data.read_bytes()
        rewrite(data, rows("own"))
        other = entry(found["dataset"].path, "dataset", "fedcba9876")
        rewrite(data, raw)
    assert cache_folders.discard_spoiled(found["dataset"]) == [other]
    with used("r3", "sft", fill=False) as found:
        pass
    assert not cache_folders.discard_spoiled(found["dataset"])
    assert cache_folders.known()[0].entries() == ["0123456789"]


def cleared(**options: Any) -> dict[str, str]:
    """Kind -> what became of the folder."""
    return {one.kind: one.state for one in cache_folders.clear(cache_folders.known(), **options)}


def test_clearing_takes_the_kind_and_age_that_were_asked_for(place: Path) -> None:
    with used("r1", "dpo") as found:
        pass
    everything = {"dataset": "would be removed", "reference": "would be removed"}
    assert cleared(dry_run=True) == everything
    assert cleared(older_than_s=60) == {"dataset": "kept", "reference": "kept"}
    assert cleared(older_than_s=0, dry_run=True) == everything
    assert all(one.path.is_dir() for one in found.values())
    assert cleared(kind="reference") == {"reference": "removed"}
    assert not found["reference"].path.exists()
    assert cleared() == {"dataset": "removed"}
    assert cache_folders.known() == []
    assert list(found["dataset"].path.parent.glob("*-*")) == []


def test_what_a_run_holds_is_kept(place: Path) -> None:
    with used("r1", "dpo") as found:
        told = cache_folders.clear(cache_folders.known())
        assert {one.state for one in told} == {"kept"}
        assert {one.reason for one in told} == {"a run uses it"}
    assert cleared() == {"dataset": "removed", "reference": "removed"}
    assert not found["dataset"].path.exists()


def test_a_started_process_holds_on_when_the_launcher_is_gone(place: Path) -> None:
    found = derived("sft")
    with cache_folders.lock(tuple(found.values()), run("r1"), 1) as locks:
        child = subprocess.Popen(["sleep", "600"], pass_fds=locks)
    try:
        assert cleared() == {"dataset": "kept"}
    finally:
        child.kill()
        child.wait()
    assert cleared() == {"dataset": "removed"}


@pytest.mark.parametrize("spoil", ["record", "name", "link"])
def test_nothing_is_deleted_that_is_not_ours(place: Path, tmp_path: Path, spoil: str) -> None:
    with used("r1", "sft") as found:
        path = found["dataset"].path
    folders, other = cache_folders.known(), tmp_path / "precious"
    if spoil == "record":
        (path / cache_folders.RECORD).unlink()
    elif spoil == "name":
        # somebody copied the folder's contents to where other things are
        path = path.rename(other)
        folders = [replace(folders[0], path=other)]
    else:
        path.rename(other)
        path.symlink_to(other)
    assert [one.state for one in cache_folders.clear(folders)] == ["kept"]
    assert (path / "0123456789" / "state.json").is_file()
    assert cache_folders.known() == []


def test_ages() -> None:
    assert [*map(cache_folders.age, ("30d", "90m", "1.5w"))] == [30 * 86400, 5400, 907200]
    for text in ("", "30", "-1d", "30 days"):
        with pytest.raises(UsageError):
            cache_folders.age(text)


def reasons(name: str) -> dict[str, diagnosis.Reason]:
    """The reasons of a run's caches, by kind."""
    return {one.kind: one for one in diagnosis.why(run(name))}


def seen(kind: str, state: str, path: object = "") -> dict[str, Any]:
    """An event of the probe."""
    return {"event": f"{kind}_cache", "state": state, "path": str(path)}


def test_an_edited_row_is_the_reason(place: Path) -> None:
    with used("r1", "sft"):
        pass
    rewrite(place / "data/a.jsonl", rows("own"))
    with used("r2", "sft"):
        probed("r2", seen("dataset", "miss"))
    told = reasons("r2")["dataset"]
    assert (told.state, Path(str(told.compared)).name) == ("miss", "r1")
    (difference,) = told.differences
    assert difference.what == "data/a.jsonl"
    assert f"{len(rows('own')):,} bytes" in difference.text and "the same time" in difference.text
    assert difference.before["digest"][:12] in difference.text
    assert difference.now["digest"][:12] in difference.text
    assert "r1" in told.lines()[0]


def test_a_value_that_counts_only_now_is_no_reason(place: Path) -> None:
    with used("r1", "trl dpo"):
        pass
    words = ("precompute_ref_log_probs=true", "use_peft=true")
    with used("r2", "trl dpo", *words, fill=False):
        probed("r2", seen("dataset", "miss"))
    told = reasons("r2")["dataset"].differences
    # the reference is one of the model's weights, which count from now on
    first, *others = [one.text for one in told]
    assert first == "`precompute_ref_log_probs` false -> true"
    assert all(text.startswith("model/") for text in others)
    with used("r3", "trl dpo", *words, "max_length=9", fill=False):
        probed("r3", seen("dataset", "miss"))
    told = reasons("r3")["dataset"].differences
    assert [one.text for one in told] == ["`max_length` 1024 -> 9"]


def test_upstreams_own_record_is_the_last_resort(place: Path) -> None:
    with used("r1", "sft") as found:
        path = found["dataset"].path
        config = {"dataset_configs": [{"dataset_commit_hash": "c1"}], "config_hash": "0123456789"}
        (path / "0123456789" / "config.json").write_text(json.dumps(config))
    with used("r2", "sft", fill=False):
        other = entry(path, "dataset", "fedcba9876")
        config = {"dataset_configs": [{"dataset_commit_hash": "c2"}], "config_hash": "fedcba9876"}
        (other / "config.json").write_text(json.dumps(config))
        probed("r2", seen("dataset", "miss", other))
    assert [one.text for one in reasons("r2")["dataset"].differences] == [
        "upstream's `dataset_configs[0].dataset_commit_hash` c1 -> c2"
    ]


def test_the_newest_attempt_is_explained(place: Path) -> None:
    with used("r1", "sft"):
        probed("r1", seen("dataset", "miss"))
    with used("r1", "sft", attempt=2, fill=False):
        probed("r1", seen("dataset", "hit"))
    told = reasons("r1")["dataset"]
    assert (told.state, Path(str(told.compared)).name) == ("hit", "r1")
    assert diagnosis.why(run("r9")) == []
