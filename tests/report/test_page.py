"""The report as HTML and as JSON: what stands in it, and that nothing in a run can break it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA
from made_runs import console, loss, made, manifest

from launcher.lifecycle import conclude
from launcher.redaction import REDACTED
from launcher.report import page, series
from launcher.report.series import Run
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

VOID = {"meta", "br", "input", "img", "link", "hr"}
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!-- ünï 日本 \u202e\x1b[31m\x00"
# no record holds a NUL
READ = NASTY.replace("\0", "\N{REPLACEMENT CHARACTER}")
SEEN = READ.replace("\u202e\x1b", "\\x202e\\x1b")


@dataclass
class Element:
    """One element, its text with that of all below it."""

    name: str
    attributes: Mapping[str, str]
    text: str = ""
    below: list[Element] = field(default_factory=list)

    def all(self, name: str) -> Iterator[Element]:
        """Every element of this name, in the order of the page."""
        for one in self.below:
            if one.name == name:
                yield one
            yield from one.all(name)


class Tree(HTMLParser):
    """A page as a tree; raises AssertionError where a tag is left open or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("", {})]
        self.feed(text)
        self.close()
        assert [e.name for e in self.open] == [""], "a tag was left open"
        self.top = self.open[0]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = Element(tag, {name: value or "" for name, value in attrs})
        assert len(found.attributes) == len(attrs), f"an attribute of {tag} is there twice"
        self.open[-1].below.append(found)
        if tag not in VOID:
            self.open.append(found)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag

    def handle_data(self, data: str) -> None:
        for one in self.open:
            one.text += data


def parsed(text: str) -> Element:
    return Tree(text).top


def section(tree: Element, key: str) -> Element:
    """The section whose heading has this id."""
    for found in tree.all("section"):
        if any(h.attributes.get("id") == key for h in found.all("h2")):
            return found
    raise AssertionError(f"there is no section {key}")


def rows(found: Element) -> list[list[str]]:
    """The tables of a section as text."""
    return [
        [" ".join(cell.text.split()) for cell in row.below if cell.name in ("td", "th")]
        for row in found.all("tr")
    ]


def row_of(found: Element, first: str) -> list[str]:
    (row,) = (row for row in rows(found) if row[0] == first)
    return row


def curves(tree: Element) -> Any:
    (data,) = (
        script for script in tree.all("script") if script.attributes.get("id") == "curves-data"
    )
    return json.loads(data.text)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return series.load_run(made(tmp_path / "20260102T030405Z-dpo-tulu"))


@pytest.fixture
def tree(run: Run) -> Element:
    return parsed(page.render([run]))


def test_the_page_is_one_file_that_loads_nothing(run: Run) -> None:
    text = page.render([run])
    tree = parsed(text)
    assert text.startswith("<!doctype html>")
    for name in ("link", "img", "iframe", "object", "embed", "base", "video"):
        assert not list(tree.all(name))
    for one in (e for name in ("a", "script", "form", "button", "input") for e in tree.all(name)):
        assert not {"src", "action", "formaction"} & set(one.attributes)
        assert one.attributes.get("href", "#").startswith("#")
    # its policy allows this style and this script and nothing else
    metas = (m.attributes for m in tree.all("meta"))
    (policy,) = (m["content"] for m in metas if m.get("http-equiv") == "Content-Security-Policy")
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == allowed["base-uri"] == allowed["form-action"] == "'none'"
    (script,) = (s for s in tree.all("script") if "type" not in s.attributes)
    (style,) = tree.all("style")
    assert "@import" not in style.text and "url(" not in style.text
    for source, one in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(one.text.encode()).digest()).decode()
        assert allowed[source] == f"'sha256-{digest}'"
    # what such a policy forbids must not be there: it would silently do nothing
    assert not re.search(r"<[^>]*\s(style|on\w+)=", re.sub(r"(?s)<script>.*</script>", "", text))


