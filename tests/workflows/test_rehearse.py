"""`launch rehearse`: what the real scripts refuse is named by key and line, and nothing is left behind."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from fake_world import bearing, until
from real_training import needs_open_instruct, needs_trl
from typer.testing import CliRunner

from launcher.cli.commands import app
from launcher.cli.main import main
from launcher.errors import Exit, Finding, InvalidConfig, NotReady, launch_finding, not_ready
from launcher.machine.python import Trainer, find_trainer
from launcher.planning.collect import Scope, collect, judge
from launcher.planning.request import Request
from launcher.stage.stage import Judged
from launcher.upstream.trainers import BACKENDS
from launcher.workflows.rehearse import ask, memory, rehearsal
from launcher.workflows.rehearse.ask import Server, Servers
from launcher.workflows.rehearse.inside.records import PreparedRows, ServerRequest
from launcher.workflows.rehearse.result import Rehearsal

SFT = """\
stage: sft
backend: trl
deepspeed: none
batch: {global: 16, per_device: 16}
args:
  model_name_or_path: ASSETS/model
  dataset_name: ASSETS/data/sft
  max_length: 512
  warmup_steps: 2
"""


@pytest.fixture
def stage_file(tmp_path: Path, demo_assets: Path) -> Path:
    """A stage of the demo's model and data, for TRL."""
    path = tmp_path / "sft.yaml"
    path.write_text(SFT.replace("ASSETS", str(demo_assets)))
    return path


def rehearsed(path: Path, *overrides: str, rules: bool = True) -> Rehearsal:
    """The rehearsal of a stage file; without `rules` nothing that they refuse is left out of it."""
    judged, trainer = judge(Request(stage=None, config=path, overrides=overrides))
    judged = judged if rules else replace(judged, findings=())
    return rehearsal.rehearse(judged, trainer)


def faults(done: Rehearsal) -> dict[str | None, Finding]:
    return {one.key: one for one in done.findings if one.severity == "error"}


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert not [name for name in os.listdir(folder) if name.startswith("launch-rehearsal")]


@needs_trl
@pytest.mark.slow
def test_three_mistakes_are_three_findings_with_their_lines_and_nothing_is_left(
    tmp_path: Path, demo_assets: Path
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"quest": "a", "ans": "b"}\n' * 20)
    path = tmp_path / "wrong.yaml"
    text = SFT.replace("ASSETS/data/sft", str(tmp_path / "rows"))
    text = text.replace("ASSETS", str(demo_assets))
    path.write_text(
        text + "  lr_scheduler_type: cosin\n  use_peft: true\n  lora_target_modules: [q_prj]\n"
    )
    words = [sys.executable, "-m", "launcher", "rehearse", str(path), "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    told = json.loads(done.stdout)
    wrong = {one["key"]: one["line"] for one in told["findings"] if one["severity"] == "error"}
    lines = {"dataset_name": 7, "lr_scheduler_type": 10, "lora_target_modules": 12}
    assert wrong == {f"args.{key}": line for key, line in lines.items()}


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "key", "words"), [
    (["dataset_kwargs={skip_prepare_dataset: true}"], "dataset_kwargs", "No columns in the dataset"),
    (["lr_scheduler_kwargs={min_lr: 1.0e-6}", "lr_scheduler_type=cosine"], "lr_scheduler_kwargs",
     "unexpected keyword argument 'min_lr'"),
    (["learning_rate=1e-30"], "learning_rate", "change no weight"),
    (["learning_rate=1e30"], "learning_rate", "make weights"),
    (["use_peft=true", "lora_target_modules=[q_prj]"], "lora_target_modules", "q_prj not found in the base model"),
    (["model_init_kwargs={foo: 1}"], "model_init_kwargs", "unexpected keyword argument 'foo'"),
])  # fmt: skip
def test_what_only_shows_in_the_real_script(
    stage_file: Path, overrides: list[str], key: str, words: str
) -> None:
    stage_file.write_text(
        stage_file.read_text() + "".join(f"  {one.replace('=', ': ')}\n" for one in overrides[:1])
    )
    found = faults(rehearsed(stage_file, *overrides[1:], rules=False))
    assert list(found) == [f"args.{key}"]
    (one,) = found.values()
    assert words in one.message and (one.layer, one.code) == ("trainer", "trainer-refuses")


@needs_trl
@pytest.mark.slow
def test_a_sound_stage_is_clean_tells_its_rows_and_is_remembered(stage_file: Path) -> None:
    first = rehearsed(stage_file)
    assert not faults(first)
    assert first.rows is not None and first.rows.rows == 64 and first.row_tokens is not None
    assert len(first.losses) == 2 and not first.stand_ins and not first.remembered
    again = rehearsed(stage_file)
    assert again.remembered and again.rows == first.rows
    data = Path(SFT and str(stage_file))
    data.write_text(data.read_text().replace("max_length: 512", "max_length: 60"))
    other = rehearsed(stage_file)
    assert not other.remembered
    assert "cut-rows" in {one.code for one in other.findings}


