"""Pipelines: judged whole before the first stage, each stage on the model before, nothing trained twice."""

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import saved
import yaml
from conftest import PATIENCE_S, REPOSITORY, SUPPORT, Write
from fake_world import World, made, needs_trl, until
from loads import counted

from launcher.cli import main
from launcher.config import pipeline
from launcher.errors import InvalidConfig, UsageError
from launcher.planning.collect import Scope
from launcher.planning.request import Request
from launcher.runs import lease, rundir
from launcher.workflows.pipeline import plan
from launcher.workflows.pipeline.plan import PipelineRequest

pytestmark = pytest.mark.slow

FAKE = SUPPORT / "fake_stages.py"
_PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
exec {python} -u {fake} "$@"
"""
QUESTION = {"role": "user", "content": "hi"}
CHOSEN = [QUESTION, {"role": "assistant", "content": "yes"}]
REJECTED = [QUESTION, {"role": "assistant", "content": "no"}]
# what the fake trainer logs of DPO is no loss of DPO
EXPECT = {"loss": "finite", "trend": "any", "packing": "any", "data": "any"}


def row(text: str) -> str:
    return json.dumps({"text": text, "chosen": f"Say {text}.", "rejected": "Say no."}) + "\n"


class Chained(World):
    """A world with a pipeline of three stages: first, then second and third on what comes before."""

    def stage(self, name: str, kind: str = "sft", **args: Any) -> Path:
        """A stage file whose model goes to `o/NAME`."""
        self.config()
        given = {"dataset_name": "data", "output_dir": f"o/{name}", "learning_rate": 0.5}
        whole = {
            "stage": kind, "backend": "trl", "deepspeed": "none", "expect": EXPECT,
            "batch": {"global": 2, "per_device": 2},
            "args": {k: v for k, v in {**given, **args}.items() if v is not None},
        }  # fmt: skip
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(whole))
        return path

    def pipeline(self, *stages: dict[str, Any] | str, **more: Any) -> Path:
        path = self.root / "p.yaml"
        path.write_text(yaml.safe_dump({**more, "stages": list(stages)}))
        return path

    def usual(self) -> Path:
        self.stage("first", model_name_or_path="model")
        self.stage("second")
        self.stage("third", "dpo")
        (self.root / "data" / "train.jsonl").write_text(row("a"))
        return self.pipeline("first.yaml", "second.yaml", {"config": "third.yaml", "name": "last"})

    def write_chats(self) -> None:
        """A row that each of open-instruct's stages reads."""
        chats = {"messages": CHOSEN, "chosen": CHOSEN, "rejected": REJECTED}
        (self.root / "chats.jsonl").write_text(json.dumps(chats) + "\n")

    def shim(self) -> Path:
        """An interpreter that trains by hashing."""
        path = self.root / "hashing"
        told = {"python": shlex.quote(sys.executable), "fake": shlex.quote(str(FAKE))}
        path.write_text(_PYTHON.format(**told))
        path.chmod(0o755)
        return path

    def words(self, *words: str) -> tuple[str, ...]:
        return ("pipeline", "p.yaml", "--python", str(self.shim()), "--gpus", "0", *words)

    def run(self, *words: str) -> tuple[int, dict[str, Any]]:
        done = self.launch(*self.words("--format", "json", *words))
        assert done.stdout, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        assert told["command"] == "pipeline" and told["schema_version"] == 1
        assert told["ok"] is (done.returncode == 0)
        return done.returncode, told

    def do(self, **steps: list[str]) -> None:
        """What the stages are to do beside, by their output folder."""
        (self.root / "do.json").write_text(json.dumps(steps))

    def trained(self) -> list[str]:  # type: ignore[override]
        """The output folders that were trained into since this was asked last."""
        path = self.root / "trained"
        told = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return told

    def weights(self, name: str) -> bytes:
        return (self.root / "o" / name / "weights.bin").read_bytes()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chained]:
    root = tmp_path / "world"
    with made(root / "unused"):
        one = Chained(root)
        for name, value in one.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(root)
        yield one
        for pid in one.left():
            os.kill(pid, signal.SIGKILL)


