"""The report as HTML and as JSON: what it contains, and that nothing in a run can break it."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import DATA
from made_runs import console, loss, manifest, write_run
from page_tree import Element, Page, rows

from launcher.lifecycle import conclude
from launcher.redaction import REDACTED
from launcher.report import page, series
from launcher.report.series import Run
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder
from launcher.verdict.evidence import Evidence

NASTY = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!-- ünï 日本 "
    "\u202e\x1b[31m\x00"
)
# no record holds a NUL
READ = NASTY.replace("\0", "\N{REPLACEMENT CHARACTER}")
SEEN = READ.replace("\u202e\x1b", "\\x202e\\x1b")
TOKEN = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEF"
ALL_STEPS = list(range(1, 41))
EVERY_FIFTH_STEP = list(range(5, 41, 5))
TRACE = 'Traceback (most recent call last):\n  File "/a/train.py", line 7, in <module>\n'


def load(*paths: Path) -> list[Run]:
    return series.load_runs([str(path) for path in paths])


def show(*runs: Run) -> Page:
    return Page(page.render(list(runs)))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A finished DPO run of 40 steps."""
    return RunFolder(write_run(tmp_path / "20260102T030405Z-dpo-tulu"))


@pytest.fixture
def run(folder: RunFolder) -> Run:
    return series.load_run(folder.path)


@pytest.fixture
def shown(run: Run) -> Page:
    return show(run)


def load_ended(path: Path, log: str, **end: int) -> Run:
    """A run that ended after step 20; `end` is how, as its record says it."""
    folder = RunFolder(write_run(path, steps=20, extra=log))
    record = {**rundir.read_json(folder.exit(1)), **end}
    folder.exit(1).write_text(json.dumps(record))
    return series.load_run(path)


# The page