@needs_trl
@pytest.mark.slow
def test_what_is_not_here_has_a_stand_in_and_what_a_cpu_lacks_is_said(tmp_path: Path) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text(
        "stage: dpo\nbackend: trl\ndeepspeed: zero2\nargs:\n"
        "  model_name_or_path: Qwen/Qwen2.5-7B\n  dataset_name: org/pairs\n"
        "  use_liger_kernel: true\n  fsdp: full_shardd\n  attn_implementation: flash_attention_2\n"
    )
    done = rehearsed(path, rules=False)
    assert set(faults(done)) == {"args.fsdp"}
    assert {"DeepSpeed", "FSDP", "Liger's kernels", "the attention kernels of GPUs"} == set(
        done.left_out
    )
    assert len(done.stand_ins) == 3 and done.row_tokens is None
    said = [one for one in done.findings if one.code in {"not-rehearsed", "stand-in"}]
    assert len(said) == 7 and {one.severity for one in said} == {"note"}


@needs_trl
@pytest.mark.slow
def test_a_stand_in_for_the_tokenizer_is_no_reason_to_refuse_the_stage(stage_file: Path) -> None:
    done = rehearsed(
        stage_file, "model_name_or_path=org/model", "assistant_only_loss=true", rules=False
    )
    assert not faults(done)
    assert done.rows is not None and 0 < done.rows.trained < done.rows.tokens


@needs_trl
@pytest.mark.slow
def test_numbers_are_those_of_the_files_own_rows(stage_file: Path, tmp_path: Path) -> None:
    done = rehearsed(stage_file)
    assert done.rows is not None and (done.rows.read, done.rows.total) == (64, 1200)
    assert next(iter(done.lines())).startswith("64 of 1,200 rows: ")
    # none of the rows that stand in for those that are refused, or are not here
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"quest": "a", "ans": "b"}\n' * 20)
    for name in (str(tmp_path / "rows"), "org/chats"):
        made_up = rehearsed(stage_file, f"dataset_name={name}", rules=False)
        assert any("made-up rows" in text for text in made_up.stand_ins)
        assert (made_up.rows, made_up.losses, made_up.row_tokens) == (None, (), None)
        assert [line for line in made_up.lines() if "tokens" in line or "loss" in line] == []


def write_chats(folder: Path, *, too_long: int, short: int) -> None:
    """Chats for SFT, some with a question that fills 128 tokens, in turn as long as there are both."""
    rows = []
    for number in range(max(too_long, short)):
        for question, wanted in (("why " * 200, too_long), ("why?", short)):
            if number < wanted:
                turns = [("user", question), ("assistant", "because it is so")]
                rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@needs_trl
@pytest.mark.slow
def test_rows_that_trl_drops_are_counted_with_the_reason(stage_file: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "half", too_long=40, short=40)
    write_chats(tmp_path / "few", too_long=5, short=25)
    for name, said in (
        ("half", "32 of the first 64 rows are dropped: "),
        ("few", "5 of 30 rows are dropped: "),
    ):
        overrides = [
            f"dataset_name={tmp_path / name}",
            "assistant_only_loss=true",
            "max_length=128",
        ]
        done = rehearsed(stage_file, *overrides)
        (finding,) = [one for one in done.findings if one.code == "rows-dropped"]
        assert (finding.severity, finding.key) == ("warning", "args.max_length")
        assert finding.message.startswith(said) and "within `max_length`" in finding.message
    assert next(iter(done.lines())).startswith("30 rows, 25 once prepared: ")
    # packing makes other rows of them, which are not dropped ones
    packed = rehearsed(
        stage_file, f"dataset_name={tmp_path / 'few'}", "packing=true", "max_length=128"
    )
    assert "rows-dropped" not in {one.code for one in packed.findings}


@needs_open_instruct
@pytest.mark.slow
def test_rows_that_open_instruct_drops_are_counted_with_the_reason(
    tmp_path: Path, demo_assets: Path
) -> None:
    write_chats(tmp_path / "few", too_long=5, short=25)
    few = tmp_path / "few" / "train.jsonl"
    # all rows once; or 200 of 30, for which open-instruct repeats them
    for amount, said in (
        ("1.0", "5 of 30 rows are dropped: "),
        ("200", "10 of the first 64 rows are dropped: "),
    ):
        mixed = f"[{few}, '{amount}']"
        path = open_instruct_file(
            tmp_path, demo_assets, "sft", dataset_mixer_list=mixed, max_seq_length=128
        )
        (finding,) = [one for one in rehearsed(path).findings if one.code == "rows-dropped"]
        assert finding.message.startswith(said) and "within `max_seq_length`" in finding.message