def ordered(loaded: pipeline.Chain, *, last: str | None = None, **common: Any) -> PipelineRequest:
    request = Request(stage=None, config=loaded.path, **common)
    return PipelineRequest(chain=loaded, common=request, last=last)


def statuses(told: dict[str, Any]) -> list[str]:
    return [one["status"] for one in told["data"]["stages"]]


def codes(told: dict[str, Any]) -> dict[str, str]:
    return {f["code"]: f["message"] for f in told["findings"] if f["severity"] == "error"}


def test_a_stage_comes_after_the_one_above_it_unless_it_says_otherwise(write: Write) -> None:
    write("sft.yaml", "stage: sft\n")
    write("dpo.yaml", "stage: dpo\n")
    path = write(
        "p.yaml",
        "name: three\ngpus: 2\nstages:\n  - sft.yaml\n  - {config: dpo.yaml, gpus: 0}\n"
        "  - {name: 2, config: dpo.yaml, from: sft}\n  - {name: c, config: dpo.yaml, from: 2}\n"
        "  - {name: d, config: dpo.yaml, from: no}\n",
    )
    told = pipeline.load(path)
    assert told.name == "three"
    assert [(one.name, one.source, one.gpus) for one in told.links] == [
        ("sft", None, 2), ("dpo", "sft", 0), ("2", "sft", 2), ("c", "2", 2),
        ("d", None, 2),
    ]  # fmt: skip
    assert [one.name for one in told.between("dpo", "2")] == ["dpo", "2"]
    with pytest.raises(UsageError, match="comes after"):
        told.between("c", "dpo")
    with pytest.raises(UsageError, match="no stage `dop`"):
        told.between("dop", None)


def test_everything_that_is_wrong_with_the_file_is_said_at_once(write: Write) -> None:
    write("sft.yaml", "stage: sft\n")
    path = write(
        "p.yaml",
        "nme: x\nstages:\n  - sft.yaml\n  - {name: a.b, config: sft.yaml, gpu: 3}\n"
        "  - {name: c, config: gone.yaml, from: q}\n  - {config: sft.yaml, gpus: -1, with: [a]}\n  - 7\n",
    )
    with pytest.raises(InvalidConfig) as caught:
        pipeline.load(path)
    told = [(f.line, f.message) for f in caught.value.findings]
    assert all(f.file == str(path) and f.code == "bad-pipeline" for f in caught.value.findings)
    for line, text in (
        (1, "`nme` is not a key"), (4, "`gpu` is not a key"), (4, "`a.b` cannot be"), (5, "gone.yaml"),
        (5, "`from: q`"), (6, "`gpus` is a number"), (6, "`with` is a mapping"),
        (6, "two stages are called `sft`"), (7, "a stage is a mapping"),
    ):  # fmt: skip
        assert any(line == at and text in message for at, message in told), (line, text)


def test_a_stage_file_is_no_pipeline(write: Write) -> None:
    path = write("s.yaml", "stage: sft\nbackend: trl\nargs: {seed: 1}\n")
    with pytest.raises(InvalidConfig) as caught:
        pipeline.load(path)
    (found,) = caught.value.findings
    assert "a stage file" in found.message and f"launch sft {path}" in str(found.help)


def test_with_and_the_command_line(write: Write) -> None:
    write("sft.yaml", "stage: sft\nbatch: {global: 8, per_device: 2}\nargs: {}\n")
    path = write(
        "p.yaml",
        "stages:\n  - {config: sft.yaml, with: {learning_rate: 1e-5, batch: {per_device: 4}}}\n",
    )
    link = pipeline.load(path, ["sft.learning_rate=2e-5"]).links[0]
    assert link.texts() == ["learning_rate=1e-05", "batch.per_device=4", "learning_rate=2e-5"]
    for wrong in ("learning_rate=1", "x.a=1", "nothing"):
        with pytest.raises(UsageError):
            pipeline.load(path, [wrong])


