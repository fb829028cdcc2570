"""`launch init`, `configs`: where a stage file comes from."""

from __future__ import annotations

import difflib
import shutil
import sys
from pathlib import Path
from typing import Literal

import typer
from typer import Argument, Option

from launcher.cli.help import App
from launcher.cli.options import FORMAT, SOURCE, Format, Shared, answer, app, files_of, takes
from launcher.errors import Exit, errors, usage
from launcher.paths import exists, shipped


@app.command(epilog="Example: launch init sft --model Qwen/Qwen2.5-0.5B --data trl-lib/Capybara --gpus 1")
@takes(*SOURCE, "format")
def init(
    shared: Shared,
    stage: Literal["sft", "dpo"] | None = Argument(
        None, metavar="[sft|dpo]", help="training stage", show_default="sft"
    ),
    backend: Literal["open_instruct", "trl"] = Option("trl", "--backend", help="trainer"),
    model: str | None = Option(None, "--model", metavar="NAME", help="model: a name on the hub, or a folder"),
    data: str | None = Option(None, "--data", metavar="NAME", help="data set: a name on the hub, or a path"),
    gpus: int | None = Option(None, "--gpus", metavar="N", min=0, help="number of GPUs", show_default="1"),
    source: Path | None = Option(None, "--from", metavar="FILE", help="convert a TRL, Axolotl or LLaMA-Factory file"),
    output: Path | None = Option(
        None, "--output", "-o", metavar="FILE", help="the file to write", show_default="STAGE.yaml"
    ),
) -> Exit:
    """Write a first stage file, or convert another tool's.

    Asks for the model, the data and the number of GPUs on a terminal. A file that exists is not overwritten.
    """
    from launcher.config import load
    from launcher.stage import conversion, draft
    from launcher.stage.stage import judge

    if source is not None:
        if backend != "trl" or model or data:
            raise usage("useless-option", "--from takes model and data from its file, and writes for TRL")
        new, lost = conversion.convert(source, stage=stage, gpus=gpus, locator=shared.locator)
    else:
        stage = stage or "sft"
        _require_free(output or Path(f"{stage}.yaml"))
        model, data, gpus = _ask(model, data, gpus, interactive=shared.format == "text")
        new, lost = draft.new(stage, backend, model=model, data=data, gpus=gpus), []
    path = _require_free(output or Path(f"{new.stage}.yaml"))
    text = new.text(path)
    findings = (*lost, *judge(load.load(path, text=text), locator=shared.locator).findings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    facts = {"path": str(path), "stage": new.stage, "backend": new.backend, "lost": list(new.lost)}
    lines = [f"wrote {path}", f"next: launch {new.stage} {path} --gpus {1 if gpus is None else gpus} --dry-run"]
    code = Exit.CONFIG if errors(findings) else Exit.OK
    return answer("init", shared.format, facts, lines, findings, code)


def _require_free(path: Path) -> Path:
    if exists(path):
        raise usage("output-exists", f"{path} exists", "launch overwrites no stage file: choose another name")
    return path


def _ask(model: str | None, data: str | None, gpus: int | None, *, interactive: bool) -> tuple[str, str, int]:
    """What no option names, from whoever sits at the terminal. Raises UsageError where nobody does."""
    if interactive and sys.stdin.isatty():
        model = model or typer.prompt("Model (a name on the hub, or a folder)", err=True)
        data = data or typer.prompt("Data set (a name on the hub, or a path)", err=True)
        gpus = typer.prompt("GPUs", default=1, type=int, err=True) if gpus is None else gpus
    lacking = [name for name, value in (("--model", model), ("--data", data)) if not value]
    if lacking:
        help = "launch init sft --model Qwen/Qwen2.5-0.5B --data trl-lib/Capybara"
        raise usage("no-input", f"{' and '.join(lacking)} must be given", help)
    return str(model), str(data), 1 if gpus is None else gpus


configs = App(help="List the stage files that ship with launch, or copy one.", rich_markup_mode=None)
app.add_typer(configs, name="configs")


def _configs() -> dict[str, Path]:
    folder = shipped("configs")
    return {str(path.relative_to(folder).with_suffix("")): path for path in files_of(folder)}


@configs.callback(invoke_without_command=True)
def list_configs(context: typer.Context, format: Format = FORMAT) -> None:
    """List the stage files that ship with launch, or copy one."""
    if context.invoked_subcommand is not None:
        return
    rows = [
        {"name": name, "path": str(path), "summary": path.read_text("utf-8").split("\n")[0].strip("# .:")}
        for name, path in _configs().items()
    ]
    width = max((len(row["name"]) for row in rows), default=0)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    lines = [f"{row['name']:<{width}}  {row['summary']}"[:columns] for row in rows]
    answer("configs", format, rows, [*lines, "", "launch configs copy NAME copies one"])


@configs.command("copy", epilog="Example: launch configs copy tulu/sft_qwen7b mine.yaml")
def copy_config(
    name: str = Argument(..., metavar="NAME", help="as `launch configs` lists it", show_default=False),
    target: Path = Argument(Path("."), metavar="[DEST]", help="a file or a folder", show_default="this folder"),
    format: Format = FORMAT,
) -> Exit:
    """Copy a stage file, or a pipeline with its stage files."""
    from launcher.config.document import read_yaml

    known = _configs()
    path = known.get(name.removesuffix(".yaml"))
    if path is None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        help = f"did you mean `{near[0]}`?" if near else "launch configs lists them"
        raise usage("no-such-config", f"no stage file `{name}` ships with launch", help)
    first = target if target.suffix in {".yaml", ".yml"} else target / path.name
    stages = read_yaml(path).value.get("stages")
    copies = {path: first}
    copies |= {path.parent / one["config"]: first.parent / one["config"] for one in stages or ()}
    for copy in copies.values():
        _require_free(copy)
    for source, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    files = [str(copy) for copy in copies.values()]
    return answer("configs copy", format, {"files": files}, [f"wrote {copy}" for copy in files])
