"""`launch preview`: rows as the trainer's own preparation and collator make them."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import REPOSITORY
from parsed_answers import parse_answer
from real_training import needs_open_instruct, needs_trl
from small_stages import (
    NO_SYSTEM_ROLE,
    chat,
    copy_model,
    mixed_args,
    turn,
    use_own_folders,
    write_rows,
    write_stage,
)
from small_stages import servers as servers  # a fixture

from launcher.cli.main import main
from launcher.errors import Exit
from launcher.workflows.preview import preview
from launcher.workflows.rehearse.ask import Servers

pytestmark = [pytest.mark.slow, needs_trl]
ROWS = "data/train.jsonl"
ONE_CHAT = {"messages": chat("q", "a")}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)


@dataclass(frozen=True)
class Previews:
    """Runs the command, and reads its answer."""

    assets: Path
    capsys: pytest.CaptureFixture[str]

    def trl(self, stage: str = "sft", **args: Any) -> str:
        """Write a stage file for TRL; its data are those in `data`."""
        usual = {"model_name_or_path": str(self.assets / "model"), "dataset_name": "data"}
        return str(write_stage(Path("stage.yaml"), stage, "trl", usual | args))

    def open_instruct(self, stage: str = "sft", amount: str = "1.0", **args: Any) -> str:
        usual = {
            "model_name_or_path": str(self.assets / "model"),
            "chat_template_name": "tulu",
            "max_seq_length": 128,
            **mixed_args(stage, ROWS, amount),
        }
        return str(write_stage(Path("stage.yaml"), stage, "open_instruct", usual | args))

    def answer(self, *words: str, code: Exit = Exit.OK) -> Any:
        assert main(["preview", *words, "--format", "json"]) == code
        return parse_answer(self.capsys.readouterr().out)

    def data(self, *words: str) -> Any:
        return self.answer(*words).data

    def rows(self, *words: str) -> Any:
        return self.data(*words).rows

    def text(self, *words: str) -> str:
        assert main(["preview", *words]) == Exit.OK
        return self.capsys.readouterr().out

    def error(self, *words: str, code: Exit) -> Any:
        """The one error of a preview that has nothing to show."""
        findings = self.answer(*words, code=code).findings
        (error,) = [finding for finding in findings if finding.severity == "error"]
        return error


@pytest.fixture
def previews(
    demo_assets: Path,
    servers: Servers,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Previews:
    monkeypatch.setattr(preview, "Servers", lambda: contextlib.nullcontext(servers))
    return Previews(demo_assets, capsys)


def joined(row: Any, section: str = "text", **kind: bool) -> str:
    """The text of those pieces of a section that are `trained=True`, `special=False`, ..."""
    text = ""
    for part in row.sections:
        for piece in part.pieces:
            is_kind = all(getattr(piece, name) == value for name, value in kind.items())
            if part.name == section and is_kind:
                text += piece.text
    return text


def test_a_chat_is_shown_with_its_answers_marked(previews: Previews) -> None:
    data = previews.assets / "data" / "sft"
    stage = previews.trl(dataset_name=str(data), assistant_only_loss=True)

    shown = previews.text(stage, "--rows", "1")

    answer = "Canvas widget to display graphical elements like lines or text.<|im_end|>"
    assert "  │ <|im_start|>user\n  │ What is `tkinter.Canvas`?<|im_end|>\n" in shown
    assert f"  │ <|im_start|>assistant\n  │ [[{answer}]]\n" in shown
    assert f"row 1  {data}/train.jsonl:1  49 tokens, 49 % trained" in shown
    assert f"template  of the tokenizer of {previews.assets}/model (chat_template.jinja)" in shown
    assert "1,200, none cut, none dropped" in shown
    assert "█" in shown
    assert "\x1b" not in shown


def test_the_same_is_told_as_json(previews: Previews) -> None:
    data = previews.assets / "data" / "sft"
    stage = previews.trl(dataset_name=str(data), assistant_only_loss=True)

    content = previews.data(stage, "--rows", "2")

    first, second = content.rows
    assert first.row == 1
    assert second.row == 2
    assert first.file == f"{data}/train.jsonl"
    assert first.line == 1
    assert first.status == "kept"
    assert joined(first, trained=True).startswith("Canvas widget to display")
    assert joined(first, special=True) == "<|im_start|><|im_end|>" * 2
    counts = content.counts
    assert counts.total == 1200
    assert counts.looked_at == 1200
    assert counts.sampled is False
    assert sum(counts.lengths) == counts.tokens > counts.trained > 0


def test_a_row_is_shown_by_number_or_place(previews: Previews) -> None:
    questions = [f"question {number}" for number in range(1, 30)]
    path = write_rows(Path("data"), [{"messages": chat(text, "yes")} for text in questions])
    # an empty line is no row
    path.write_text("\n" + path.read_text())
    stage = previews.trl()

    (by_number,) = previews.rows(stage, "--row", "7")
    (by_place,) = previews.rows(stage, "--row", f"{ROWS}:7")

    assert by_number.row == 7
    assert by_number.line == 8
    assert by_place.row == 6
    assert by_place.line == 7
    assert "question 6<" in joined(by_place)
    for absent in ("30", f"{ROWS}:31", "other.jsonl:2", f"{ROWS}:1"):
        assert previews.error(stage, "--row", absent, code=Exit.USAGE).code == "no-such-row"
    for wrong in ("0", "-1", f"{ROWS}:"):
        assert previews.error(stage, f"--row={wrong}", code=Exit.USAGE).code == "bad-row"


NO_TEMPLATE = "not applied: these rows are text"


@pytest.mark.parametrize(
    ("row", "trained", "template"),
    [
        pytest.param({"text": "The end."}, "The end.<|im_end|>", NO_TEMPLATE, id="text"),
        pytest.param(
            {"prompt": "One, two,", "completion": " three."},
            " three.<|im_end|>",
            NO_TEMPLATE,
            id="prompt and completion",
        ),
        pytest.param(
            {"prompt": [turn("user", "q")], "completion": [turn("assistant", "a")]},
            "a<|im_end|>\n",
            "of the tokenizer of",
            id="messages",
        ),
    ],
)
def test_each_form_of_rows(row: Any, trained: str, template: str, previews: Previews) -> None:
    write_rows(Path("data"), [row] * 20)

    content = previews.data(previews.trl(), "--rows", "1")

    assert joined(content.rows[0], trained=True) == trained
    assert content.template.description.startswith(template)
    assert content.counts.looked_at == 20


def write_long_rows() -> None:
    """40 rows: every second question fills 128 tokens, and every tenth answer does."""
    rows = []
    for number in range(40):
        question = "why " * 200 if number % 2 else "why?"
        answer = "because " * 200 if number % 10 == 0 else "because"
        rows.append({"messages": chat(question, answer)})
    write_rows(Path("data"), rows)


def test_cut_and_dropped_rows_are_counted_with_the_reason(previews: Previews) -> None:
    write_long_rows()
    stage = previews.trl(assistant_only_loss=True, max_length=128)

    shown = previews.text(stage, "--rows", "2")
    content = previews.data(stage, "--rows", "2")
    (from_end,) = previews.rows(stage, "truncation_mode=keep_end", "--row", "2")

    assert "40: 16 whole, 4 cut, 20 dropped" in shown
    assert "4 of 40 rows, at `max_length: 128`" in shown
    assert "20 of 40 rows: the prompt fills `max_length: 128`" in shown
    assert re.search(r"row 1 .* 128 tokens, .* trained, \d+ cut\n", shown)
    reason = "no token that counts in the loss is within `max_length`"
    assert re.search(rf"row 2 .* dropped: {reason}", shown)
    assert re.search(r"^  [\d,]+ tokens cut at the end: ", shown, re.M)
    cut, dropped = content.rows
    assert cut.status == "cut"
    assert cut.tokens == 128
    assert joined(cut).count("because") == 200 > joined(cut, cut=False).count("because") > 0
    assert dropped.status == "dropped"
    assert dropped.trained == 0
    assert content.counts.dropped == SimpleNamespace(too_long=20, untrained=0)
    assert from_end.status == "cut"
    assert from_end.sections[0].cut_at == "start"
    assert joined(from_end, trained=True) == "because<|im_end|>"


def test_a_mixture_is_shown_with_all_of_its_rows(previews: Previews) -> None:
    for name in ("first", "second"):
        questions = [f"{name} {number}?" for number in range(10)]
        write_rows(Path(name), [{"messages": chat(text, "Yes.")} for text in questions])
    sets = [{"path": "./first", "split": "train[:40%]"}, {"path": "./second"}]
    stage = previews.trl(dataset_name=None, datasets=sets, test_split_size=3)

    content = previews.data(stage, "--row", "5")

    # rows that are split off for the evaluation are drawn anew at each start
    assert content.counts.looked_at == content.counts.total == 14
    assert "second 0?" in joined(content.rows[0])
    assert content.data == "./first, ./second"


def test_packing_says_how_many_sequences(previews: Previews) -> None:
    write_long_rows()
    stage = previews.trl(packing=True, max_length=128)

    shown = previews.text(stage, "--rows", "0")
    content = previews.data(stage, "--row", "1")
    (split,) = previews.rows(stage, "packing_strategy=bfd_split", "--row", "1")

    assert "packed into" in shown
    (row,) = content.rows
    assert row.tokens == 128
    assert row.cut > 0
    assert 24 <= content.counts.sequences < 40
    assert split.cut == 0
    assert split.sequences > 1


def pair(number: int, chosen: str = "yes", rejected: str = "no") -> dict[str, Any]:
    question = f"question {number}"
    return {"chosen": chat(question, chosen), "rejected": chat(question, rejected)}


def test_a_pair_is_shown_as_prompt_chosen_rejected_and_what_differs(previews: Previews) -> None:
    alike = pair(3, "yes, and why", "yes, but")
    with_prompt = {"prompt": [turn("user", "question 4")], **pair(4)}
    write_rows(Path("data"), [pair(1), pair(2, "yes", "yes"), alike] * 8)
    stage = previews.trl("dpo")

    first, equal, similar = previews.rows(stage)
    shown = previews.text(stage, "--rows", "2")
    write_rows(Path("data"), [with_prompt] * 20)
    (twice,) = previews.rows(stage, "--rows", "1")

    prompt = "<|im_start|>user\nquestion 1<|im_end|>\n<|im_start|>assistant\n"
    assert joined(first, "prompt", trained=False) == joined(first, "prompt") == prompt
    assert joined(first, "chosen", trained=True) == "yes<|im_end|>\n"
    assert joined(first, "rejected", trained=True) == "no<|im_end|>\n"
    assert equal.difference.equal
    assert not first.difference.equal
    assert similar.difference.same_start >= 1
    assert joined(similar, "chosen", differs=True).strip() == "and why"
    assert "they differ in" in shown
    assert "chosen and rejected are the same: this pair teaches nothing" in shown
    assert joined(twice, "prompt").count("question 4") == 1
    assert joined(twice, "chosen").count("question 4") == 1


def test_a_template_of_a_file_is_named(previews: Previews) -> None:
    write_rows(Path("data"), [ONE_CHAT] * 20)
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    )
    Path("plain.jinja").write_text(template)

    stage = previews.trl(chat_template_path="plain.jinja")
    content = previews.data(stage, "--rows", "1")

    assert content.template.description == "plain.jinja (chat_template_path)"
    assert joined(content.rows[0]) == "user: q<|im_end|>assistant: a<|im_end|>"


def test_a_template_that_trl_replaces_is_named(previews: Previews) -> None:
    write_rows(Path("data"), [ONE_CHAT] * 20)
    package = Path(str(getattr(find_spec("trl"), "origin", ""))).parent
    template = (package / "chat_templates" / "qwen2_5.jinja").read_text()
    copy_model(previews.assets, Path("model"), template)

    stage = previews.trl(model_name_or_path="model", assistant_only_loss=True)
    content = previews.data(stage, "--rows", "1")

    assert content.template.replaced
    assert "TRL replaces it by its own version" in content.template.description
    assert joined(content.rows[0], trained=True).strip() == "a<|im_end|>"


def test_a_row_that_the_trainer_refuses_is_named_and_others_are_shown(previews: Previews) -> None:
    copy_model(previews.assets, Path("model"), NO_SYSTEM_ROLE)
    with_system = {"messages": [turn("system", "be kind"), *ONE_CHAT["messages"]]}
    write_rows(Path("data"), [ONE_CHAT] * 150 + [with_system] + [ONE_CHAT] * 50)

    answer = previews.answer(
        previews.trl(model_name_or_path="model"), "--rows", "2", code=Exit.CONFIG
    )

    (error,) = [f for f in answer.findings if f.code == "trainer-refuses"]
    assert f"{ROWS}:151" in error.message
    assert "no system role" in error.message
    assert len(answer.data.rows) == 2
    assert answer.data.counts is None


def test_only_the_tokenizer_is_needed_and_no_weights_are_read(previews: Previews) -> None:
    write_rows(Path("data"), [ONE_CHAT] * 20)
    cached = Path(os.environ["HF_HOME"]) / "hub" / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(previews.assets / "model" / name, snapshot)
    lora = {"use_peft": True, "lora_target_modules": ["c_attn", "c_proj"]}
    stage = previews.trl(model_name_or_path="org/tiny", **lora)

    answer = previews.answer(stage, "--rows", "1")
    shutil.copy(previews.assets / "model" / "config.json", snapshot)
    (snapshot / "model.safetensors").write_bytes(b"these are no weights")
    with_weights = previews.rows(stage, "--rows", "1")

    rows = answer.data.rows
    assert joined(rows[0]).startswith("<|im_start|>user\nq")
    notes = [f.code for f in answer.findings if f.severity == "note"]
    assert notes.count("stand-in") == 1
    assert with_weights == rows


def test_what_is_not_here_is_not_ready(previews: Previews) -> None:
    write_rows(Path("data"), [ONE_CHAT] * 20)

    no_model = previews.error(previews.trl(model_name_or_path="org/none"), code=Exit.NOT_READY)
    no_data = previews.error(previews.trl(dataset_name="org/none"), code=Exit.NOT_READY)

    assert no_model.code == "absent-tokenizer"
    assert no_data.code == "absent-data"
    assert "launch prepare" in no_data.help


def test_a_python_without_the_trainer_is_not_ready(
    demo_assets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    previews = Previews(demo_assets, capsys)
    write_rows(Path("data"), [ONE_CHAT] * 20)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "bare"], check=True)

    python = ("--python", "bare/bin/python")
    error = previews.error(previews.trl(), *python, code=Exit.NOT_READY)

    assert error.code == "rehearsal-imports"


def test_a_large_set_is_counted_by_some_of_its_rows(previews: Previews) -> None:
    questions = [f"question {number}" for number in range(1, 4002)]
    write_rows(Path("data"), [{"messages": chat(text, "yes")} for text in questions])

    shown = previews.text(previews.trl(), "--row", "3998")

    # every second one, and the one that is named
    assert "2,002 of 4,001 looked at" in shown
    assert "question 3998<|im_end|>" in shown


def test_a_terminal_gets_colour_and_no_escape_of_the_rows(
    previews: Previews, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "\x1b[2Jwiped " + "a long answer " * 20
    write_rows(Path("data"), [{"messages": chat("q", answer)}] * 20)
    stage = previews.trl(assistant_only_loss=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")

    bare = previews.text(stage, "--rows", "1")
    monkeypatch.setenv("NO_COLOR", "")
    coloured = previews.text(stage, "--rows", "1")

    assert "\x1b" not in bare
    assert "[[wiped a long answer" in bare
    assert "\x1b[32m" in coloured
    assert "[[" not in coloured
    assert "\x1b[2J" not in coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    widths = [len(line) for line in plain.splitlines() if line.startswith("  │")]
    assert len(widths) > 5
    assert max(widths) <= 60


@needs_open_instruct
def test_open_instruct_shows_its_own_templates_cuts_and_drops(previews: Previews) -> None:
    write_long_rows()
    stage = previews.open_instruct()

    content = previews.data(stage, "--rows", "2")
    own = ("chat_template_name=null", "packing=true")
    with_own = previews.data(stage, *own, "--row", f"{ROWS}:3")

    cut, dropped = content.rows
    assert joined(cut, cut=False).startswith("<|user|>\nwhy?\n<|assistant|>\nbecause because")
    assert cut.status == "cut"
    assert cut.tokens == 128
    assert dropped.status == "dropped"
    counts = content.counts
    assert counts.cut == 4
    assert counts.dropped.too_long == 20
    template = content.template.description
    assert template == "`tulu` of open-instruct (chat_template_name)"
    assert with_own.template.description.startswith("of the tokenizer of")
    assert joined(with_own.rows[0], trained=True) == "because<|im_end|>\n"


@needs_open_instruct
def test_a_row_that_open_instruct_does_not_take_can_be_shown(previews: Previews) -> None:
    write_long_rows()
    stage = previews.open_instruct(amount="10")

    shown = previews.text(stage, "--rows", "1")
    taken = [previews.rows(stage, "--row", row)[0].taken for row in ("3", "5")]

    assert "10, taken from 40" in shown
    assert not all(taken)


@needs_open_instruct
def test_open_instruct_says_that_a_template_is_a_fallback(previews: Previews) -> None:
    write_rows(Path("data"), [ONE_CHAT] * 20)
    stage = previews.open_instruct(chat_template_name="tuluu")

    template = previews.data(stage).template

    assert template.fallback
    assert "a fallback: open-instruct has no template `tuluu`" in template.description


@needs_open_instruct
@pytest.mark.parametrize("packing", [False, True])
def test_open_instruct_shows_pairs(packing: bool, previews: Previews) -> None:
    write_rows(Path("data"), [pair(1), pair(2, "yes", "yes")] * 10)

    stage = previews.open_instruct("dpo", packing=packing)
    first, equal = previews.rows(stage, "--rows", "2")

    assert joined(first, "prompt") == "<|user|>\nquestion 1\n<|assistant|>\n"
    assert joined(first, "chosen", trained=True) == "yes<|im_end|>"
    assert joined(first, "rejected", trained=True) == "no<|im_end|>"
    assert equal.difference.equal
    assert not first.difference.equal


FORMS = [
    ("sft", {"messages": chat("What is 2?", "Two.  Or  so.")}),
    ("sft", {"text": "Ünïcode 中文 and a tail"}),
    ("sft", {"prompt": "One, two,", "completion": " three."}),
    ("dpo", pair(1)),
    ("dpo", {"prompt": "q: ", "chosen": "yes", "rejected": "no"}),
]


def test_the_text_is_what_trl_itself_makes(previews: Previews, tmp_path: Path) -> None:
    model = str(previews.assets / "model")
    requests = []
    for number, (stage, row) in enumerate(FORMS):
        folder = tmp_path / str(number)
        write_rows(folder, [row] * 8)
        requests.append(json.dumps({"stage": stage, "data": str(folder), "args": {}}))
    program = [sys.executable, str(REPOSITORY / "tests/support/real_rows.py"), model]
    lines = "\n".join(requests) + "\n"
    done = subprocess.run(program, input=lines, capture_output=True, text=True, check=True)

    for number, line in enumerate(done.stdout.splitlines()):
        stage = FORMS[number][0]
        (row,) = previews.rows(previews.trl(stage, dataset_name=str(number)), "--rows", "1")
        names = ["text"] if stage == "sft" else ["prompt", "chosen", "rejected"]
        texts = [joined(row, name) for name in names]
        assert texts == parse_answer(line).rows[0]