def surveyed(path: Path, gpus: int = 0, **more: Any) -> plan.PipelinePlan:
    return plan.plan_stages(ordered(pipeline.load(path), gpus=gpus, **more), Scope.PLAN)


def refused(path: Path, **more: Any) -> dict[str, tuple[str | None, int | None, str]]:
    with pytest.raises(InvalidConfig) as caught:
        surveyed(path, **more)
    return {
        f.code: (f.file and Path(f.file).name, f.line, f.message)
        for f in caught.value.findings
        if f.severity == "error"
    }


@needs_trl
def test_a_stage_is_given_the_model_and_the_tokenizer_of_the_one_before(world: Chained) -> None:
    world.usual()
    oi = (
        "stage: dpo\nbackend: open_instruct\nargs:\n  mixer_list: [chats.jsonl, '8']\n"
        "  output_dir: o/oi\n  do_not_randomize_output_dir: true\n  push_to_hub: false\n"
        "  try_launch_beaker_eval_jobs: false\n"
    )
    (world.root / "oi.yaml").write_text(oi)
    world.write_chats()
    told = surveyed(world.pipeline("first.yaml", "second.yaml", "oi.yaml"))
    assert list(told.steps) == ["first", "second", "oi"]
    given = [dict(step.plan.stage.args) for step in told.steps.values()]
    assert given[0]["model_name_or_path"] == "model"
    assert given[1]["model_name_or_path"] == str(world.root / "o" / "first")
    assert given[2]["model_name_or_path"] == str(world.root / "o" / "second")
    assert given[2]["tokenizer_name_or_path"] == str(world.root / "o" / "second")
    assert {step.root for step in told.steps.values()} == {"model"}


@needs_trl
def test_every_stage_is_judged_before_the_first(world: Chained) -> None:
    world.usual()
    world.stage("first", model_name_or_path="model", no_such=1)
    world.stage("second", output_dir=None)
    path = world.pipeline(
        "first.yaml", "second.yaml", {"config": "third.yaml", "with": {"bogus": 1}}
    )
    code, told = world.run()
    assert code == 3 and world.trained() == [] and not world.runs.exists()
    assert {"unknown-key", "pipeline-output"} <= codes(told).keys()
    places = {
        (Path(f["file"]).name, f["key"]) for f in told["findings"] if f["code"] == "unknown-key"
    }
    # what `with:` says stands in the pipeline file
    assert places == {("first.yaml", "args.no_such"), (path.name, "args.bogus")}
    # what the command line says is said as it was said, whatever `with:` holds
    done = world.launch(*world.words("third.bogus=2", "second.no_such=3"))
    assert "--> override `third.bogus=2` of third.yaml\n" in done.stderr
    assert "--> override `second.no_such=3` of second.yaml\n" in done.stderr


@needs_trl
def test_facts_of_a_model_that_is_not_there_yet_come_from_the_first(world: Chained) -> None:
    world.usual()
    world.stage("third", "dpo", max_length=128)
    (world.root / "model" / "config.json").write_text(
        '{"model_type": "qwen2", "max_position_embeddings": 64}'
    )
    found = {f.code: f for f in surveyed(world.root / "p.yaml").findings}
    assert "beyond-positions" in found and (found["beyond-positions"].file or "").endswith(
        "third.yaml"
    )


@needs_trl
def test_a_stage_that_names_another_model_must_say_which_is_meant(world: Chained) -> None:
    world.usual()
    world.stage("second", model_name_or_path="some/other")
    assert refused(world.root / "p.yaml")["pipeline-model"][0] == "second.yaml"
    # said: the one that the stage before leaves, or its own
    path = world.pipeline("first.yaml", {"config": "second.yaml", "from": "first"})
    assert surveyed(path).steps["second"].plan.stage.args["model_name_or_path"].endswith("o/first")
    path = world.pipeline("first.yaml", {"config": "second.yaml", "from": "none"})
    assert surveyed(path).steps["second"].plan.stage.args["model_name_or_path"] == "some/other"
    # said twice, and not the same
    entry = {"config": "second.yaml", "from": "first", "with": {"model_name_or_path": "a/b"}}
    path = world.pipeline("first.yaml", entry)
    line = 1 + path.read_text().splitlines().index("    model_name_or_path: a/b")
    assert refused(path)["pipeline-model"][:2] == ("p.yaml", line)
    # the output of the stage before, by whatever way to it
    world.stage("second", model_name_or_path="./o/../o/first")
    assert surveyed(world.pipeline("first.yaml", "second.yaml")).links