# a template that refuses the system role, as many do
NO_SYSTEM_ROLE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
)


def write_late(folder: Path, *roles: str, before: int = 150) -> Path:
    """Chats of a user and an assistant, and three with other roles after so many of them."""
    usual = ("user", "assistant")
    rows = []
    for number in range(before + 3):
        shown = usual if number < before else roles
        rows.append({"messages": [{"role": role, "content": f"{role} {number}"} for role in shown]})
    folder.mkdir()
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def strict_model(folder: Path, assets: Path) -> Path:
    shutil.copytree(assets / "model", folder)
    (folder / "chat_template.jinja").write_text(NO_SYSTEM_ROLE)
    return folder


@needs_trl
@pytest.mark.slow
def test_a_kind_of_row_that_comes_late_is_rehearsed_too(
    stage_file: Path, tmp_path: Path, demo_assets: Path
) -> None:
    late = write_late(tmp_path / "late", "system", "user", "assistant")
    data = f"dataset_name={late.parent}"
    # with the demo's template nothing is wrong with it
    sound = rehearsed(stage_file, data)
    assert not faults(sound)
    assert next(iter(sound.lines())).startswith(
        "64 of 153 rows and 1 further row of another kind: "
    )
    assert sound.rows is not None and sound.rows.further == 1
    model = strict_model(tmp_path / "strict", demo_assets)
    (fault,) = faults(
        rehearsed(stage_file, data, f"model_name_or_path={model}", rules=False)
    ).values()
    assert (fault.code, fault.key) == ("trainer-refuses", "args.dataset_name")
    assert "no system role" in fault.message
    assert fault.help is not None and f"{late}:151" in fault.help


@needs_trl
@pytest.mark.slow
def test_no_row_is_named_where_the_first_rows_are_refused_already(
    stage_file: Path, tmp_path: Path, demo_assets: Path
) -> None:
    early = write_late(tmp_path / "early", "system", "user", "assistant", before=1)
    rows = early.read_text()
    other = {"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": "t"}]}
    early.write_text(rows * 40 + json.dumps(other) + "\n")
    model = strict_model(tmp_path / "strict", demo_assets)
    overrides = (f"dataset_name={early.parent}", f"model_name_or_path={model}")
    (fault,) = faults(rehearsed(stage_file, *overrides, rules=False)).values()
    assert "no system role" in fault.message
    assert fault.help is None or str(early) not in fault.help


@needs_open_instruct
@pytest.mark.slow
def test_open_instruct_meets_rows_of_late_kinds_too(tmp_path: Path, demo_assets: Path) -> None:
    late = write_late(tmp_path / "late", "system", "user", "assistant")
    model = strict_model(tmp_path / "strict", demo_assets)
    mixed = f"[{late}, '1.0']"
    path = open_instruct_file(tmp_path, demo_assets, "sft", dataset_mixer_list=mixed)
    done = rehearsed(path)
    assert not faults(done) and done.rows is not None and done.rows.further == 1
    strict = {"model_name_or_path": model, "chat_template_name": None, "dataset_mixer_list": mixed}
    path = open_instruct_file(tmp_path, demo_assets, "sft", **strict)
    (fault,) = faults(rehearsed(path, rules=False)).values()
    assert "no system role" in fault.message and fault.key == "args.dataset_mixer_list"


def open_instruct_file(folder: Path, assets: Path, stage: str, **args: Any) -> Path:
    """A stage of the demo's data for open-instruct; None leaves an argument out."""
    names = {"sft": "dataset_mixer_list", "dpo": "mixer_list"}
    data = args.pop("data", assets / "data" / stage / "train.jsonl")
    given = {
        "model_name_or_path": f"{assets}/model", "chat_template_name": "tulu", names[stage]: f"[{data}, '200']",
        "max_seq_length": 256, "push_to_hub": "false", "try_launch_beaker_eval_jobs": "false", **args,
    }  # fmt: skip
    lines = [f"  {name}: {value}\n" for name, value in given.items() if value is not None]
    path = folder / f"{stage}.yaml"
    path.write_text(
        f"stage: {stage}\nbackend: open_instruct\ndeepspeed: none\nargs:\n{''.join(lines)}"
    )
    return path


