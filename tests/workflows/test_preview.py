"""`launch preview`: rows as the trainer's own preparation and collator make them, told in text and as JSON."""

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, find_checkout
from real_training import needs_open_instruct, needs_trl

from launcher.cli.main import main
from launcher.errors import Exit
from launcher.workflows.preview import preview
from launcher.workflows.rehearse.ask import Servers

Chat = list[dict[str, str]]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    checkout = find_checkout()
    if checkout is not None:
        monkeypatch.setenv("LAUNCH_OPEN_INSTRUCT", str(checkout))
    for name, folder in {"HOME": "home", "XDG_CACHE_HOME": "cache", "HF_HOME": "hub"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """One process under the trainer's Python for many tests: to import its packages takes most of a preview."""
    with Servers() as opened:
        yield opened


def chat(question: str, answer: str) -> Chat:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_rows(folder: Path, rows: Iterable[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_stage(model: Path, stage: str = "sft", backend: str = "trl", **args: Any) -> str:
    """A stage file beside the data; what its arguments are is JSON, which is YAML."""
    lines = [f"  {name}: {json.dumps(value)}\n" for name, value in args.items()]
    head = f"stage: {stage}\nbackend: {backend}\ndeepspeed: none\nargs:\n"
    Path("stage.yaml").write_text(f"{head}  model_name_or_path: {model}\n{''.join(lines)}")
    return "stage.yaml"


class Previews:
    """Runs the command, and reads its answer."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def json(self, *words: str, code: Exit = Exit.OK) -> dict[str, Any]:
        assert main(["preview", *words, "--format", "json"]) == code
        envelope: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        return envelope

    def data(self, *words: str) -> dict[str, Any]:
        data: dict[str, Any] = self.json(*words)["data"]
        return data

    def text(self, *words: str, code: Exit = Exit.OK) -> str:
        assert main(["preview", *words]) == code
        return self.capsys.readouterr().out

    def fault(self, *words: str, code: Exit) -> dict[str, Any]:
        """The one error of a preview that has nothing to show."""
        envelope = self.json(*words, code=code)
        (finding,) = [finding for finding in envelope["findings"] if finding["severity"] == "error"]
        fault: dict[str, Any] = finding
        return fault


@pytest.fixture
def previews(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, servers: Servers
) -> Previews:
    monkeypatch.setattr(preview, "Servers", lambda: contextlib.nullcontext(servers))
    return Previews(capsys)


@pytest.fixture
def previews_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Previews]:
    """Previews with a process of their own each, which leaves nothing behind."""
    yield Previews(capsys)
    assert not [name for name in os.listdir(tmp_path / "temporary") if name.startswith("launch-")]


def joined(row: dict[str, Any], section: str = "text", **wanted: bool) -> str:
    """The text of those pieces of a section that are as wanted: `trained=True`, `special=False`, ..."""
    texts = []
    for part in row["sections"]:
        if part["name"] != section:
            continue
        for piece in part["pieces"]:
            if all(piece[name] == value for name, value in wanted.items()):
                texts.append(piece["text"])
    return "".join(texts)


@needs_trl
@pytest.mark.slow
def test_a_chat_is_shown_with_its_answers_marked(previews: Previews, demo_assets: Path) -> None:
    data = demo_assets / "data" / "sft"
    stage = write_stage(demo_assets / "model", dataset_name=str(data), assistant_only_loss=True)
    shown = previews.text(stage, "--rows", "1")
    assert (
        "  │ <|im_start|>user\n  │ What is `tkinter.Canvas`?<|im_end|>\n  │ <|im_start|>assistant\n"
        in shown
    )
    answer = "Canvas widget to display graphical elements like lines or text.<|im_end|>"
    assert f"  │ [[{answer}]]\n" in shown
    assert f"row 1  {data}/train.jsonl:1  49 tokens, 49 % trained" in shown
    assert f"template  of the tokenizer of {demo_assets}/model (chat_template.jinja)" in shown
    assert "1,200, none cut, none dropped" in shown and "█" in shown and "\x1b" not in shown
    whole = previews.data(stage, "--rows", "2")
    assert [row["row"] for row in whole["rows"]] == [1, 2]
    row = whole["rows"][0]
    assert joined(row, trained=True) == answer
    assert joined(row, special=True) == "<|im_start|><|im_end|><|im_start|><|im_end|>"
    assert (row["file"], row["line"], row["status"]) == (f"{data}/train.jsonl", 1, "kept")
    counts = whole["counts"]
    assert (counts["total"], counts["looked_at"], counts["sampled"]) == (1200, 1200, False)
    assert sum(counts["lengths"]) == counts["tokens"] > counts["trained"] > 0


@needs_trl
@pytest.mark.slow
def test_one_row_is_shown_by_number_or_place_and_others_are_refused(
    previews: Previews, demo_assets: Path
) -> None:
    path = write_rows(
        Path("data"), [{"messages": chat(f"question {number}", "yes")} for number in range(1, 30)]
    )
    path.write_text("\n" + path.read_text())
    stage = write_stage(demo_assets / "model", dataset_name="data")
    # the empty line is no row
    for named, row, line in (("7", 7, 8), ("data/train.jsonl:7", 6, 7)):
        (shown,) = previews.data(stage, "--row", named)["rows"]
        assert (shown["row"], shown["line"]) == (row, line)
        assert f"question {row}<" in joined(shown)
    for named in ("30", "data/train.jsonl:31", "other.jsonl:2", "data/train.jsonl:1"):
        assert previews.fault(stage, "--row", named, code=Exit.USAGE)["code"] == "no-such-row"
    for named in ("0", "-1", "x", "data/train.jsonl:"):
        assert previews.fault(stage, f"--row={named}", code=Exit.USAGE)["code"] == "bad-row"


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize(("row", "trained", "template"), [
    ({"text": "The end."}, "The end.<|im_end|>", "not applied: these rows are text"),
    ({"prompt": "One, two,", "completion": " three."}, " three.<|im_end|>", "not applied: these rows are text"),
    ({"prompt": chat("q", "a")[:1], "completion": chat("q", "a")[1:]}, "a<|im_end|>\n", "of the tokenizer of"),
])  # fmt: skip
def test_each_form_of_rows(
    previews: Previews, demo_assets: Path, row: dict[str, Any], trained: str, template: str
) -> None:
    write_rows(Path("data"), [row] * 20)
    whole = previews.data(write_stage(demo_assets / "model", dataset_name="data"), "--rows", "1")
    assert joined(whole["rows"][0], trained=True) == trained
    assert whole["template"]["description"].startswith(template)
    assert whole["counts"]["looked_at"] == 20


def write_long_prompts(folder: Path) -> None:
    """40 rows: every second has a question that fills 128 tokens, every tenth an answer that does."""
    rows = []
    for number in range(40):
        question = "why " * 200 if number % 2 else "why?"
        answer = "because " * 200 if number % 10 == 0 else "because"
        rows.append({"messages": chat(question, answer)})
    write_rows(folder, rows)


@needs_trl
@pytest.mark.slow
def test_cut_and_dropped_rows_are_counted_with_the_reason(
    previews: Previews, demo_assets: Path
) -> None:
    write_long_prompts(Path("data"))
    stage = write_stage(
        demo_assets / "model", dataset_name="data", assistant_only_loss=True, max_length=128
    )
    shown = previews.text(stage, "--rows", "2")
    assert "40: 16 whole, 4 cut, 20 dropped" in shown
    assert "4 of 40 rows, at `max_length: 128`" in shown
    assert "20 of 40 rows: the prompt fills `max_length: 128`" in shown
    assert re.search(r"row 1 .* 128 tokens, .* trained, \d+ cut\n", shown)
    assert re.search(
        r"row 2 .* dropped: no token that counts in the loss is within `max_length`", shown
    )
    assert re.search(r"^  [\d,]+ tokens cut at the end: ", shown, re.M)
    whole = previews.data(stage, "--rows", "2")
    cut, dropped = whole["rows"]
    assert (cut["status"], cut["tokens"], dropped["status"], dropped["trained"]) == (
        "cut",
        128,
        "dropped",
        0,
    )
    assert joined(cut).count("because") == 200 > joined(cut, cut=False).count("because") > 0
    assert whole["counts"]["dropped"] == {"too_long": 20, "untrained": 0}
    from_end = previews.data(stage, "truncation_mode=keep_end", "--row", "2")
    (kept,) = from_end["rows"]
    assert kept["status"] == "cut" and kept["sections"][0]["cut_at"] == "start"
    assert joined(kept, trained=True) == "because<|im_end|>"


@needs_trl
@pytest.mark.slow
def test_a_mixture_is_shown_with_all_of_its_rows(previews: Previews, demo_assets: Path) -> None:
    for name in ("first", "second"):
        write_rows(
            Path(name), [{"messages": chat(f"{name} {number}?", "Yes.")} for number in range(10)]
        )
    sets = [{"path": "./first", "split": "train[:40%]"}, {"path": "./second"}]
    config = write_stage(demo_assets / "model", datasets=sets, test_split_size=3, max_length=64)
    data = previews.data(config, "--row", "5")
    # rows that are split off for the evaluation are drawn anew at each start
    assert data["counts"]["looked_at"] == data["counts"]["total"] == 14
    (row,) = data["rows"]
    assert "second 0?" in joined(row)
    assert data["data"] == "./first, ./second"


def test_packing_says_how_many_sequences(previews: Previews, demo_assets: Path) -> None:
    write_long_prompts(Path("data"))
    stage = write_stage(demo_assets / "model", dataset_name="data", packing=True, max_length=128)
    whole = previews.data(stage, "--row", "1")
    assert whole["rows"][0]["tokens"] == 128 and whole["rows"][0]["cut"] > 0
    assert 24 <= whole["counts"]["sequences"] < 40
    split = previews.data(stage, "packing_strategy=bfd_split", "--row", "1")["rows"][0]
    assert split["cut"] == 0 and split["sequences"] > 1
    assert "packed into" in previews.text(stage, "--rows", "0")


def pair(
    number: int, *, chosen: str = "yes", rejected: str = "no", prompt: bool = False
) -> dict[str, Any]:
    question = f"question {number}"
    whole = {"chosen": chat(question, chosen), "rejected": chat(question, rejected)}
    return {"prompt": chat(question, "")[:1], **whole} if prompt else whole


@needs_trl
@pytest.mark.slow
def test_a_pair_is_shown_as_prompt_chosen_rejected_and_what_differs(
    previews: Previews, demo_assets: Path
) -> None:
    rows = [pair(1), pair(2, rejected="yes"), pair(3, chosen="yes, and why", rejected="yes, but")]
    write_rows(Path("pairs"), rows * 8)
    stage = write_stage(demo_assets / "model", "dpo", dataset_name="pairs")
    first, equal, alike = previews.data(stage)["rows"]
    prompt = "<|im_start|>user\nquestion 1<|im_end|>\n<|im_start|>assistant\n"
    assert joined(first, "prompt") == prompt and joined(first, "prompt", trained=True) == ""
    assert joined(first, "chosen", trained=True) == "yes<|im_end|>\n"
    assert joined(first, "rejected", trained=True) == "no<|im_end|>\n"
    assert equal["difference"]["equal"] and not first["difference"]["equal"]
    assert alike["difference"]["same_start"] >= 1
    assert joined(alike, "chosen", differs=True).strip() == "and why"
    shown = previews.text(stage, "--row", "2")
    assert "chosen and rejected are the same: this pair teaches nothing" in shown
    assert "they differ in" in previews.text(stage, "--row", "1")
    write_rows(Path("pairs"), [pair(number, prompt=True) for number in range(20)])
    (twice,) = previews.data(stage, "--rows", "1")["rows"]
    assert [
        joined(twice, name).count("question 0") for name in ("prompt", "chosen", "rejected")
    ] == [1, 1, 1]


@needs_trl
@pytest.mark.slow
def test_a_template_that_is_replaced_or_given_is_named(
    previews: Previews, demo_assets: Path
) -> None:
    write_rows(Path("data"), [{"messages": chat("q", "a")}] * 20)
    given = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    Path("plain.jinja").write_text(given)
    stage = write_stage(
        demo_assets / "model", dataset_name="data", chat_template_path="plain.jinja"
    )
    whole = previews.data(stage, "--rows", "1")
    assert whole["template"]["description"] == "plain.jinja (chat_template_path)"
    assert joined(whole["rows"][0]) == "user: q<|im_end|>assistant: a<|im_end|>"
    # a template of which TRL has a version of its own
    templates = Path(str(getattr(find_spec("trl"), "origin", ""))).parent / "chat_templates"
    shutil.copytree(demo_assets / "model", "model")
    shutil.copy(templates / "qwen2_5.jinja", "model/chat_template.jinja")
    stage = write_stage(Path("model"), dataset_name="data", assistant_only_loss=True)
    replaced = previews.data(stage, "--rows", "1")
    assert replaced["template"]["replaced"]
    assert "TRL replaces it by its own version" in replaced["template"]["description"]
    assert joined(replaced["rows"][0], trained=True).strip() == "a<|im_end|>"


@needs_trl
@pytest.mark.slow
def test_a_row_that_the_trainer_refuses_is_named_and_others_are_shown(
    previews: Previews, demo_assets: Path
) -> None:
    shutil.copytree(demo_assets / "model", "model")
    Path("model/chat_template.jinja").write_text(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m['content'] + eos_token }}{% endfor %}"
    )
    rows = [{"messages": chat(f"question {number}", "yes")} for number in range(200)]
    rows[150]["messages"].insert(0, {"role": "system", "content": "be kind"})
    write_rows(Path("data"), rows)
    stage = write_stage(Path("model"), dataset_name="data")
    envelope = previews.json(stage, "--rows", "2", code=Exit.CONFIG)
    (fault,) = [finding for finding in envelope["findings"] if finding["code"] == "trainer-refuses"]
    assert "data/train.jsonl:151" in fault["message"] and "no system role" in fault["message"]
    assert len(envelope["data"]["rows"]) == 2 and envelope["data"]["counts"] is None


@needs_trl
@pytest.mark.slow
def test_only_the_tokenizer_is_needed_and_no_weights_are_read(
    previews_alone: Previews, demo_assets: Path
) -> None:
    write_rows(Path("data"), [{"messages": chat("q", "a")}] * 20)
    hub = Path("hub/hub/models--org--tiny")
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40)
    snapshot = hub / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_assets / "model" / name, snapshot / name)
    stage = write_stage(
        Path("org/tiny"),
        dataset_name="data",
        use_peft=True,
        lora_target_modules=["c_attn", "c_proj"],
    )
    whole = previews_alone.json(stage, "--rows", "1")
    assert joined(whole["data"]["rows"][0]).startswith("<|im_start|>user\nq")
    assert [
        finding["code"] for finding in whole["findings"] if finding["severity"] == "note"
    ].count("stand-in") == 1
    shutil.copy(demo_assets / "model" / "config.json", snapshot / "config.json")
    (snapshot / "model.safetensors").write_bytes(b"these are no weights")
    assert previews_alone.data(stage, "--rows", "1")["rows"] == whole["data"]["rows"]


@needs_trl
@pytest.mark.slow
def test_what_is_not_here_is_an_error_with_an_exit_code(
    previews_alone: Previews, demo_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(Path("data"), [{"messages": chat("q", "a")}] * 20)
    absent = write_stage(Path("org/none"), dataset_name="data")
    assert previews_alone.fault(absent, code=Exit.NOT_READY)["code"] == "absent-tokenizer"
    remote = write_stage(demo_assets / "model", dataset_name="org/none")
    fault = previews_alone.fault(remote, code=Exit.NOT_READY)
    assert fault["code"] == "absent-data" and "launch prepare" in fault["help"]
    bare = Path("bare/bin/python")
    bare.parent.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "bare"], check=True)
    here = write_stage(demo_assets / "model", dataset_name="data")
    fault = previews_alone.fault(here, "--python", str(bare), code=Exit.NOT_READY)
    assert fault["code"] == "rehearsal-imports"


@needs_trl
@pytest.mark.slow
def test_a_large_set_is_counted_by_some_of_its_rows(previews: Previews, demo_assets: Path) -> None:
    write_rows(
        Path("data"), ({"messages": chat(f"question {number}", "yes")} for number in range(9001))
    )
    stage = write_stage(demo_assets / "model", dataset_name="data")
    whole = previews.data(stage, "--row", "8999")
    counts = whole["counts"]
    assert counts["sampled"] and counts["total"] == 9001 and 2000 < counts["looked_at"] < 4002
    assert joined(whole["rows"][0]).startswith("<|im_start|>user\nquestion 8998")
    assert re.search(r"[\d,]+ of 9,001 looked at", previews.text(stage, "--rows", "0"))


def on_terminal(words: list[str], **variables: str) -> str:
    """What a command writes to a terminal of 60 columns."""
    owner, terminal = pty.openpty()
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLUMNS": "60",
        "NO_COLOR": "",
        **variables,
    }
    program = [sys.executable, "-m", "launcher", *words]
    with subprocess.Popen(
        program, stdout=terminal, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(terminal)
        written = b""
        while True:
            try:
                chunk = os.read(owner, 65536)
            except OSError:
                break
            if not chunk:
                break
            written += chunk
    os.close(owner)
    assert process.returncode == Exit.OK
    return written.decode().replace("\r\n", "\n")


@needs_trl
@pytest.mark.slow
def test_a_terminal_gets_colour_and_no_escape_of_the_rows(demo_assets: Path) -> None:
    answer = "\x1b[2Jwiped " + "a long answer " * 20
    write_rows(Path("data"), [{"messages": chat("q", answer)}] * 20)
    stage = write_stage(demo_assets / "model", dataset_name="data", assistant_only_loss=True)
    shown = on_terminal(["preview", stage, "--rows", "1"])
    assert "\x1b[32m" in shown and "[[" not in shown and "\x1b[2J" not in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    rows = [line for line in plain.splitlines() if line.startswith("  │")]
    assert len(rows) > 5 and max(map(len, rows)) <= 60
    bare = on_terminal(["preview", stage, "--rows", "1"], NO_COLOR="1")
    assert "\x1b" not in bare and "[[wiped a long answer" in bare


def open_instruct_stage(
    model: Path, stage: str, data: Path | str, amount: str = "1.0", **args: Any
) -> str:
    listed = {"sft": "dataset_mixer_list", "dpo": "mixer_list"}[stage]
    fixed = {"push_to_hub": False, "try_launch_beaker_eval_jobs": False, "max_seq_length": 128}
    return write_stage(
        model, stage, "open_instruct", **{listed: [str(data), amount], **fixed, **args}
    )


@needs_open_instruct
@pytest.mark.slow
def test_open_instruct_shows_its_own_templates_cuts_and_drops(
    previews: Previews, demo_assets: Path
) -> None:
    write_long_prompts(Path("data"))
    stage = open_instruct_stage(
        demo_assets / "model", "sft", "data/train.jsonl", chat_template_name="tulu"
    )
    whole = previews.data(stage, "--rows", "2")
    cut, dropped = whole["rows"]
    assert joined(cut, cut=False).startswith("<|user|>\nwhy?\n<|assistant|>\nbecause because")
    assert (cut["status"], cut["tokens"], dropped["status"]) == ("cut", 128, "dropped")
    assert (whole["counts"]["cut"], whole["counts"]["dropped"]["too_long"]) == (4, 20)
    assert whole["template"]["description"] == "`tulu` of open-instruct (chat_template_name)"
    own = previews.data(
        stage, "chat_template_name=null", "packing=true", "--row", "data/train.jsonl:3"
    )
    assert own["template"]["description"].startswith("of the tokenizer of")
    assert joined(own["rows"][0], trained=True) == "because<|im_end|>\n"
    # the mixture takes some of the rows; another one may be asked for
    few = open_instruct_stage(
        demo_assets / "model", "sft", "data/train.jsonl", "10", chat_template_name="tulu"
    )
    assert "10, taken from 40" in previews.text(few, "--rows", "1")
    taken = [previews.data(few, "--row", str(number))["rows"][0]["taken"] for number in (3, 5, 7)]
    assert not all(taken)


@needs_open_instruct
@pytest.mark.slow
def test_open_instruct_says_that_a_template_is_a_fallback(
    previews: Previews, demo_assets: Path
) -> None:
    write_rows(Path("data"), [{"messages": chat("q", "a")}] * 20)
    stage = open_instruct_stage(
        demo_assets / "model", "sft", "data/train.jsonl", chat_template_name="tuluu"
    )
    main(["preview", stage, "--format", "json"])
    whole = json.loads(previews.capsys.readouterr().out)["data"]
    assert whole["template"]["fallback"]
    assert "a fallback: open-instruct has no template `tuluu`" in whole["template"]["description"]


@needs_open_instruct
@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_open_instruct_shows_pairs(previews: Previews, demo_assets: Path, packing: bool) -> None:
    write_rows(Path("pairs"), [pair(1), pair(2, rejected="yes")] * 10)
    data = "pairs/train.jsonl"
    stage = open_instruct_stage(
        demo_assets / "model", "dpo", data, chat_template_name="tulu", packing=packing
    )
    first, equal = previews.data(stage, "--rows", "2")["rows"]
    assert joined(first, "prompt") == "<|user|>\nquestion 1\n<|assistant|>\n"
    assert joined(first, "chosen", trained=True) == "yes<|im_end|>"
    assert joined(first, "rejected", trained=True) == "no<|im_end|>"
    assert equal["difference"]["equal"] and not first["difference"]["equal"]


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "row"), [
    ("sft", {"messages": chat("What is 2?", "Two.  Or  so.")}),
    ("sft", {"text": "Ünïcode 中文 and a tail"}),
    ("sft", {"prompt": "One, two,", "completion": " three."}),
    ("dpo", pair(1)),
    ("dpo", {"prompt": "q: ", "chosen": "yes", "rejected": "no"}),
])  # fmt: skip
def test_the_text_is_what_trl_itself_makes(
    previews: Previews, demo_assets: Path, tmp_path: Path, stage: str, row: dict[str, Any]
) -> None:
    write_rows(Path("rows"), [row] * 8)
    request = json.dumps({"stage": stage, "data": str(tmp_path / "rows"), "args": {}})
    program = [
        sys.executable,
        str(REPOSITORY / "tests/support/real_rows.py"),
        str(demo_assets / "model"),
    ]
    answered = subprocess.run(program, input=request, capture_output=True, text=True, check=True)
    expected = json.loads(answered.stdout)["rows"][0]
    names = ["text"] if stage == "sft" else ["prompt", "chosen", "rejected"]
    (shown,) = previews.data(
        write_stage(demo_assets / "model", stage, dataset_name="rows"), "--rows", "1"
    )["rows"]
    assert [joined(shown, name) for name in names] == expected