@needs_trl
def test_what_a_stage_cannot_begin_from(world: Chained) -> None:
    world.usual()
    world.stage("first", model_name_or_path="model", use_peft=True)
    assert "adapter" in refused(world.root / "p.yaml")["pipeline-adapter"][2]
    world.stage("first", model_name_or_path="model")
    world.stage("second", output_dir="o/third")
    assert "both write into" in refused(world.root / "p.yaml")["pipeline-output"][2]


@needs_trl
def test_one_tokenizer_for_all(world: Chained) -> None:
    world.usual()
    oi = (
        "stage: {kind}\nargs:\n  {model}\n  {data}: [chats.jsonl, '8']\n  output_dir: o/oi{kind}\n"
        "  do_not_randomize_output_dir: true\n  push_to_hub: false\n  try_launch_beaker_eval_jobs: false\n"
        "  {more}\n"
    )
    model = "model_name_or_path: model"
    world.write_chats()

    def files(sft: str, dpo: str) -> Path:
        told = {"kind": "sft", "model": model, "data": "dataset_mixer_list", "more": sft}
        (world.root / "a.yaml").write_text(oi.format(**told))
        told = {"kind": "dpo", "model": "", "data": "mixer_list", "more": dpo}
        (world.root / "b.yaml").write_text(oi.format(**told))
        return world.pipeline("a.yaml", "b.yaml")

    def said(path: Path) -> set[str]:
        return {f.code for f in surveyed(path).findings if f.code.startswith("pipeline-")}

    assert said(files("chat_template_name: tulu", "chat_template_name: tulu")) == set()
    # the saved tokenizer holds the template
    assert said(files("chat_template_name: tulu", "")) == set()
    assert said(files("chat_template_name: tulu", "chat_template_name: zephyr")) == {
        "pipeline-template"
    }
    bos = files("add_bos: true", "add_bos: true")
    assert "begins with the token" in refused(bos)["pipeline-template"][2]
    path = files("", "")
    path.write_text("stages: [first.yaml, a.yaml]\n")
    assert refused(path, probe=False, gpus=1).keys() >= {"pipeline-model", "pipeline-probe"}