@needs_trl
@pytest.mark.slow
def test_trl_accumulates_a_loss_once_a_step(stage_file: Path, demo_assets: Path) -> None:
    once = rehearsed(stage_file, "dataset_num_proc=1")
    text = stage_file.read_text().replace("batch: {global: 16, per_device: 16}\n", "")
    stage_file.write_text(
        text + "  per_device_train_batch_size: 4\n  gradient_accumulation_steps: 4\n"
    )
    accumulated = rehearsed(stage_file)
    assert len(accumulated.losses) == len(once.losses) == 2
    # random weights: the logarithm of the size of the vocabulary
    assert all(loss == pytest.approx(6.93, abs=0.1) for loss in (*accumulated.losses, *once.losses))
    stage_file.write_text(
        stage_file.read_text().replace("stage: sft", "stage: dpo").replace("data/sft", "data/dpo")
    )
    assert list(rehearsed(stage_file).losses) == [pytest.approx(0.693, abs=1e-3)] * 2


@needs_open_instruct
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "loss", "within"), [("sft", 6.93, 0.1), ("dpo", 0.693, 0.02)])
def test_open_instruct_accumulates_a_loss_once_a_step(
    stage: str, loss: float, within: float, tmp_path: Path, demo_assets: Path
) -> None:
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    done = rehearsed(open_instruct_file(tmp_path, demo_assets, stage, **split))
    assert list(done.losses) == [pytest.approx(loss, abs=within)] * 2


@needs_open_instruct
@pytest.mark.slow
def test_what_open_instruct_trains_is_not_refused(tmp_path: Path, demo_assets: Path) -> None:
    """Without a length; with a tokenizer that has no pad token, or whose pad token ends answers too."""
    for name in ("whole", "no_pad", "pad_is_eos"):
        folder = tmp_path / name
        shutil.copytree(demo_assets / "model", folder)
        config = folder / "tokenizer_config.json"
        tokenizer = json.loads(config.read_text())
        if name == "no_pad":
            del tokenizer["pad_token"]
        if name == "pad_is_eos":
            tokenizer["pad_token"] = tokenizer["eos_token"]
        config.write_text(json.dumps(tokenizer))
        length = None if name == "whole" else 256
        path = open_instruct_file(
            tmp_path, demo_assets, "sft", model_name_or_path=folder, max_seq_length=length
        )
        done = rehearsed(path)
        assert not faults(done) and not done.failed and len(done.losses) == 2, name


@needs_open_instruct
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_open_instructs_own_scripts(stage: str, tmp_path: Path, demo_assets: Path) -> None:
    data, cache = ("dataset_mixer_list", "dataset_") if stage == "sft" else ("mixer_list", "")
    path = tmp_path / f"{stage}.yaml"
    path.write_text(
        f"stage: {stage}\nbackend: open_instruct\nargs:\n"
        f"  model_name_or_path: {demo_assets}/model\n  chat_template_name: tulu\n"
        f"  {data}: [{demo_assets}/data/{stage}/train.jsonl, '200']\n"
        f"  max_seq_length: 256\n  {cache}transform_fn: [nothing_such]\n"
        "  push_to_hub: false\n  try_launch_beaker_eval_jobs: false\n"
    )
    done = rehearsed(path, rules=False)
    assert {*faults(done)} == {f"args.{cache}transform_fn"}
    assert done.rows is not None and done.rows.rows == 64 and len(done.losses) == 2
    assert not (tmp_path / "output").exists()