def test_the_verdict_stands_with_its_evidence(tree: Element, run: Run) -> None:
    (heading,) = tree.all("h1")
    assert run.verdict["status"] == "pass" and "pass" in heading.text and not banners(tree)
    finish = row_of(section(tree, "verdict"), "finish")
    assert finish[1:4] == ["completed", "completed", "✓ ok"]
    told = {p["name"]: p for p in run.verdict["points"]}
    for name in ("loss", "finish", "attention"):
        cell = row_of(section(tree, "verdict"), name)[4]
        for cite in told[name]["evidence"]:
            assert f"{Path(cite['file']).name}:{cite['line']}" in cell
            assert " ".join(cite["text"].split()) in cell
    said = row_of(section(tree, "verdict"), "loss")[4]
    assert said.startswith("losses: 40 recorded by the probe, 8 logged; all finite")
    folded = [d for d in tree.all("details") if d.attributes.get("class") == "evidence"]
    assert folded and not any("open" in d.attributes for d in folded)
    outside = section(tree, "verdict").text
    for one in folded:
        outside = outside.replace(one.text, "")
    assert '{"event"' not in outside and "{'loss'" not in outside


def broken(tmp_path: Path, error: str, **ended: int) -> Run:
    """A run that ended after step 20."""
    trace = 'Traceback (most recent call last):\n  File "/a/train.py", line 7, in <module>\n    main()\n'
    path = made(tmp_path / "run", steps=20, extra=f"{trace}{error}\n" if error else "")
    over = json.loads((path / "exit.json").read_text())
    (path / "exit.json").write_text(json.dumps({**over, **ended}))
    return series.load_run(path)


def banners(tree: Element) -> list[Element]:
    return [s for s in tree.all("section") if "banner" in s.attributes.get("class", "")]


def test_a_failed_run_begins_with_its_cause_and_the_end_of_its_log(tmp_path: Path) -> None:
    text = page.render([broken(tmp_path, "ValueError: row 7 has no messages", returncode=1)])
    (banner,) = banners(parsed(text))
    assert "fail" in banner.attributes["class"]
    first = next(banner.all("p")).text
    assert "ValueError: row 7 has no messages" in first and "train.py:7" in first
    assert "What to do: " in banner.text
    assert re.search(r"console\.log:\d+ValueError: row 7 has no messages", banner.text)
    (tail,) = banner.all("pre")
    assert tail.text.splitlines()[-1] == "ValueError: row 7 has no messages"
    # progress bars and all: no more of it than can be read
    assert len(tail.text.splitlines()) <= 20
    assert (
        text.index("row 7 has no messages") < text.index('id="verdict"') < text.index('id="curves"')
    )


def test_a_run_that_was_stopped_is_not_red(tmp_path: Path) -> None:
    run = broken(tmp_path, "", returncode=-15, signal=15, stopped=15)
    tree = parsed(page.render([run]))
    assert run.verdict["status"] == "fail"
    (heading,) = tree.all("h1")
    assert heading.text.endswith("stopped")
    (banner,) = banners(tree)
    assert banner.attributes["class"] == "banner stopped"
    assert "SIGTERM" in banner.text
    assert row_of(section(tree, "verdict"), "finish")[3] == "■ stopped"


def test_stages_share_no_axis(tmp_path: Path) -> None:
    sft = made(tmp_path / "sft", told=manifest(name="a", stage="sft"), steps=20)
    dpo = made(tmp_path / "dpo", told=manifest(name="b"))
    tree = parsed(page.render(series.load_runs([str(sft), str(dpo)])))
    losses = [p for p in curves(tree)["panels"] if p["key"].startswith("loss")]
    assert [p["runs"] for p in losses] == [[0], [1]]
    heads = section(tree, "curves").all("h3")
    assert [h.text for h in heads if h.attributes.get("class")] == ["SFT", "DPO"]


def test_what_was_typed_stands_above_what_it_started(tmp_path: Path) -> None:
    typed = ["launch", "dpo", "configs/a.yaml", "learning_rate=5e-7"]
    tracker = "wandb: View run it at: https://wandb.ai/a/b/runs/c\n"
    run = series.load_run(made(tmp_path / "run", told=manifest(launch_argv=typed), extra=tracker))
    tree = parsed(page.render([run]))
    assert "https://wandb.ai/a/b/runs/c" in {a.attributes["href"] for a in tree.all("a")}
    found = section(tree, "versions")
    first, second = found.all("pre")
    assert first.text == "launch dpo configs/a.yaml learning_rate=5e-7"
    assert "accelerate" in second.text
    (folded,) = found.all("details")
    assert "accelerate" in folded.text