@pytest.mark.parametrize(
    "name", ["demo/pipeline", "demo/pipeline_open_instruct", "tulu/pipeline_qwen7b",
             "tulu/pipeline_qwen7b_eval", "llama/pipeline_llama31_8b_10pct"]
)  # fmt: skip
def test_the_committed_pipelines_hold_together(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for below in ("model", "data/sft", "data/dpo"):
        (tmp_path / "build" / "demo" / below).mkdir(parents=True)
    rows = {"sft": {"messages": CHOSEN}, "dpo": {"chosen": CHOSEN, "rejected": REJECTED}}
    for kind, content in rows.items():
        path = tmp_path / "build" / "demo" / "data" / kind / "train.jsonl"
        path.write_text(f"{json.dumps(content)}\n")
    monkeypatch.chdir(tmp_path)
    path = REPOSITORY / "configs" / f"{name}.yaml"
    order = ordered(pipeline.load(path), gpus=0 if "demo" in name else 8)
    told = plan.plan_stages(order, Scope.PLAN)
    assert [f for f in told.findings if f.severity == "error"] == []
    assert [one.link.source for one in told.steps.values()] == [None, "sft"]


@needs_trl
def test_stages_run_in_turn_and_are_skipped_until_something_changes(
    world: Chained, capsys: pytest.CaptureFixture[str]
) -> None:
    world.usual()
    code, told = world.run()
    assert (code, statuses(told)) == (0, ["passed"] * 3), told
    assert world.trained() == ["first", "second", "third"]
    data = told["data"]
    folder = Path(data["pipeline"])
    assert folder.parent == world.runs and "-pipeline-p" in folder.name
    assert json.loads((folder / "pipeline.json").read_text()) == data
    assert data["state"] == "finished"
    page = (folder / "report.html").read_text()
    assert "<h1>pipeline p " in page and ">finished</span>" in page
    assert main.main(["report", folder.name]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert [Path(one["run"]).is_dir() for one in data["stages"]] == [True] * 3
    assert data["stages"][1]["model"] == data["stages"][0]["output"]
    # said again: nothing
    code, told = world.run()
    assert (code, statuses(told), world.trained()) == (0, ["skipped"] * 3, [])
    assert all(one["skipped"] for one in told["data"]["stages"])
    # touched, and copied back: the same content
    for path in (world.root / "o" / "first").iterdir():
        os.utime(path, (1, 1))
    os.utime(world.root / "data" / "train.jsonl")
    assert statuses(world.run()[1]) == ["skipped"] * 3
    # the second one is asked for otherwise: that one, and what was made of it
    before = world.weights("third")
    code, told = world.run("second.learning_rate=0.25")
    assert (code, statuses(told)) == (0, ["skipped", "passed", "passed"]), told
    assert world.trained() == ["second-2", "third-2"]
    assert world.weights("third") == before != world.weights("third-2")
    assert told["data"]["stages"][2]["model"] == str(world.root / "o" / "second-2")
    assert "learning_rate" in told["data"]["stages"][1]["reason"]
    # and that stands
    code, told = world.run("second.learning_rate=0.25")
    assert (statuses(told), world.trained()) == (["skipped"] * 3, [])
    # a first stage that was trained again, with other weights, under the same name
    (world.root / "o" / "first" / "weights.bin").write_bytes(b"other")
    code, told = world.run("second.learning_rate=0.25")
    assert statuses(told) == ["skipped", "passed", "passed"]
    assert world.trained() == ["second-3", "third-3"]
    assert "model" in told["data"]["stages"][1]["reason"]
    assert world.quiet()


@needs_trl
def test_a_model_that_no_known_run_has_made_is_not_written_over(world: Chained) -> None:
    world.usual()
    assert world.run()[0] == 0
    shutil.rmtree(world.runs)
    world.trained()
    before = world.weights("first")
    code, told = world.run()
    assert (code, statuses(told)) == (0, ["passed", "passed", "passed"])
    assert world.trained() == ["first-2", "second-2", "third-2"]
    assert "no run is known" in told["data"]["stages"][0]["reason"]
    assert world.weights("first") == before
    # from now on one is
    assert statuses(world.run("--strict")[1]) == ["skipped", "skipped", "skipped"]


@needs_trl
def test_it_stops_at_a_failure_and_goes_on_from_there(world: Chained) -> None:
    world.usual()
    world.do(second=["raise=no such thing"])
    done = world.launch(*world.words())
    assert done.returncode == 4
    assert "stopped at second: " in done.stdout and "no such thing" in done.stdout
    assert "the same command continues with second" in done.stdout
    assert world.trained() == ["first", "second"]
    (record,) = world.runs.glob("*-pipeline-*/pipeline.json")
    told = json.loads(record.read_text())
    assert (told["state"], [one["status"] for one in told["stages"]]) == (
        "stopped", ["passed", "failed", "pending"],
    )  # fmt: skip
    world.do()
    code, told = world.run()
    assert (code, statuses(told)) == (0, ["skipped", "passed", "passed"])
    assert world.trained() == ["second", "third"]
    # the same saying went on: one record
    assert told["data"]["pipeline"] == str(record.parent)


@needs_trl
def test_what_was_begun_goes_on_unless_it_would_become_something_else(world: Chained) -> None:
    world.usual()
    world.stage("second", save_steps=2, save_strategy="steps")
    world.do(second=["raise=the lights went out"])
    assert world.run()[0] == 4
    saved.trl(world.root / "o" / "second", 2)
    world.do()
    world.trained()
    argv = world.root / "argv.second"
    code, told = world.run("--until", "second")
    assert (code, world.trained()) == (0, ["second"])
    assert "checkpoint-2" in argv.read_text()
    # half trained on other data: that is left as it is, and begun again beside
    shutil.rmtree(world.root / "o" / "second")
    saved.trl(world.root / "o" / "second", 2)
    (world.root / "data" / "train.jsonl").write_text(row("b"))
    code, told = world.run("--from", "second", "--until", "second")
    assert (code, world.trained()) == (0, ["second-2"]), told
    assert "data" in told["data"]["stages"][0]["reason"]
    assert "checkpoint-2" not in (world.root / "argv.second-2").read_text()
    assert (world.root / "o" / "second" / "checkpoint-2").is_dir()


@needs_trl
def test_a_stage_that_was_refused_has_no_run_and_no_report(world: Chained) -> None:
    world.usual()
    lease.acquire(world.root / "o" / "first", world.root / "by the test")
    done = world.launch(*world.words())
    assert done.returncode == 5 and "run-is-live" in done.stderr
    assert "\nreport: " not in done.stdout and "first: refused" in done.stdout
    (record,) = world.runs.glob("*-pipeline-*/pipeline.json")
    first = json.loads(record.read_text())["stages"][0]
    assert (first["status"], first["run"]) == ("refused", None)


@needs_trl
def test_a_verdict_that_failed_is_not_passed_over_by_saying_it_again(world: Chained) -> None:
    world.usual()
    world.stage("second")
    path = world.root / "second.yaml"
    whole = yaml.safe_load(path.read_text())
    more = {"expect": {**EXPECT, "packing": "isolated"}, "on_violation": "warn"}
    path.write_text(yaml.safe_dump({**whole, **more}))
    for trained in (["first", "second"], []):
        code, told = world.run()
        assert (code, statuses(told)[1:]) == (1, ["failed", "pending"])
        assert "packing" in told["data"]["stages"][1]["reason"]
        assert world.trained() == trained
    # what is expected is not what it depends on
    path.write_text(yaml.safe_dump(whole))
    code, told = world.run()
    assert (code, statuses(told)) == (0, ["skipped", "skipped", "passed"])


@needs_trl
def test_from_and_until(world: Chained) -> None:
    world.usual()
    code, told = world.run("--from", "last")
    assert code == 5 and "the model of second" in codes(told)["pipeline-needs"]
    code, told = world.run("--until", "second")
    assert (code, world.trained()) == (0, ["first", "second"])
    assert [one["name"] for one in told["data"]["stages"]] == ["first", "second"]
    # a broken file of a stage that is not asked for is none of its business
    (world.root / "first.yaml").write_text("stage: sft\nnonsense: [\n")
    code, told = world.run("--from", "last")
    assert (code, statuses(told), world.trained()) == (0, ["passed"], ["third"])
    code, told = world.run("--from", "last", "--fresh")
    assert (code, statuses(told), world.trained()) == (0, ["passed"], ["third-2"])
    assert world.run("--from", "last", "--until", "first")[0] == 2
    assert world.run("--from", "lst")[0] == 2
    # as of a variable that is not set
    assert world.run("--from", "")[0] == 2


@needs_trl
def test_ctrl_c_stops_the_stage_and_the_pipeline(world: Chained) -> None:
    world.usual()
    world.do(second=["pid=leader", "sleep=600"])
    running = world.started(*world.words("--format", "json"), start_new_session=True)
    world.pid("leader")
    # of the stage that is over, and of this one
    until(lambda: sum(one.process.exists() for one in rundir.newest_first(world.runs)) == 2)
    os.kill(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, err
    told = json.loads(out)
    assert (told["data"]["state"], statuses(told)) == (
        "interrupted", ["passed", "interrupted", "pending"],
    )  # fmt: skip
    assert world.quiet()


@needs_trl
def test_a_stage_that_outlived_its_pipeline_is_waited_for(world: Chained) -> None:
    world.usual()
    go = world.root / "go"
    world.do(second=["pid=leader", f"wait={go}"])
    running = world.started(*world.words(), start_new_session=True)
    world.pid("leader")
    again = world.launch(*world.words())
    assert again.returncode == 5 and "running already" in again.stderr
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    second = world.started(*world.words(), bufsize=0)
    assert second.stdout is not None
    until(lambda: b"second is being trained" in second.stdout.readline())  # type: ignore[union-attr]
    go.write_text("")
    _, err = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, err
    (record,) = world.runs.glob("*-pipeline-*/pipeline.json")
    told = json.loads(record.read_text())
    assert [one["status"] for one in told["stages"]] == ["skipped", "passed", "passed"]
    assert world.trained() == ["first", "second", "third"]
    assert world.quiet()


TELL = """#!/bin/sh
echo "$LAUNCH_FINISHED $LAUNCH_FINISHED_CODE $LAUNCH_FINISHED_STATUS" >>"$FAKE_WORLD/finished"
"""


@needs_trl
def test_it_goes_on_without_the_terminal(world: Chained) -> None:
    world.usual()
    folder = world.root / "bin"
    folder.mkdir()
    for name, text in {"tell": TELL, "tmux": "#!/bin/sh\nexit 1\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    world.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    code, told = world.run("--detach", "--on-finish", "tell")
    finished, log = world.root / "finished", Path(told["data"]["log"])
    assert code == 0 and told["data"]["session"] is None
    until(finished.exists)
    assert "pipeline: " in log.read_text() and world.trained() == ["first", "second", "third"]
    until(finished.read_text)
    assert finished.read_text() == "pipeline 0 pass\n"
    # what is wrong is said before it goes away
    world.stage("first", model_name_or_path="model", no_such=1)
    code, told = world.run("--detach", "--on-finish", "tell")
    assert code == 3 and "unknown-key" in codes(told)
    assert world.run("--detach", "--slurm")[0] == world.run("--on-finish-limit", "1m")[0] == 2
    assert finished.read_text() == "pipeline 0 pass\n"


@needs_trl
def test_a_dry_run_says_what_would_be_started(world: Chained) -> None:
    world.usual()
    done = world.launch(*world.words("--dry-run"))
    assert done.returncode == 0 and not world.runs.exists()
    commands = [line for line in done.stdout.splitlines() if "accelerate.commands.launch" in line]
    assert len(commands) == 3 and f"--model_name_or_path {world.root}/o/second" in commands[2]
    code, told = world.run("--dry-run")
    assert code == 0
    assert [one["name"] for one in told["data"]["stages"]] == ["first", "second", "last"]
    assert all("argv" in one for one in told["data"]["stages"])
    # once they have run, what is printed would write over that
    assert world.run()[0] == 0
    _, told = world.run("--dry-run")
    earlier = [f for f in told["findings"] if f["code"] == "earlier-run"]
    assert len(earlier) == 3
    # beside it, nothing
    _, told = world.run("--dry-run", "--fresh", "--from", "second")
    assert not any(f["code"] == "earlier-run" for f in told["findings"])
    assert "--output_dir o/second-2" in " ".join(told["data"]["stages"][0]["argv"])


@needs_trl
def test_what_a_later_stage_needs_of_this_machine_is_missing_before_the_first(
    world: Chained,
) -> None:
    world.usual()
    world.stage("third", "dpo", dataset_name="gone/a/b")
    code, told = world.run()
    assert code in (3, 5) and "gone/a/b" in json.dumps(told["findings"])
    assert world.trained() == []


@needs_trl
def test_a_stage_is_checked_once_and_once_more_when_its_model_is_there(
    world: Chained, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.usual()
    loads = counted(monkeypatch)
    assert main.main([*world.words("--dry-run")]) == 0
    assert loads.files and set(loads.files.values()) == {1} and not loads.repeated
    for _ in ("trained", "skipped"):
        loads = counted(monkeypatch)
        assert main.main([*world.words()]) == 0
        assert set(loads.files.values()) == {1} and "planned" not in loads.repeated
        # when the pipeline begins, and when the stage's turn comes
        assert max(loads.judged.values()) <= 2