def hash_of(element: Element) -> str:
    digest = hashlib.sha256(element.text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def test_the_page_is_one_file_that_loads_nothing(shown: Page) -> None:
    assert shown.text.startswith("<!doctype html>")
    assert not shown.tree.all("link", "img", "iframe", "object", "embed", "base", "video")
    for element in shown.tree.all("a", "script", "form", "button", "input"):
        assert not {"src", "action", "formaction"} & set(element.attributes)
        assert element.attributes.get("href", "#").startswith("#")


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone(shown: Page) -> None:
    meta = shown.tree.one("meta", **{"http-equiv": "Content-Security-Policy"})
    policy = dict(part.strip().split(" ", 1) for part in meta.attributes["content"].split(";"))
    for directive in ("default-src", "base-uri", "form-action"):
        assert policy[directive] == "'none'"
    scripts = [script for script in shown.tree.all("script") if "type" not in script.attributes]
    assert [policy["script-src"]] == [hash_of(script) for script in scripts]
    style = shown.tree.one("style")
    assert policy["style-src"] == hash_of(style)
    assert "@import" not in style.text
    assert "url(" not in style.text
    # what it forbids would silently do nothing
    markup = re.sub(r"(?s)<script>.*</script>", "", shown.text)
    assert not re.search(r"<[^>]*\s(style|on\w+)=", markup)


def test_the_verdict_stands_with_its_evidence(shown: Page, run: Run) -> None:
    assert run.verdict["status"] == "pass"
    assert "pass" in shown.heading
    assert not shown.banners
    assert shown.row("verdict", "finish")[:3] == ["completed", "completed", "✓ ok"]
    summary = "losses: 40 recorded by the probe, 8 logged; all finite"
    assert shown.row("verdict", "loss")[3].startswith(summary)

    evidence = {point["name"]: point["evidence"] for point in run.verdict["points"]}
    for name in ("loss", "finish", "attention"):
        cell = shown.row("verdict", name)[3]
        for cite in evidence[name]:
            assert f"{Path(cite['file']).name}:{cite['line']}" in cell
            assert " ".join(cite["text"].split()) in cell


def test_the_lines_of_the_evidence_are_folded(shown: Page) -> None:
    folded = shown.tree.all("details", **{"class": "evidence"})
    assert folded
    outside = shown.section("verdict").text
    for details in folded:
        assert "open" not in details.attributes
        outside = outside.replace(details.text, "")
    assert '{"event"' not in outside


def test_a_failed_run_begins_with_its_cause_and_the_end_of_its_log(tmp_path: Path) -> None:
    error = "ValueError: row 7 has no messages"
    log = f"{TRACE}    main()\n{error}\n"
    shown = show(load_ended(tmp_path / "run", log, returncode=1))
    text = shown.text
    (banner,) = shown.banners

    assert "fail" in banner.attributes["class"]
    cause = banner.all("p")[0].text
    assert error in cause
    assert "train.py:7" in cause
    assert "What to do: " in banner.text
    assert re.search(rf"console\.log:\d+{error}", banner.text)
    tail = banner.one("pre").text.splitlines()
    assert tail[-1] == error
    assert len(tail) <= 20
    assert text.index(error) < text.index('id="verdict"') < text.index('id="curves"')


def test_a_stopped_run_is_not_red(tmp_path: Path) -> None:
    shown = show(load_ended(tmp_path / "run", "", returncode=-15, signal=15, stopped=15))
    assert shown.heading.endswith("stopped")
    (banner,) = shown.banners
    assert banner.attributes["class"] == "banner stopped"
    assert "SIGTERM" in banner.text
    assert shown.row("verdict", "finish")[2] == "■ stopped"


def test_the_command_stands_above_what_it_started(tmp_path: Path) -> None:
    record = manifest(launch_argv=["launch", "dpo", "configs/a.yaml", "learning_rate=5e-7"])
    log = "wandb: View run it at: https://wandb.ai/a/b/runs/c\n"
    shown = show(*load(write_run(tmp_path / "run", record=record, extra=log)))
    assert shown.tree.all("a", href="https://wandb.ai/a/b/runs/c")
    versions = shown.section("versions")
    command, started = versions.all("pre")
    assert command.text == "launch dpo configs/a.yaml learning_rate=5e-7"
    assert "accelerate" in started.text
    assert "accelerate" in versions.one("details").text


@pytest.mark.parametrize(
    ("section", "row", "cells"),
    [
        # 256 sequences are 128 pairs
        ("plan", "batch, rows a step", ["128", "128", "100%"]),
        ("plan", "steps", ["40", "40", "100%"]),
        ("plan", "tokens/s, steady", ["–", "6,000", ""]),
        ("plan", "peak memory allocated, GiB", ["–", "61.25", ""]),
        ("plan", "processes", ["1", "1", "100%"]),
        ("plan", "wasted positions", ["–", "25 %", ""]),
        ("plan", "time", ["–", "1:30:00", ""]),
        ("arguments", "learning_rate", ["5e-07", "override: learning_rate=5e-7"]),
        ("arguments", "dataset_mixer_list", ['["a/b", 0.25]', "configs/a.yaml:14"]),
        ("arguments", "gradient_accumulation_steps", ["4", "derived: batch of 128"]),
        ("versions", "source", ["trl 1.16.0"]),
        ("versions", "launch", ["c0ffee"]),
        ("versions", "GPUs", ["H200, 143771 MiB"]),
    ],
)
def test_the_tables_of_plan_arguments_and_versions(
    shown: Page, section: str, row: str, cells: list[str]
) -> None:
    assert shown.row(section, row) == cells


def test_defaults_are_folded(shown: Page) -> None:
    folded = shown.section("arguments").one("details")
    assert "open" not in folded.attributes
    _, limit, hub_name = rows(folded)
    assert limit[0] == "max_grad_norm"
    assert hub_name[:2] == ["hub_model_id", "null"]


def test_findings_and_the_command_to_copy(shown: Page) -> None:
    (row,) = rows(shown.section("findings"))[1:]
    assert row[:2] == ["warning[conditional-key]", "configs/a.yaml:9"]
    assert "leave it out" in row[2]
    command = shown.section("versions").one("pre").text
    assert command == """python -m accelerate --run_name 'it'"'"'s'"""


# Curves


def measured(steps: Iterable[int], values: Iterable[float | None]) -> dict[int, float]:
    """The values of a curve without its gaps, by their steps."""
    points = zip(steps, values, strict=True)
    return {step: value for step, value in points if value is not None}


def test_the_curves_are_those_of_the_run(shown: Page) -> None:
    (run,) = shown.curves["runs"]
    assert run["steps"] == ALL_STEPS
    losses = [loss(step) for step in ALL_STEPS]
    assert run["columns"]["loss"] == pytest.approx(losses, rel=1e-6)


def test_what_is_logged_at_every_fifth_step_has_gaps(shown: Page) -> None:
    (run,) = shown.curves["runs"]
    assert list(measured(ALL_STEPS, run["columns"]["learning_rate"])) == EVERY_FIFTH_STEP


def test_curves_have_an_order_and_titles(shown: Page) -> None:
    unfolded = [key for key, panel in shown.panels.items() if not panel["folded"]]
    expected = "loss learning_rate tokens memory rewards margin accuracy grad_norm wasted"
    assert unfolded == expected.split()
    titles = {heading.text for heading in shown.section("curves").all("h3")}
    assert {"loss", "learning rate", "tokens/s", "reward margin", "logps/chosen"} <= titles
    # a loss alone needs no name
    (line,) = shown.panels["loss"]["lines"]
    assert line["label"] == ""


def test_the_validation_loss_is_drawn_beside_the_loss(folder: RunFolder) -> None:
    with (folder.probe / "rank-0.jsonl").open("a") as file:
        for step in (20, 40):
            metrics = {"eval_loss": step / 100, "eval_runtime": 3.0}
            event = {"event": "evaluation", "step": step, "metrics": metrics}
            file.write(json.dumps(event) + "\n")
    shown = show(*load(folder.path))

    training, validation = shown.panels["loss"]["lines"]
    assert training["label"] == "training"
    assert validation["label"] == "validation"
    (run,) = shown.curves["runs"]
    assert measured(run["steps"], run["columns"]["eval_loss"]) == {20: 0.2, 40: 0.4}
    assert "eval_runtime" not in run["columns"]


def test_a_validation_loss_that_was_not_finite_leaves_a_gap(folder: RunFolder) -> None:
    with (folder.probe / "rank-0.jsonl").open("a") as file:
        for step, loss in ((20, math.nan), (30, math.inf), (40, 0.4)):
            event = {"event": "evaluation", "step": step, "metrics": {"eval_loss": loss}}
            file.write(json.dumps(event) + "\n")
    columns = show(*load(folder.path)).curves["runs"][0]["columns"]
    assert columns["eval_loss"] == [None] * 39 + [0.4]


def test_the_validation_loss_of_a_log_alone() -> None:
    run = series.load_run(DATA.parent / "corpus" / "trl_sft_eval.log")
    losses = run.series.columns["eval_loss"]
    assert measured(run.series.steps, losses) == {4: 6.099, 8: 5.668, 12: 5.597}


def test_steps_that_were_not_finite_are_marked(tmp_path: Path) -> None:
    shown = show(*load(write_run(tmp_path / "run", bad=(17, 20))))
    (run,) = shown.curves["runs"]
    assert run["nonfinite"] == [17, 20]
    assert run["columns"]["loss"][16] is None
    assert "NaN" not in shown.tree.one("script", id="curves-data").text


# Several runs


def test_stages_share_no_axis(tmp_path: Path) -> None:
    sft = write_run(tmp_path / "sft", record=manifest(name="a", stage="sft"), steps=20)
    dpo = write_run(tmp_path / "dpo", record=manifest(name="b"))
    shown = show(*load(sft, dpo))
    losses = [panel for key, panel in shown.panels.items() if key.startswith("loss")]
    assert [panel["runs"] for panel in losses] == [[0], [1]]
    headings = shown.section("curves").all("h3", **{"class": "stage"})
    assert [heading.text for heading in headings] == ["SFT", "DPO"]


def test_several_runs_share_the_charts_and_can_be_switched(tmp_path: Path) -> None:
    first = write_run(tmp_path / "one")
    second = write_run(tmp_path / "two", record=manifest(name="other"))
    shown = show(*load(first, second))
    assert [run["name"] for run in shown.curves["runs"]] == ["dpo tulu", "dpo other"]
    boxes = shown.tree.all("input", type="checkbox")
    assert [box.attributes["data-run"] for box in boxes] == ["0", "1"]
    labels = shown.tree.one("fieldset").all("label")
    assert [label.words for label in labels] == ["1dpo tulu", "2dpo other"]


def test_the_tables_of_several_runs_show_how_they_differ(tmp_path: Path) -> None:
    first = write_run(tmp_path / "one")
    record = manifest(name="other")
    record["args"]["learning_rate"] = {"value": 1e-6, "origin": "configs/b.yaml:3"}
    second = write_run(tmp_path / "two", record=record, steps=60)
    shown = show(*load(first, second))
    arguments = shown.section("arguments").all("table")[0]
    assert rows(arguments)[1:] == [["learning_rate", "1 5e-072 1e-06"]]
    steps = [row[2] for row in rows(shown.section("plan"))]
    assert steps == ["steps", "40", "60plan 40"]


def test_figures_of_several_runs_show_the_difference_from_the_first(tmp_path: Path) -> None:
    first = write_run(tmp_path / "one")
    slower = write_run(tmp_path / "two", scale=2)
    shown = show(*load(first, slower))
    overview = shown.tree.one("table", **{"class": "overview"})
    columns = {head: cells for head, *cells in zip(*rows(overview), strict=True)}
    assert columns["tokens/s"] == ["6,000", "3,000−50.0%"]
    assert columns["steps"] == ["40", "40"]


# Samples


PROMPT = {
    "messages": [{"role": "user", "content": "What is <b>a list</b>?"}],
    "expected": "A sequence.",
    "before": {"text": "no idea", "tokens": 256, "ended": "length"},
    "after": {"text": "Something ordered.", "tokens": 4, "ended": "stop"},
}
SAMPLES = {
    "version": 1,
    "from": "the split test, which was not trained on",
    "base": {"name": "local/7b"},
    "max_new_tokens": 256,
    "failed": None,
    "prompts": [PROMPT],
}


def test_answers_before_and_after_stand_beside_each_other(folder: RunFolder) -> None:
    folder.samples.write_text(json.dumps(SAMPLES))
    (run,) = load(folder.path)
    samples = show(run).section("samples")
    texts = [pre.text for pre in samples.all("pre")]
    assert texts == ["What is <b>a list</b>?", "no idea", "Something ordered.", "A sequence."]
    headings = [heading.text for heading in samples.all("h4")]
    assert headings == ["before (cut off)", "after", "in the data set"]
    assert "local/7b" in samples.text
    assert "not trained on" in samples.text
    assert run.as_json()["samples"] == SAMPLES


@pytest.mark.parametrize(
    "record",
    [
        "[]",
        '{"prompts": 3}',
        '{"prompts": [null, {"messages": "x", "before": 1, "after": []}]}',
        '{"base": 1}',
    ],
)
def test_a_damaged_record_of_samples_breaks_no_page(folder: RunFolder, record: str) -> None:
    folder.samples.write_text(record)
    assert show(*load(folder.path)).heading


# What a page is made of


def test_a_log_alone_is_enough(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(console(1, 40))
    (run,) = load(log)
    assert run.stage == "dpo"
    shown = show(run)
    assert shown.curves["runs"][0]["steps"] == EVERY_FIFTH_STEP
    assert "train.log:17" in shown.row("verdict", "finish")[3]


def test_logs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    logs = [tmp_path / "a" / "train.log", tmp_path / "b" / "train.log"]
    for log in logs:
        log.parent.mkdir()
        log.write_text(console(1, 40))
    names = [run.name for run in load(*logs, logs[0])]
    assert names == ["a/train.log", "b/train.log", "a/train.log (3)"]


def test_a_run_from_its_results_alone(tmp_path: Path, run: Run) -> None:
    (tmp_path / "verdict.json").write_text(json.dumps(run.verdict))
    lines = [
        '{"step": 2, "finite": false}',
        '{"step": 1, "finite": true, "loss": 2.5}',
        '{"step": 3, "finite": true, "loss": 2.25, "nonsense": "text"}',
        '{"step": 4, "lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (again,) = load(tmp_path)
    assert again.verdict == run.verdict
    assert again.series.steps == (1, 2, 3)
    assert again.series.columns == {"loss": (2.5, None, 2.25)}
    assert again.series.nonfinite == (2,)


def test_the_json_form_has_the_same_content(run: Run) -> None:
    report = json.loads(json.dumps(series.as_json([run]), allow_nan=False))
    assert report["report_version"] == 1
    (content,) = report["runs"]
    assert content["run"] == run.name
    assert content["verdict"]["status"] == run.verdict["status"]
    assert content["plan"]["global"] == 128
    assert content["measured"]["tokens_per_second"] == 6000
    assert content["args"]["learning_rate"]["origin"].startswith("override")
    assert len(content["series"]["steps"]) == 40
    for values in content["series"]["columns"].values():
        assert len(values) == 40


def test_the_page_of_a_judged_run_is_written(folder: RunFolder) -> None:
    verdict = conclude.finish(folder)
    assert page.choose_path(load(folder.path)) == folder.report
    (run,) = Page(folder.report.read_text()).curves["runs"]
    assert run["steps"] == ALL_STEPS

    # without the evidence it is the page without curves, and without a way there
    content = rundir.read_json(folder.manifest)
    shown = show(series.run_from_records(folder.path, content, verdict.as_json(), [], Evidence()))
    assert not shown.tree.all("h2", id="curves")
    assert not shown.tree.all("a", href="#curves")
    assert shown.row("verdict", "finish")[0] == "completed"


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    content = manifest(name=NASTY)
    content["args"][NASTY] = {"value": NASTY, "origin": NASTY}
    names = ("severity", "code", "message", "help", "file")
    content["findings"].append(dict.fromkeys(names, NASTY))
    content["argv"].append(NASTY)
    content["machine"]["host"] = NASTY
    content["trainer"]["packages"][NASTY] = NASTY
    line = "{'loss': '0.5', 'a</script><script>alert(3)</script>': '1.5'}\n"
    log = f"{line}{TRACE}ValueError: {NASTY[:90]}\n"
    (run,) = load(write_run(tmp_path / "run", record=content, extra=log))

    shown = show(run)
    text = shown.text
    assert not shown.tree.all("img")
    # the script of the page, and its data
    assert len(shown.tree.all("script")) == 2
    assert len(re.findall(r"(?i)<script", text)) == 2
    assert SEEN in shown.heading
    for key in ("arguments", "findings", "versions"):
        assert SEEN in shown.section(key).text
    assert not re.search("[\x00-\x08\x0e-\x1f\u202e]", text)
    assert shown.curves["runs"][0]["name"].endswith(READ)


def test_no_token_gets_into_a_report(tmp_path: Path) -> None:
    content = manifest()
    content["args"]["hub_token"] = {"value": "plain", "origin": "configs/a.yaml:3"}
    content["args"]["exp_name"] = {"value": TOKEN, "origin": "configs/a.yaml:4"}
    path = write_run(
        tmp_path / "run", record=content, extra=f"{TRACE}ValueError: bad token {TOKEN}\n"
    )
    runs = load(path, path / "console.log")

    shown = show(*runs)
    for text in (shown.text, shown.tree.text, json.dumps(series.as_json(runs))):
        assert TOKEN not in text
    assert REDACTED in shown.tree.text
    assert show(runs[0]).row("arguments", "hub_token")[0] == REDACTED