def test_plan_arguments_findings_and_versions(tree: Element) -> None:
    found = section(tree, "plan")
    # 256 sequences are 128 pairs
    assert row_of(found, "batch, rows a step")[1:] == ["128", "128", "100%"]
    assert row_of(found, "steps")[1:] == ["40", "40", "100%"]
    assert row_of(found, "tokens/s, steady")[1:] == ["–", "6,000", ""]
    assert row_of(found, "peak memory allocated, GiB")[1:] == ["–", "61.25", ""]
    assert row_of(found, "processes")[1:] == ["1", "1", "100%"]
    assert row_of(found, "wasted positions")[2] == "25 %"
    assert row_of(found, "time")[2] == "1:30:00"
    found = section(tree, "arguments")
    assert row_of(found, "learning_rate")[1:] == ["5e-07", "override: learning_rate=5e-7"]
    assert row_of(found, "dataset_mixer_list")[1:] == ['["a/b", 0.25]', "configs/a.yaml:14"]
    assert row_of(found, "gradient_accumulation_steps")[2] == "derived: batch of 128"
    (folded,) = found.all("details")
    assert [row[0] for row in rows(folded)[1:]] == ["max_grad_norm", "hub_model_id"]
    assert "open" not in folded.attributes
    assert row_of(folded, "hub_model_id")[1] == "null"
    (row,) = rows(section(tree, "findings"))[1:]
    assert row[:2] == ["warning[conditional-key]", "configs/a.yaml:9"]
    assert "leave it out" in row[2]
    told = section(tree, "versions")
    assert row_of(told, "source")[1] == "trl 1.16.0"
    assert row_of(told, "launch")[1] == "c0ffee"
    assert row_of(told, "GPUs")[1] == "H200, 143771 MiB"
    (command,) = told.all("pre")
    assert command.text == """python -m accelerate --run_name 'it'"'"'s'"""


def test_the_curves_are_those_of_the_run(tree: Element) -> None:
    told = curves(tree)
    (one,) = told["runs"]
    assert one["steps"] == list(range(1, 41))
    assert one["columns"]["loss"] == pytest.approx([loss(s) for s in range(1, 41)], rel=1e-6)
    # logged at every fifth step only
    rates = enumerate(one["columns"]["learning_rate"], start=1)
    assert [n for n, v in rates if v is not None] == [*range(5, 41, 5)]
    shown = [p["key"] for p in told["panels"] if not p["folded"]]
    assert (
        " ".join(shown)
        == "loss learning_rate tokens memory rewards margin accuracy grad_norm wasted"
    )
    titles = [h.text for h in section(tree, "curves").all("h3")]
    assert {"loss", "learning rate", "tokens/s", "reward margin", "logps/chosen"} <= set(titles)


def test_several_runs_share_the_charts_and_can_be_switched(tmp_path: Path) -> None:
    told = manifest(name="other")
    told["args"]["learning_rate"] = {"value": 1e-6, "origin": "configs/b.yaml:3"}
    runs = series.load_runs(
        [str(made(tmp_path / "one")), str(made(tmp_path / "two", told=told, steps=60))]
    )
    tree = parsed(page.render(runs))
    assert [r["name"] for r in curves(tree)["runs"]] == ["dpo tulu", "dpo other"]
    boxes = [i for i in tree.all("input") if i.attributes["type"] == "checkbox"]
    assert [b.attributes["data-run"] for b in boxes] == ["0", "1"]
    (legend,) = tree.all("fieldset")
    labels = [" ".join(label.text.split()) for label in legend.all("label")]
    assert labels == ["1dpo tulu", "2dpo other"]
    found = section(tree, "arguments")
    first = next(found.all("table"))
    assert [row[0] for row in rows(first)] == ["argument", "learning_rate"]
    assert row_of(found, "learning_rate")[1:] == ["1 5e-072 1e-06"]
    assert [row[2] for row in rows(section(tree, "plan"))] == ["steps", "40", "60plan 40"]


def test_figures_of_several_runs_show_the_difference_from_the_first(tmp_path: Path) -> None:
    runs = series.load_runs([str(made(tmp_path / "one")), str(made(tmp_path / "two", scale=2))])
    (table,) = [
        t for t in parsed(page.render(runs)).all("table") if t.attributes.get("class") == "overview"
    ]
    first, second = rows(table)[1:]
    place = rows(table)[0].index("tokens/s")
    assert (first[place], second[place]) == ("6,000", "3,000−50.0%")
    place = rows(table)[0].index("steps")
    assert (first[place], second[place]) == ("40", "40")