# Values that each trainer refuses: what of the file is named for it, None where it is nothing of the file's alone.
Refusals = list[tuple[dict[str, Any], str | None]]
REFUSALS: dict[tuple[str, str], Refusals] = {
    ("trl", "sft"): [
        ({"lr_scheduler_type": "cosinus"}, "lr_scheduler_type"),
        ({"seed": -1}, "seed"),
        ({"optim": "nonsense"}, "optim"),
        ({"weight_decay": ".nan"}, "weight_decay"),
        ({"learning_rate": ".nan"}, "learning_rate"),
        ({"max_length": 0}, "max_length"),
        ({"loss_type": "nonsense"}, "loss_type"),
        ({"dataset_train_split": "nowhere"}, "dataset_train_split"),
        ({"pad_token": "<nothing>"}, "pad_token"),
        ({"eos_token": "<nothing>"}, "eos_token"),
        ({"chat_template_path": "/nowhere/x.jinja"}, "chat_template_path"),
        ({"use_peft": True, "lora_r": 0}, "lora_r"),
        ({"use_peft": True, "lora_dropout": 1.5}, "lora_dropout"),
        ({"neftune_noise_alpha": -1.0}, "neftune_noise_alpha"),
        ({"accelerator_config": "{nonsense: 1}"}, "accelerator_config"),
        ({"model_init_kwargs": "{foo: 1}"}, "model_init_kwargs"),
        ({"truncation_mode": "middle"}, "truncation_mode"),
        ({"fsdp": "nonsense"}, "fsdp"),
    ],
    ("trl", "dpo"): [
        ({"loss_type": "[nonsense]"}, "loss_type"),
        ({"f_divergence_type": "kl"}, "f_divergence_type"),
        ({"loss_type": "[sigmoid, sft]", "loss_weights": "[1.0]"}, "loss_type"),
        ({"use_weighting": True, "loss_type": "[aot]"}, "loss_type"),
        ({"beta": ".nan"}, "beta"),
    ],
    ("open_instruct", "sft"): [
        ({"load_balancing_loss": True}, "load_balancing_loss"),
        ({"weight_decay": ".nan"}, "weight_decay"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"lr_scheduler_type": "cosinus"}, "lr_scheduler_type"),
        ({"seed": -1}, "seed"),
        ({"use_lora": True, "lora_rank": 0}, "lora_rank"),
        ({"dataset_transform_fn": "[nothing, x]"}, "dataset_transform_fn"),
        ({"dataset_mixer_list_splits": "[nowhere]"}, "dataset_mixer_list_splits"),
        ({"max_seq_length": 0}, "max_seq_length"),
        ({"tokenizer_name_or_path": "/nowhere"}, "tokenizer_name_or_path"),
    ],
    ("open_instruct", "dpo"): [
        ({"loss_type": "wpo"}, "loss_type"),
        # two mistakes are two findings
        ({"loss_type": "wpo", "learning_rate": -1.0}, "loss_type learning_rate"),
        ({"weight_decay": ".nan"}, "weight_decay"),
        ({"loss_type": "nonsense"}, "loss_type"),
        ({"transform_fn": "[nothing]"}, "transform_fn"),
        ({"lr_scheduler_type": "cosinus"}, "lr_scheduler_type"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "stage"),
    [
        pytest.param("trl", "sft", marks=needs_trl),
        pytest.param("trl", "dpo", marks=needs_trl),
        pytest.param("open_instruct", "sft", marks=needs_open_instruct),
        pytest.param("open_instruct", "dpo", marks=needs_open_instruct),
    ],
)
def test_a_refusal_is_blamed_on_its_cause(
    backend: str, stage: str, tmp_path: Path, demo_assets: Path
) -> None:
    wrong = []
    with Servers() as servers:
        for args, cause in REFUSALS[backend, stage]:
            if backend == "trl":
                path = tmp_path / "stage.yaml"
                text = (
                    SFT.replace("ASSETS", str(demo_assets))
                    .replace("sft", stage)
                    .replace("512", "128")
                )
                given = [
                    line for line in text.splitlines() if line.partition(":")[0].strip() not in args
                ]
                path.write_text(
                    "\n".join([*given, *(f"  {name}: {value}" for name, value in args.items()), ""])
                )
            else:
                path = open_instruct_file(tmp_path, demo_assets, stage, **args)
            judged, trainer = judge(Request(stage=None, config=path))
            done = rehearsal.rehearse(replace(judged, findings=()), trainer, servers, anew=True)
            named = [one.key for one in done.findings if one.code == "trainer-refuses"]
            causes = [f"args.{name}" for name in (cause or "").split()]
            if sorted(map(str, named)) != sorted(causes) or done.failed:
                wrong.append(f"{args}: {[one.message for one in done.findings]}")
    assert not wrong, "\n".join(wrong)


ENDINGS = {
    "hangs": "import time; time.sleep(900)",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "exits": "import os; os._exit(7)",
    "fills": "import errno; raise OSError(errno.ENOSPC, 'No space left on device')",
}


