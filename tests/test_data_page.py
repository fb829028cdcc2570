"""Every command on the page about data does what the page says, in a folder with one file of each
form.
"""

import csv
import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from conftest import REPOSITORY, find_checkout
from real_training import needs_open_instruct

from launcher.cli.main import main
from launcher.config.load import load
from launcher.errors import Exit

PAGE = REPOSITORY / "docs" / "data.md"
COUNT = 60


def commands() -> list[str]:
    """The lines of the page's bash blocks, in their order: a later one may need what an earlier one
    wrote.
    """
    lines = []
    for block in blocks("bash"):
        lines += block.splitlines()
    return lines


def blocks(language: str) -> list[str]:
    """The page's blocks of code in this language."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def is_preview(line: str) -> bool:
    return line.startswith("launch preview")


def chat(number: int, answer: str = "yes") -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": answer},
    ]


MakeRow = Callable[[int], Mapping[str, object]]


def write_lines(path: Path, make_row: MakeRow) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(make_row(number)) for number in range(COUNT)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_array(path: Path, make_row: MakeRow, count: int = COUNT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [make_row(number) for number in range(count)]
    path.write_text(json.dumps(rows), encoding="utf-8")


def write_csv(path: Path, make_row: MakeRow) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, make_row(0).keys())
        writer.writeheader()
        for number in range(COUNT):
            writer.writerow(make_row(number))


def messages(number: int) -> dict[str, object]:
    return {"messages": chat(number)}


def messages_as_text(number: int) -> dict[str, object]:
    return {"messages": json.dumps(chat(number))}


def faq(number: int) -> dict[str, object]:
    return {"question": f"question {number}", "answer": "yes"}


def alpaca(number: int) -> dict[str, str]:
    return {"instruction": f"question {number}", "input": "", "output": "yes"}


def alpaca_pair(number: int) -> dict[str, str]:
    return {"instruction": f"question {number}", "input": "", "chosen": "yes", "rejected": "no"}


def sharegpt(number: int) -> dict[str, object]:
    turns = [{"from": "human", "value": f"question {number}"}, {"from": "gpt", "value": "yes"}]
    return {"id": number, "conversations": turns}


def whole_pair(number: int) -> dict[str, object]:
    return {"chosen": chat(number, "yes"), "rejected": chat(number, "no")}


def ultrafeedback(number: int) -> dict[str, object]:
    return {"prompt": f"question {number}", **whole_pair(number)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    checkout = find_checkout()
    if checkout is not None:
        monkeypatch.setenv("LAUNCH_OPEN_INSTRUCT", str(checkout))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    work = tmp_path / "work"
    write_lines(work / "data/chats.jsonl", messages)
    write_lines(work / "pairs/train.jsonl", whole_pair)
    write_lines(work / "ultrafeedback.jsonl", ultrafeedback)
    write_array(work / "alpaca.json", alpaca)
    write_array(work / "alpaca_pairs.json", alpaca_pair)
    write_array(work / "sharegpt.json", sharegpt)
    write_array(work / "downloads/train.json", alpaca)
    write_array(work / "downloads/test.json", alpaca, count=8)
    write_csv(work / "faq.csv", faq)
    write_csv(work / "messages.csv", messages_as_text)
    (work / "mixture.yaml").write_text(mixture_of_the_page(), encoding="utf-8")
    (work / "trl.yaml").write_text(
        "model_name_or_path: org/tiny\n"
        "datasets:\n- path: alpaca\n- path: data\n"
        "test_split_size: 5\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(work)
    return work


def run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = shlex.split(line)
    assert program == "launch"
    code = main(words)
    output = capsys.readouterr()
    assert code == Exit.OK, f"{line}\n{output.err}{output.out}"


def mixture_of_the_page() -> str:
    """The page's example as a whole stage file."""
    (block,) = [block for block in blocks("yaml") if "datasets:" in block]
    head = "stage: sft\nbackend: trl\nbatch: {global: 4, per_device: 2}\n"
    return f"{head}{block}  model_name_or_path: org/tiny\n  output_dir: out\n"


def test_every_command_of_the_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in commands() if not is_preview(line)]
    assert len(lines) >= 12
    for line in lines:
        run(line, capsys)
    assert (folder / "alpaca/train.jsonl").read_text().count("\n") == COUNT
    assert (folder / "alpaca/test.jsonl").read_text().count("\n") == 8
    assert "assistant_only_loss" in (folder / "alpaca.yaml").read_text()
    assert load("from_trl.yaml").args["datasets"] == [{"path": "alpaca"}, {"path": "data"}]


def test_the_mixtures_of_the_page_have_the_rows_that_it_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in commands():
        if line.startswith("launch data convert alpaca") or "-o tulu.yaml" in line:
            assert main(shlex.split(line)[1:]) == Exit.OK
    capsys.readouterr()
    planned = []
    for line in commands():
        if line.startswith(("launch sft mixture.yaml", "launch sft tulu.yaml")):
            assert main([*shlex.split(line)[1:], "--format", "json"]) == Exit.OK
            plan = json.loads(capsys.readouterr().out)["data"]["plan"]
            planned.append(plan["gpus"][0]["rows"])
    # 90 % and all, less 50; 50 % and all, less a tenth; half and 20
    assert planned == [54 + 60 - 50, 30 + 60 - 9, 30 + 20]


@needs_open_instruct
@pytest.mark.slow
def test_every_preview_of_the_page_runs(
    folder: Path, demo_assets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # a folder of that name comes before the hub
    shutil.copytree(demo_assets / "model", folder / "Qwen/Qwen2.5-0.5B")
    previews = [line for line in commands() if is_preview(line)]
    # one of a single row starts the same processes as that of the whole file
    previews = [line for line in previews if "--row " not in line]
    assert len(previews) == 3
    for line in commands():
        if not is_preview(line):
            run(line, capsys)
    for line in previews:
        run(line, capsys)


def test_what_the_page_converts_trains_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`init` writes a valid file for each conversion of the page, and refuses each source."""
    for line in commands():
        if not line.startswith("launch data convert") or "--split" in line:
            continue
        words = shlex.split(line)
        source, output = words[3], words[5]
        stage = "dpo" if {"pairs", "ultrafeedback"} & set(re.split(r"[_.]", source)) else "sft"
        options = [stage, "--model", "org/tiny", "-o", f"{source}.yaml", "--data"]
        assert main(["init", *options, source]) == Exit.USAGE
        assert f"launch data convert {source}" in capsys.readouterr().err
        assert main(words[1:]) == Exit.OK
        assert main(["init", *options, output]) == Exit.OK, line
        capsys.readouterr()


def test_every_code_on_the_page_is_a_code() -> None:
    documented = (REPOSITORY / "docs/findings.md").read_text(encoding="utf-8")
    section = (
        PAGE.read_text(encoding="utf-8")
        .partition("## What launch looks at")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.+?) \|", section, re.M)
    codes = [code for row in rows for code in re.findall(r"`([a-z-]+)`", row)]
    assert len(codes) > 10
    assert [code for code in codes if f"`{code}`" not in documented] == []