def evaluated(folder: Path) -> Path:
    """A run whose validation loss was measured twice."""
    with (folder / "probe" / "rank-0.jsonl").open("a") as file:
        for step, value in ((20, 0.5), (40, 0.4)):
            metrics = {"eval_loss": value, "eval_runtime": 3.0, "eval_samples_per_second": 9.0}
            file.write(json.dumps({"event": "evaluation", "step": step, "metrics": metrics}) + "\n")
    return folder


def test_the_validation_loss_is_drawn_beside_the_loss(tmp_path: Path) -> None:
    tree = parsed(page.render([series.load_run(evaluated(made(tmp_path / "one")))]))
    told = curves(tree)
    column = told["runs"][0]["columns"]["eval_loss"]
    assert {step: value for step, value in enumerate(column, start=1) if value is not None} == {
        20: 0.5,
        40: 0.4,
    }
    panel = next(panel for panel in told["panels"] if panel["key"] == "loss")
    assert [line["label"] for line in panel["lines"]] == ["training", "validation"]
    assert "eval_runtime" not in told["runs"][0]["columns"]


def test_a_loss_alone_needs_no_name(tree: Element) -> None:
    panel = next(panel for panel in curves(tree)["panels"] if panel["key"] == "loss")
    assert [line["label"] for line in panel["lines"]] == [""]


SAMPLES = {
    "version": 1, "from": "the split test, which was not trained on", "base": {"name": "local/7b"},
    "max_new_tokens": 256, "failed": None,
    "prompts": [
        {
            "messages": [{"role": "user", "content": "What is <b>a list</b>?"}], "expected": "A sequence.",
            "before": {"text": "no idea", "tokens": 256, "ended": "length"},
            "after": {"text": "Something ordered.", "tokens": 4, "ended": "stop"},
        }
    ],
}  # fmt: skip


def test_answers_before_and_after_stand_beside_each_other(tmp_path: Path) -> None:
    folder = made(tmp_path / "one")
    (folder / "samples.json").write_text(json.dumps(SAMPLES))
    run = series.load_run(folder)
    found = section(parsed(page.render([run])), "samples")
    texts = [pre.text for pre in found.all("pre")]
    assert texts == ["What is <b>a list</b>?", "no idea", "Something ordered.", "A sequence."]
    assert [h.text for h in found.all("h4")] == ["before (cut off)", "after", "in the data set"]
    assert "local/7b" in found.text and "not trained on" in found.text
    assert run.as_json()["samples"] == SAMPLES


@pytest.mark.parametrize(
    "record",
    [
        {},
        [],
        {"prompts": 3},
        {"prompts": [None, {"messages": "x", "before": 1, "after": []}]},
        {"base": 1},
    ],
)
def test_a_damaged_record_of_samples_breaks_no_page(record: Any, tmp_path: Path) -> None:
    folder = made(tmp_path / "one")
    (folder / "samples.json").write_text(json.dumps(record))
    assert "<h1>" in page.render([series.load_run(folder)])


def test_a_log_alone_is_enough(tmp_path: Path) -> None:
    logs = [tmp_path / folder / "train.log" for folder in ("a", "b")]
    for log in logs:
        log.parent.mkdir()
        log.write_text(console(1, 40))
    names = [run.name for run in series.load_runs([*map(str, logs), str(logs[0])])]
    assert names == ["a/train.log", "b/train.log", "a/train.log (3)"]
    (run,) = series.load_runs([str(logs[0])])
    tree = parsed(page.render([run]))
    assert curves(tree)["runs"][0]["steps"] == list(range(5, 41, 5))
    assert run.stage == "dpo"
    assert f"train.log:{2 * 8 + 1}" in row_of(section(tree, "verdict"), "finish")[4]


def test_a_run_from_its_results_alone(tmp_path: Path, run: Run) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "verdict.json").write_text(json.dumps(run.verdict))
    table = [
        {"step": 1, "finite": True, "loss": 2.5}, {"step": 2, "finite": False},
        {"step": 3, "finite": True, "loss": 2.25, "nonsense": "text"},
    ]  # fmt: skip
    lines = [json.dumps(row) for row in table]
    (kept / "metrics.jsonl").write_text(
        "\n".join([lines[1], lines[0], lines[2], '{"step": 4, "lo'])
    )
    (again,) = series.load_runs([str(kept)])
    assert again.verdict == run.verdict
    assert again.series.steps == (1, 2, 3)
    assert again.series.columns == {"loss": (2.5, None, 2.25)}
    assert again.series.nonfinite == (2,)