@pytest.fixture
def ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A server whose stage ends as the request says."""
    body = "def load(script):\n    pass\ndef run(request, response):\n    exec(request.words[0])\n"
    copy_server(tmp_path)
    (tmp_path / "inside" / "made_stage.py").write_text(body)
    monkeypatch.setattr(ask, "SERVER", tmp_path / "server.py")
    return find_trainer(Path(sys.executable), None)


def copy_server(folder: Path) -> None:
    """The server without the code of any stage."""
    (folder / "inside").mkdir(parents=True)
    for name in ("server.py", "inside/__init__.py", "inside/calls.py", "inside/records.py"):
        shutil.copy(ask.SERVER.parent / name, folder / name)


def code_request(code: str) -> ServerRequest:
    return ServerRequest(kind="run", words=[code])


def test_however_the_script_ends_there_is_one_answer_and_no_folder(ending: Trainer) -> None:
    with Server(ending, "made", "sft", None) as server:
        hung, died, left, full = server.ask(*map(code_request, ENDINGS.values()), limit_s=2)
        (fine,) = server.ask(code_request("response.phase = 'train'"))
        said = [ask.crash(response, server.log(response)) for response in (hung, died, left)]
    assert hung.hung and hung.phase is None and "made_stage" in hung.stack
    assert [one.code for one in said] == ["rehearsal-hangs", "rehearsal-crash", "rehearsal-crash"]
    assert "SIGSEGV" in said[1].message and "7" in said[2].message
    assert full.refusal is not None and full.refusal.errno == 28
    assert fine.phase == "train"


# A stage's code around a trainer's: the trainer is what does not lie in launch's folder, as this text here.
AROUND = """
from .calls import Refused, call_trainer, pass_on
def load(script): pass
def fault(): None + 1
def replacement(function): return pass_on(function)
def reload(function): replacement(function)
def run(request, response): exec(request.words[0], {**globals()})
"""
BREAKS = "\ndef breaks(): raise KeyError('theirs')\ndef calls(f, *args): f(*args)\n"
RAISED: dict[str, tuple[str, bool]] = {
    "launch's code": ("fault()", True),
    "launch's code that the trainer called back": ("call_trainer(calls, fault)", True),
    "the trainer": ("call_trainer(breaks)", False),
    "the trainer, in what launch replaces": ("call_trainer(calls, replacement, breaks)", False),
    "what launch replaces, called by launch": ("reload(breaks)", True),
    "the same, called back by the trainer": ("call_trainer(calls, reload, breaks)", True),
    "the trainer, about a fault of launch's": (
        "def handles():\n try: fault()\n except TypeError as error: raise ValueError('theirs') from error\n"
        "call_trainer(handles)", True),
    "the trainer, while it handles a fault of launch's": (
        "def handles():\n try: fault()\n except TypeError: raise ValueError('theirs')\ncall_trainer(handles)", True),
    "the trainer, about a fault of its own": (
        "def handles():\n try: breaks()\n except KeyError as error: raise ValueError('theirs') from error\n"
        "call_trainer(handles)", False),
    "launch's word about the trainer's result": ("raise Refused('no row is left')", False),
}  # fmt: skip


def test_who_raised_an_exception_is_told_by_the_frames(ending: Trainer, tmp_path: Path) -> None:
    (tmp_path / "inside" / "made_stage.py").write_text(AROUND)
    with Server(ending, "made", "sft", None) as server:
        requests = [code_request(BREAKS + code) for code, _ in RAISED.values()]
        responses = server.ask(*requests)
    blamed = {}
    for who, response in zip(RAISED, responses, strict=True):
        assert response.refusal is not None
        blamed[who] = response.refusal.by_launch
    assert blamed == {who: own for who, (_, own) in RAISED.items()}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal of TRL whose code fails, in a moment."""
    folder = tmp_path / "broken"
    copy_server(folder)
    text = "def load(script):\n    pass\ndef run(request, response):\n    min(None, 256)\n"
    (folder / "inside" / "trl_stage.py").write_text(text)
    (folder / "inside" / "shrink.py").write_text("from .trl_stage import run as run\n")
    monkeypatch.setattr(ask, "SERVER", folder / "server.py")


