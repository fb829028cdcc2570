"""`launch chat`, `launch merge`, `launch card`: commands about a trained model."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from typer import Argument, Option

from launcher.cli.options import FORMAT, Format, answer, app, require_run, run_names
from launcher.errors import Exit, LaunchError, not_ready, unwritable, usage
from launcher.redaction import Redactor
from launcher.report import console

if TYPE_CHECKING:
    from launcher.runs.rundir import RunFolder
    from launcher.trained.chat import Chat, Reply
    from launcher.trained.model import Base, TrainedModel

MODEL = Argument(
    ...,
    metavar="RUN|FOLDER",
    help="a run (`launch runs`), the beginning of its name, `last`, or the folder of a model",
    show_default=False,
    autocompletion=run_names,
)
PYTHON = Option(
    None,
    "--python",
    metavar="PATH",
    help="Python with the trainer's packages",
    show_default="LAUNCH_PYTHON, the one that trained it, this one",
)
DEVICES = Option(
    None, "--devices", metavar="0,1", help="use these GPUs", show_default="all that are visible"
)
CPU = Option(False, "--cpu", help="use no GPU")
_BEGIN_ANEW = "/new"
_HINT = (
    f"an empty line does nothing; {_BEGIN_ANEW} begins a new conversation, "
    "Ctrl-C ends an answer, Ctrl-D the chat"
)


def find_model(target: str, base: Base | None = None) -> TrainedModel:
    """The model of a folder, of a run, or of the last run of a pipeline.

    `base` replaces the recorded base. Raises UsageError if there is no such run, NotReady if it has
    no final model.
    """
    from launcher.runs import rundir
    from launcher.trained import model

    folder = Path(target)
    if folder.is_dir() and not rundir.is_run(folder):
        saved = model.find_in_folder(folder, base)
        if saved is not None:
            return saved
        run = model.find_writer(folder)
        if run is not None:
            return model.find_of_run(run, base)
    campaign = rundir.find_campaign(target)
    if campaign is not None:
        return model.find_of_run(_find_last_run(campaign.path), base)
    if folder.is_dir() and not rundir.is_run(folder):
        message = f"{target} holds no model: no config.json, no adapter_config.json"
        raise not_ready(
            "no-final-model",
            message,
            "launch runs lists runs; give a run or the folder of its model",
        )
    return model.find_of_run(require_run(target, "run or folder"), base)


def _find_last_run(campaign: Path) -> RunFolder:
    """The last run of a pipeline. Raises NotReady for a bench, ladder or tune."""
    from launcher.runs import rundir

    if not (campaign / rundir.PIPELINE_RECORD).is_file():
        message = f"{campaign.name} is no run: trials of bench, ladder and tune leave no model"
        raise not_ready(
            "no-final-model", message, "launch runs lists the others", file=str(campaign)
        )
    members = rundir.list_campaign_runs(campaign)
    if not members:
        raise not_ready(
            "no-final-model", f"no stage of {campaign.name} has begun", file=str(campaign)
        )
    return members[-1]


@app.command(epilog='Example: launch chat last --base --prompt "What is a list?"')
def chat(
    target: str = MODEL,
    prompts: list[str] | None = Option(
        None,
        "--prompt",
        "-p",
        metavar="TEXT",
        help="ask this instead (repeatable: turns of one conversation)",
    ),
    base: bool = Option(False, "--base", help="let the model that it was trained from answer too"),
    system: str | None = Option(None, "--system", metavar="TEXT", help="system message"),
    temperature: float = Option(
        0.7, "--temperature", min=0, metavar="X", help="0 always takes the likeliest token"
    ),
    max_new_tokens: int = Option(
        512, "--max-new-tokens", min=1, metavar="N", help="longest answer, in tokens"
    ),
    seed: int = Option(0, "--seed", metavar="N", help="seed of the draws"),
    devices: str | None = DEVICES,
    cpu: bool = CPU,
    python: Path | None = PYTHON,
    format: Format = FORMAT,
) -> Exit:
    """Talk to the model of a run, in its chat template.

    Without a terminal, the prompt is read from stdin.
    """
    from launcher.trained import chat
    from launcher.trained.model import find_trainer

    environ = _build_environment(devices, cpu=cpu)
    model = find_model(target)
    redactor = model.redactor
    questions = _read_prompts(prompts, format)
    names = str(model.path)
    if base:
        names += f" and {_require_base(model).name}"
    trainer = find_trainer(model, python, chat.list_needs(model))
    sampling = chat.Sampling(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    console.say_aside(f"loading {names}")
    with _handle_termination(), chat.open_worker(model, trainer, environ, beside=base) as process:
        talk = chat.Chat(process, process.wait_for("loaded"), sampling, system)
        if not talk.has_template:
            console.say_aside(
                "the tokenizer has no chat template: a prompt is continued as plain text"
            )
        if questions is None:
            _converse(talk, redactor, beside=base)
            return Exit.OK
        if format == "json":
            turns = chat.answer_all(talk, questions, beside=base)
            data = {**_describe_chat(model, talk), "turns": [turn.as_json() for turn in turns]}
            return answer("chat", format, data, (), redactor=redactor)
        for prompt in questions:
            _show_turn(talk, prompt, redactor, beside=base)
    return Exit.OK


def _build_environment(devices: str | None, *, cpu: bool) -> dict[str, str]:
    """The environment of the process that loads the model. Raises UsageError."""
    from launcher.trained import worker

    if cpu and devices is not None:
        raise usage("useless-option", "--devices has no effect with --cpu")
    return worker.build_environment(os.environ, devices=devices, cpu=cpu)


def _require_base(model: TrainedModel) -> Base:
    if model.base is None:
        message = (
            f"it is unknown which model {model.path} was trained from: no run's record names it"
        )
        raise not_ready("no-base-model", message, "leave out --base", file=str(model.path))
    return model.base


def _describe_chat(model: TrainedModel, talk: Chat) -> dict[str, object]:
    return {
        "model": str(model.path),
        "base": None if model.base is None else model.base.as_json(),
        "adapter": model.is_adapter,
        "device": talk.device,
        "dtype": talk.dtype,
        "chat_template": talk.has_template,
    }


def _read_prompts(prompts: Sequence[str] | None, format: Format) -> list[str] | None:
    """The prompts; None if the user types them at the terminal. Raises UsageError if empty."""
    help = "--prompt TEXT, or text on stdin"
    if prompts is None and sys.stdin.isatty():
        if format == "json":
            raise usage("no-prompt", "--format json needs a prompt", help)
        return None
    if prompts is None:
        prompts = [sys.stdin.read()]
    texts = [prompt.strip() for prompt in prompts]
    if not all(texts):
        raise usage("no-prompt", "the prompt is empty", help)
    return texts


def _show_turn(talk: Chat, prompt: str, redactor: Redactor, *, beside: bool) -> None:
    from launcher.trained import chat

    if beside:
        console.say("base:")
        _show_answer(talk, prompt, chat.BASE, redactor)
        console.say("trained:")
    _show_answer(talk, prompt, chat.MODEL, redactor)


def _show_answer(talk: Chat, prompt: str, who: str, redactor: Redactor) -> None:
    result = talk.ask(prompt, who, partial(console.print_raw, redactor=redactor))
    console.say("")
    if result.ended != "stop":
        console.say_aside(_explain_end(result))


def _explain_end(result: Reply) -> str:
    if result.ended == "interrupted":
        return "(interrupted)"
    return f"(cut off after {result.tokens} tokens: --max-new-tokens N)"


def _converse(talk: Chat, redactor: Redactor, *, beside: bool) -> None:
    """Answer what the user types, until Ctrl-D."""
    # makes `input` edit lines and recall them with the arrow keys
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401

    console.say_aside(_HINT)
    while True:
        try:
            prompt = input("> ").strip()
        except EOFError:
            console.say("")
            return
        if prompt == _BEGIN_ANEW:
            talk.begin()
            console.say_aside("a new conversation")
        elif prompt:
            with _interrupt_answers(talk):
                try:
                    _show_turn(talk, prompt, redactor, beside=beside)
                except LaunchError as error:
                    if not _is_prompt_refusal(error):
                        raise
                    console.print_findings(error.findings)


def _is_prompt_refusal(error: LaunchError) -> bool:
    """Whether only this prompt was refused, so that the chat goes on."""
    return {finding.code for finding in error.findings} <= {"template-refuses", "too-long-prompt"}


@contextlib.contextmanager
def _interrupt_answers(talk: Chat) -> Iterator[None]:
    """The first Ctrl-C ends the answer, a second one the command."""
    from launcher.machine import process

    pressed: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt
        talk.interrupt()

    with process.install_handlers({signal.SIGINT: end}):
        yield


@contextlib.contextmanager
def _handle_termination() -> Iterator[None]:
    """Treat SIGTERM as SIGINT, so that nothing is left behind."""
    from launcher.machine import process

    with process.install_handlers({signal.SIGTERM: signal.default_int_handler}):
        yield


@app.command(epilog="Example: launch merge last --output output/my_sft-merged")
def merge(
    target: str = MODEL,
    output: Path | None = Option(
        None,
        "--output",
        "-o",
        metavar="DIR",
        help="a new folder",
        show_default="ADAPTER-merged, beside it",
    ),
    base: str | None = Option(
        None,
        "--base",
        metavar="MODEL",
        help="merge into this model",
        show_default="the one it was trained on",
    ),
    devices: str | None = DEVICES,
    cpu: bool = CPU,
    python: Path | None = PYTHON,
    format: Format = FORMAT,
) -> Exit:
    """Merge an adapter into its base model, and check the result.

    What is saved loads without peft. Its logits are compared before the folder gets its name.
    """
    from launcher.trained import merge
    from launcher.trained.chat import NEEDS_OF_ADAPTERS
    from launcher.trained.model import Base, find_trainer

    environ = _build_environment(devices, cpu=cpu)
    model = find_model(target, None if base is None else Base(name=base))
    merge.require_mergeable(model)
    place = output or merge.choose_output(model)
    merge.require_free(place)
    trainer = find_trainer(model, python, NEEDS_OF_ADAPTERS)

    def say(text: str) -> None:
        if format == "text":
            console.say_aside(text)

    with _handle_termination():
        merged = merge.merge(model, trainer, place, environ, say)
    lines = [*merged.lines(), f"launch chat {merged.output}"]
    data = merged.as_json()
    return answer("merge", format, data, lines, merged.findings, redactor=model.redactor)


@app.command(epilog="Example: launch card last --output card.md")
def card(
    target: str = MODEL,
    output: Path | None = Option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="write it here, - to stdout",
        show_default="README.md of the model",
    ),
    replace: bool = Option(
        False, "--replace", help="move another README.md to README.before.md first"
    ),
    format: Format = FORMAT,
) -> Exit:
    """Write a model card out of the record of a run.

    Base model and licence, data, arguments, verdict, losses, versions. A README.md of somebody
    else is kept.
    """
    from launcher import files
    from launcher.trained import card, next_steps

    if output is not None and replace:
        raise usage("useless-option", "--replace has no effect with --output")
    model = find_model(target)
    text = card.render(model)
    if output is not None and str(output) == "-":
        return answer("card", format, {"card": text, "path": None}, [text.rstrip()])
    if output is not None:
        try:
            files.write_text(output, text)
        except OSError as error:
            raise unwritable(output, error) from None
        return answer("card", format, {"card": text, "path": str(output)}, [f"card: {output}"])
    written = card.write(model, text, replace=replace)
    lines = []
    if written.replaced is not None:
        lines.append(f"replaced {written.replaced}")
    kept = None
    if written.kept is not None:
        kept = str(written.kept)
        lines.append(f"the one before: {kept}")
    lines += [f"card: {written.path}", next_steps.format_upload_command(model)]
    return answer("card", format, {"card": text, "path": str(written.path), "kept": kept}, lines)