def test_steps_that_were_not_finite_are_told(tmp_path: Path) -> None:
    run = series.load_run(made(tmp_path / "run", bad=(17, 20)))
    told = curves(parsed(page.render([run])))["runs"][0]
    assert told["nonfinite"] == [17, 20]
    assert told["columns"]["loss"][16] is None
    data = page.render([run]).partition('id="curves-data">')[2].partition("</script>")[0]
    assert "NaN" not in data


def test_the_json_form_holds_the_same(run: Run) -> None:
    told = json.loads(json.dumps(series.as_json([run]), allow_nan=False))
    assert told["report_version"] == 1
    (one,) = told["runs"]
    assert one["run"] == run.name
    assert one["verdict"]["status"] == run.verdict["status"]
    assert one["plan"]["global"] == 128
    assert one["measured"]["tokens_per_second"] == 6000
    assert len(one["series"]["steps"]) == 40
    assert all(len(values) == 40 for values in one["series"]["columns"].values())
    assert one["args"]["learning_rate"]["origin"].startswith("override")


def hostile(tmp_path: Path) -> Run:
    told = manifest(name=NASTY)
    told["args"][NASTY] = {"value": NASTY, "origin": NASTY}
    told["findings"].append(
        {"severity": NASTY, "code": NASTY, "message": NASTY, "help": NASTY, "file": NASTY}
    )
    told["argv"].append(NASTY)
    told["machine"]["host"] = NASTY
    told["trainer"]["packages"][NASTY] = NASTY
    line = "{'loss': '0.5', 'a</script><script>alert(3)</script>': '1.5'}\n"
    broken = (
        f'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: {NASTY[:90]}\n'
    )
    return series.load_run(made(tmp_path / "run", told=told, extra=line + broken))


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    run = hostile(tmp_path)
    text = page.render([run])
    tree = parsed(text)
    assert not list(tree.all("img"))
    # ours, and the data
    assert len(list(tree.all("script"))) == 2
    assert len(re.findall(r"(?i)<script", text)) == 2
    (heading,) = tree.all("h1")
    assert SEEN in heading.text
    assert SEEN in section(tree, "arguments").text
    assert SEEN in section(tree, "findings").text
    assert SEEN in section(tree, "versions").text
    assert not re.search("[\x00-\x08\x0e-\x1f\u202e]", text)
    assert curves(tree)["runs"][0]["name"].endswith(READ)


TOKEN = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEF"


def test_tokens_get_into_no_report(tmp_path: Path) -> None:
    told = manifest()
    told["args"]["hub_token"] = {"value": "plain", "origin": "configs/a.yaml:3"}
    told["args"]["exp_name"] = {"value": TOKEN, "origin": "configs/a.yaml:4"}
    broken = f"Traceback (most recent call last):\nValueError: bad token {TOKEN}\n"
    path = made(tmp_path / "run", told=told, extra=broken)
    runs = series.load_runs([str(path), str(path / "console.log")])
    for text in (page.render(runs), json.dumps(series.as_json(runs))):
        assert TOKEN not in text
        assert REDACTED in text.replace("&lt;", "<").replace("&gt;", ">")
    assert row_of(section(parsed(page.render(runs[:1])), "arguments"), "hub_token")[1] == REDACTED


def test_finish_writes_the_page_of_the_run_that_was_judged(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    judged = conclude.finish(RunFolder(path))
    assert page.default_path([series.load_run(path)]) == path / "report.html"
    tree = parsed((path / "report.html").read_text())
    assert curves(tree)["runs"][0]["steps"] == list(range(1, 41))
    # without the evidence it is the page without curves, and without a way there
    told = rundir.read_json(path / "run.json")
    tree = parsed(page.render([series.run_from_records(path, told, judged.as_json(), [])]))
    assert not [h for h in tree.all("h2") if h.attributes["id"] == "curves"]
    assert "#curves" not in [a.attributes["href"] for a in tree.all("a")]
    assert row_of(section(tree, "verdict"), "finish")[1] == "completed"


def test_the_validation_loss_of_a_log_alone() -> None:
    run = series.load_run(DATA.parent / "corpus" / "trl_sft_eval.log")
    column = run.series.columns["eval_loss"]
    measured = [
        (step, value)
        for step, value in zip(run.series.steps, column, strict=True)
        if value is not None
    ]
    assert measured == [(4, 6.099), (8, 5.668), (12, 5.597)]