@needs_trl
@pytest.mark.usefixtures("broken")
def test_a_failure_of_launchs_own_refuses_nothing(
    stage_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for strict in ([], ["--strict"]):
        # the command whose work it was says that it is not done
        assert main(["rehearse", str(stage_file), "--format", "json", *strict]) == Exit.BUG
        told = json.loads(capsys.readouterr().out)
        (failed,) = [one for one in told["findings"] if one["code"] == "rehearsal-failed"]
        assert failed["severity"] == "note" and failed["key"] is None
        assert "launch could not rehearse this: TypeError" in failed["message"]
        assert "inside/trl_stage.py:4" in failed["message"]
        assert not [one for one in told["findings"] if one["severity"] == "error"]
        assert (told["data"]["rows"], told["data"]["losses"]) == ({}, [])
        # it is tried again the next time
        assert not told["data"]["remembered"]
    assert (
        main(["validate-config", "--deep", "--strict", str(stage_file), "--format", "json"])
        == Exit.OK
    )
    assert [one["valid"] for one in json.loads(capsys.readouterr().out)["data"]["files"]] == [True]
    monkeypatch.delenv(rehearsal.VARIABLE)
    assert begun(stage_file, by_itself=True) == ["rehearsal-failed"]
    assert begun(stage_file, by_itself=True, rehearse=True) == ["rehearsal-failed"]


def test_every_entry_script_says_how_it_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gets what stands in the script's description; of a script without one it knows nothing."""
    monkeypatch.syspath_prepend(ask.SERVER.parent)
    for backend in ("trl", "open_instruct"):
        stage = importlib.import_module(f"inside.{backend}_stage")
        for key, entry in BACKENDS[backend].STAGES.items():
            facts = ask.script_facts(backend, key)
            assert (facts is None) == (entry.rehearsal is None)
            assert facts is None or facts.adapts in ("", *getattr(stage, "ADAPTERS", ()))
        assert ask.script_facts(backend, "reward") is None


def test_a_launch_that_was_killed_leaves_no_folder(ending: Trainer) -> None:
    server = Server(ending, "made", "sft", None).__enter__()
    assert server._process.stdin is not None
    server._process.stdin.close()
    server._process.wait(timeout=20)
    assert not server.scratch.exists()


REHEARSES = """
import sys, tempfile
from pathlib import Path
from launcher.machine.python import find_trainer
from launcher.workflows.rehearse import ask
from launcher.workflows.rehearse.inside.records import ServerRequest
ask.SERVER = Path(sys.argv[1])
with ask.Servers() as servers:
    server = servers.of(find_trainer(Path(sys.executable), None), "made", "sft", None)
    print("ready", flush=True)
    server.ask(ServerRequest(kind="run", words=[sys.argv[2]]))
"""
STAGES_OF_A_REHEARSAL = {
    "loading": ("import time\nprint('loading', flush=True)\ntime.sleep(900)\n", ""),
    "working": ("", "import subprocess; subprocess.run(['sleep', '900'])"),
}


@pytest.mark.parametrize("stage", STAGES_OF_A_REHEARSAL)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whatever_ends_a_rehearsal_nothing_of_it_is_left(
    ending: Trainer, tmp_path: Path, number: signal.Signals, stage: str
) -> None:
    load, code = STAGES_OF_A_REHEARSAL[stage]
    module = tmp_path / "inside" / "made_stage.py"
    module.write_text(module.read_text() + load)
    environ = {**os.environ, "REHEARSAL_TEST": str(tmp_path)}
    words = [sys.executable, "-c", REHEARSES, str(ask.SERVER), code]
    running = subprocess.Popen(
        words, env=environ, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    temporary = tmp_path / "temporary"
    until(lambda: list(temporary.glob("launch-rehearsal-*/*.log")))
    until(lambda: len(bearing("REHEARSAL_TEST", tmp_path)) >= (2 if stage == "loading" else 4))
    time.sleep(0.3)
    running.send_signal(number)
    running.communicate(timeout=60)
    until(lambda: not list(temporary.iterdir()))
    until(lambda: not bearing("REHEARSAL_TEST", tmp_path))


def test_a_python_without_the_packages_is_not_ready(
    ending: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inside" / "made_stage.py").write_text("import no_such_package\n")
    with pytest.raises(Exception, match="No module named 'no_such_package'") as caught:
        Server(ending, "made", "sft", None).__enter__()
    assert type(caught.value).__name__ == "NotReady"


FAMILIES = (
    "llama", "mistral", "smollm3", "granite", "qwen2", "qwen3", "olmo", "olmo2", "olmo3", "phi3",
    "gemma", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss",
    "qwen3_next", "falcon_h1", "deepseek_v3", "glm4", "glm4_moe", "gpt2", "opt", "bloom", "gpt_neox",
    "phi", "cohere2", "stablelm", "starcoder2", "mamba2", "bamba", "jamba", "ernie4_5",
    "seed_oss", "exaone4", "falcon", "granitemoe", "lfm2",
)  # fmt: skip


@needs_trl
@pytest.mark.slow
def test_most_families_of_transformers_shrink() -> None:
    code = (
        "import sys, json, warnings; warnings.simplefilter('ignore'); sys.path.insert(0, sys.argv[1])\n"
        "import torch, transformers; torch.set_num_threads(1); transformers.logging.set_verbosity_error()\n"
        "from inside import shrink\n"
        "failed = {}\n"
        "for kind in sys.argv[2:]:\n"
        "    try:\n"
        "        shrink.shrink(transformers.AutoConfig.for_model(kind))\n"
        "    except Exception as error:\n"
        "        failed[kind] = f'{type(error).__name__}: {error}'[:200]\n"
        "print(json.dumps(failed))\n"
    )
    folder = str(ask.SERVER.parent)
    done = subprocess.run(
        [sys.executable, "-c", code, folder, *FAMILIES], capture_output=True, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    failed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(failed) <= 2, failed


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which stage files were rehearsed; the trainer refuses a learning rate of 7."""
    seen: list[str] = []

    def rehearse(judged: Judged, *_: object, **__: object) -> Rehearsal:
        seen.append(judged.config.path.name)
        refused = launch_finding("error", "trainer-refuses", "no", None)
        warned = launch_finding("warning", "cut-rows", "half of the rows are cut", None)
        wrong = judged.config.args.get("learning_rate") == 7
        return Rehearsal(findings=(refused,) if wrong else (warned,), seconds=1)

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    monkeypatch.delenv(rehearsal.VARIABLE)
    return seen


def begun(path: Path, *overrides: str, by_itself: bool, rehearse: bool | None = None) -> list[str]:
    request = Request(stage=None, config=path, overrides=overrides, gpus=0, rehearse=rehearse)
    stages = {"": collect(request, Scope.PLAN)}
    return [one.code for one in rehearsal.require(stages, print, by_itself=by_itself)]


@needs_trl
def test_who_asks_for_a_rehearsal(
    stage_file: Path, rehearsals: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = stage_file.read_text()
    for in_file, by_itself, option, expected in (
        ("", True, None, 1), ("", False, None, 0), ("", False, True, 1), ("", True, False, 0),
        ("rehearse: true\n", False, None, 1), ("rehearse: off\n", True, None, 0),
        ("rehearse: off\n", True, True, 1),
    ):  # fmt: skip
        rehearsals.clear()
        stage_file.write_text(in_file + text)
        codes = begun(stage_file, by_itself=by_itself, rehearse=option)
        assert (len(rehearsals), len(codes)) == (expected, expected), (in_file, by_itself, option)
    # a variable switches off what nobody asked for
    stage_file.write_text(text)
    monkeypatch.setenv(rehearsal.VARIABLE, "0")
    assert begun(stage_file, by_itself=True) == []
    assert begun(stage_file, by_itself=True, rehearse=True) == ["cut-rows"]


@needs_trl
def test_what_the_trainer_refuses_does_not_start(stage_file: Path, rehearsals: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        begun(stage_file, "learning_rate=7", by_itself=True)
    assert [one.code for one in caught.value.findings] == ["trainer-refuses"]
    # what rules refuse is not rehearsed
    with pytest.raises(InvalidConfig, match="lr_scheduler_type"):
        begun(stage_file, "lr_scheduler_type=none", by_itself=True)
    assert rehearsals == [stage_file.name]


@needs_trl
def test_only_who_asked_is_refused_for_a_python_that_cannot_rehearse(
    stage_file: Path, rehearsals: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rehearse(*_: object, **__: object) -> Rehearsal:
        raise not_ready("rehearsal-imports", "no trl")

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    assert begun(stage_file, by_itself=True) == ["not-rehearsed"]
    with pytest.raises(NotReady):
        begun(stage_file, by_itself=True, rehearse=True)


@needs_trl
@pytest.mark.parametrize("command", [
    ("sft", "FILE", "--gpus", "0", "--rehearse"),
    ("ladder", "FILE", "--gpus", "0", "--steps", "5"),
    ("bench", "FILE", "--cpu", "--vary", "learning_rate=7,1e-3", "--steps", "2"),
    ("tune", "FILE", "--cpu", "--row-tokens", "80:200", "--budget", "60s"),
])  # fmt: skip
def test_commands_that_start_something_long_rehearse_first(
    command: tuple[str, ...], stage_file: Path, rehearsals: list[str], tmp_path: Path
) -> None:
    rate = "7" if command[0] != "bench" else "1e-4"
    stage_file.write_text(
        stage_file.read_text() + f"  learning_rate: {rate}\n  output_dir: {tmp_path}/out\n"
    )
    words = [str(stage_file) if word == "FILE" else word for word in command]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, InvalidConfig), done.output
    codes = [one.code for one in done.exception.findings if one.severity == "error"]
    assert codes == ["trainer-refuses"]
    assert not (tmp_path / "out").exists()


@needs_trl
@pytest.mark.slow
def test_several_files_at_once(stage_file: Path) -> None:
    other = stage_file.with_name("other.yaml")
    other.write_text(stage_file.read_text() + "  dataset_kwargs: {skip_prepare_dataset: true}\n")
    words = ["validate-config", "--deep", str(stage_file), str(other), "--format", "json"]
    told = json.loads(CliRunner().invoke(app, words).stdout)
    assert [one["valid"] for one in told["data"]["files"]] == [True, False]
    errors = [one["code"] for one in told["findings"] if one["severity"] == "error"]
    assert errors == ["trainer-refuses"]


@needs_trl
def test_a_plan_takes_the_length_of_rows_from_an_earlier_rehearsal(
    stage_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["plan", str(stage_file), "--gpus", "1", "--gpu", "H100"]
    seen = "rows: the first rows, as a rehearsal saw them"
    assert seen not in CliRunner().invoke(app, words).stdout
    rows = PreparedRows(rows=64, tokens=64 * 79, longest=159)
    earlier = Rehearsal(findings=(), seconds=1, rows=rows)
    monkeypatch.setattr(memory, "recall", lambda *_: earlier)
    assert seen in CliRunner().invoke(app, words).stdout


@needs_trl
def test_what_is_only_parsed_is_remembered_by_its_value_too(stage_file: Path) -> None:
    def recalled(*overrides: str) -> object:
        judged, trainer = judge(Request(stage=None, config=stage_file, overrides=overrides))
        return memory.recall(judged, trainer)

    judged, trainer = judge(Request(stage=None, config=stage_file, overrides=("fsdp=full_shard",)))
    memory.keep(judged, trainer, Rehearsal(findings=(), seconds=1))
    assert recalled("fsdp=full_shard") is not None
    assert recalled("fsdp=nonsense") is None
