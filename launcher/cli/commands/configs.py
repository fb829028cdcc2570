"""`launch init`, `validate-config`, `explain`, `schema`, `pin`: stage files and the source
they are for.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from typer import Argument, Option

from launcher.cli.help import App
from launcher.cli.options import (
    FORMAT,
    OVERRIDES,
    STAGE_FILE,
    Findings,
    Format,
    Shared,
    answer,
    app,
    files_of,
    takes,
)
from launcher.errors import (
    Exit,
    Finding,
    InvalidConfig,
    LaunchError,
    NotReady,
    brief,
    errors,
    usage,
)
from launcher.paths import can_be_name, exists, shipped
from launcher.report import console

if TYPE_CHECKING:
    from launcher.config.load import Config
    from launcher.planning.request import Request
    from launcher.stage.conversion.replacement import Replacements
    from launcher.stage.draft import Draft
    from launcher.stage.fix import Fix
    from launcher.upstream.locate import Locator


VALIDATED_FOR = 8
"""GPUs that a pipeline is judged for where its file does not say: a stage file is judged for
none.
"""

pins = App(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show the pinned checkout, and what another commit changes.",
)
app.add_typer(pins, name="pin")


@app.command(
    "validate-config", epilog="Example: launch validate-config configs/tulu/*.yaml --strict"
)
@takes("stage", "source", "strict")
def validate_config(
    shared: Shared,
    words: list[str] = Argument(
        ...,
        metavar="PATH... [KEY=VALUE]...",
        help="stage files, or folders of them, and what to replace in each",
        show_default=False,
    ),
    fix: bool = Option(False, "--fix", help="apply the mechanical fixes; comments are kept"),
    deep: bool = Option(False, "--deep", help="rehearse each stage file too"),
    format: Findings = Option(
        "text", "--format", help="print text, one JSON object, or annotations for GitHub"
    ),
) -> Exit:
    """Report everything that the trainer would refuse or ignore.

    All mistakes at once, with file and line. Needs no GPU, no checkout and no packages of the
    trainer.
    """
    locator, stage = shared.locator, shared.stage
    overrides = [word for word in words if "=" in word and not exists(Path(word))]
    paths = [file for word in words if word not in overrides for file in files_of(Path(word))]
    if not paths:
        raise usage("no-input", "no stage file is named", "launch validate-config FILE KEY=VALUE")
    shared = replace(shared, overrides=overrides)
    fixes: dict[Path, Fix] = {}
    findings: list[Finding] = []
    for path in paths if fix else ():
        try:
            fixes[path] = _fix(path, stage, locator, quiet=format != "text")
        except InvalidConfig:
            # judging the file says why it cannot be read
            continue
        except NotReady as error:
            findings += error.findings
    not_ready = bool(findings)
    files: list[dict[str, object]] = []
    for path, facts, own in _judge_all(paths, shared, deep=deep, quiet=format != "text"):
        if path in fixes:
            facts["fix"] = fixes[path].as_json()
            own = fixes[path].with_reasons(own)
        files.append({"path": str(path), "valid": not errors(own, strict=shared.strict), **facts})
        findings += own
    ok = all(entry["valid"] for entry in files)
    code = Exit.NOT_READY if not_ready else Exit.OK if ok else Exit.CONFIG
    # a stage file beside the pipeline that names it is judged twice
    distinct = list(dict.fromkeys(findings))
    return answer("validate-config", format, {"files": files}, map(_line, files), distinct, code)


def _fix(path: Path, stage: str | None, locator: Locator, *, quiet: bool) -> Fix:
    """Apply the mechanical fixes of a file. Raises NotReady where it cannot be written."""
    from launcher.stage import fix

    found = fix.of_file(path, stage_name=stage, locator=locator)
    fix.apply(found)
    for change in found.changes if not quiet else ():
        console.say(f"{path}:{change.line}: {change.what}")
    return found


def _judge_all(
    paths: list[Path], shared: Shared, *, deep: bool, quiet: bool
) -> Iterator[tuple[Path, dict[str, object], tuple[Finding, ...]]]:
    """Each file with its facts and findings, with `deep` those of its rehearsal too, all in
    one server a script.
    """
    if not deep:
        yield from ((path, *_judge_file(path, shared)) for path in paths)
        return
    from launcher.planning import collect
    from launcher.workflows.rehearse import ask, rehearsal

    with ask.Servers() as servers:
        for path in paths:
            facts, own = _judge_file(path, shared)
            # what cannot be read has no shape
            if facts.get("shape", "pipeline") != "pipeline":
                say = (lambda _: None) if quiet else shared.show_progress
                judged, trainer = collect.judge(shared.request(config=path))
                result = rehearsal.rehearse(judged, trainer, servers, say=say)
                facts["rehearsal"], own = result.as_json(), rehearsal.combined(own, result.findings)
            yield path, facts, own


def _judge_file(path: Path, shared: Shared) -> tuple[dict[str, object], tuple[Finding, ...]]:
    """The facts of a stage file, or of the stages of a pipeline in turn, and its findings."""
    from launcher.config import load
    from launcher.stage.stage import judge

    try:
        loaded = load.load(path, shared.overrides or ())
        judged = judge(loaded, stage=shared.stage, locator=shared.locator)
    except InvalidConfig as error:
        if {finding.code for finding in error.findings} == {load.PIPELINE}:
            return _judge_pipeline(path, shared)
        return {}, error.findings
    source = judged.upstream.as_json() if judged.upstream else None
    return {"stage": judged.stage, "shape": loaded.shape, "upstream": source}, judged.findings


def _judge_pipeline(path: Path, shared: Shared) -> tuple[dict[str, object], tuple[Finding, ...]]:
    from launcher.config import pipeline
    from launcher.planning.collect import Scope
    from launcher.planning.request import Request
    from launcher.workflows.pipeline.plan import PipelineRequest, plan_stages

    try:
        whole = pipeline.load(path, shared.overrides or ())
        common = Request(
            stage=None,
            config=path,
            python=shared.python,
            checkout=shared.open_instruct,
            allow_unpinned=shared.allow_unpinned,
            gpus=None if all(link.gpus is not None for link in whole.links) else VALIDATED_FOR,
        )
        plan = plan_stages(PipelineRequest(chain=whole, common=common), Scope.PLAN)
    except LaunchError as error:
        return {}, error.findings
    facts: dict[str, object] = {"shape": "pipeline", "stages": [link.name for link in plan.links]}
    evaluated = [link.name for link in plan.links if link.evaluation is not None]
    if evaluated:
        facts["evaluated"] = evaluated
    return facts, plan.findings


def _line(entry: dict[str, object]) -> str:
    line = f"{entry['path']}: {'valid' if entry['valid'] else 'invalid'}"
    if isinstance(stages := entry.get("stages"), list):
        evaluated = entry.get("evaluated")
        measured = f"; evaluated: {', '.join(evaluated)}" if isinstance(evaluated, list) else ""
        return f"{line} (a pipeline: {', '.join(stages)}{measured})"
    if not isinstance(source := entry.get("upstream"), dict):
        return line
    from launcher.upstream.schema import source_name

    name = source_name(source["backend"], str(source["version"]))
    return f"{line} ({entry['stage']}, {name}, {source['root'] or 'the committed snapshot'})"


@app.command(epilog="Example: launch explain use_liger_kernel --stage sft")
@takes("stage", "backend", "source", "format")
def explain(
    shared: Shared,
    key: str = Argument(
        ...,
        metavar="KEY|CODE",
        help="an argument, a key of stage files, or the code of a finding",
        show_default=False,
    ),
    config: Path | None = STAGE_FILE,
    overrides: list[str] | None = OVERRIDES,
    gpus: int = Option(
        1, "--gpus", metavar="N", min=0, help="GPUs for the values that depend on them"
    ),
) -> Exit:
    """Explain an argument, a key, or the code of a finding.

    Of an argument: what it does, type, default, who reads it, its value in a stage file, its
    history.
    """
    from launcher import findings
    from launcher.config import keys, load
    from launcher.stage import explain

    loaded, derived = None, {}
    if config is not None:
        loaded = load.load(config, overrides or ())
        derived = _derived(
            shared.request(config=config, overrides=overrides or (), gpus=gpus), loaded
        )
    explained = explain.explain(
        key,
        locator=shared.locator,
        config=loaded,
        stage_name=shared.stage,
        backend=shared.backend,
        derived=derived,
    )
    in_pipelines = keys.PIPELINE.get(key.partition(".")[0]) if config is None else None
    if in_pipelines is not None:
        # not the arguments that only have the word in their names
        explained = [argument for argument in explained if argument.key == key]
    explained = explained if any(argument.known for argument in explained) else []
    meanings = [] if explained or in_pipelines else list(findings.rows_of(key))
    if not (explained or in_pipelines or meanings):
        near = " or ".join(f"`{name}`" for name in explain.near(key))
        help = f"did you mean {near}?" if near else "launch schema lists them all"
        raise usage("no-such-key", f"no such argument, now or earlier: `{key}`", help)
    data = {
        "explained": [argument.as_json() for argument in explained],
        "pipeline": None if in_pipelines is None else in_pipelines.as_json(),
        "codes": [
            {
                "code": key,
                "layer": meaning.layer,
                "meaning": meaning.plain_text(),
                "section": section.title,
            }
            for section, meaning in meanings
        ],
    }
    texts = ["\n".join(argument.lines()) for argument in explained]
    if in_pipelines is not None:
        texts.append("\n".join(explain.pipeline_lines(in_pipelines)))
    texts += [
        "\n".join(explain.meaning_lines(section, meaning, key)) for section, meaning in meanings
    ]
    # what is the same for SFT and DPO is said once
    redactor = None if loaded is None else loaded.redactor
    return answer(
        "explain", shared.format, data, ["\n\n".join(dict.fromkeys(texts))], redactor=redactor
    )


def _derived(request: Request, loaded: Config) -> dict[str, tuple[object, str]]:
    """What launch sets for this stage file, with the reason; nothing where the file is invalid."""
    from launcher.planning import collect, prepare
    from launcher.planning.collect import Scope

    try:
        plan = prepare.complete(collect.collect(request, Scope.PLAN, loaded=loaded)).plan
    except LaunchError:
        return {}
    names, gpus = plan.stage.entry.names, request.gpus
    on = "the CPU" if not gpus else f"{gpus} GPU{'s' * (gpus > 1)}"
    batch = f"batch: {plan.stage.config.origin('batch')}, on {on}"
    return {
        name: (
            one.value,
            batch
            if name in {names.per_device, names.accumulation}
            else f"set by launch: {one.why}",
        )
        for name, one in plan.derived.items()
    }


@app.command(epilog="Example: launch schema --json-schema > stage.schema.json")
@takes("stage", "backend", "source", "format")
def schema(
    shared: Shared,
    json_schema: bool = Option(
        False, "--json-schema", help="print the JSON Schema of stage files, for editors"
    ),
) -> Exit:
    """List the arguments of a stage, or print a JSON Schema."""
    from launcher.config import keys
    from launcher.stage import explain
    from launcher.upstream.trainers import BACKENDS

    stages = [shared.stage] if shared.stage else list(keys.STAGES)
    named = [shared.backend] if shared.backend else list(BACKENDS)
    locator, schemas = shared.locator, []
    for name in named:
        for key, entry in BACKENDS[name].STAGES.items():
            # a further script of a stage has the stage's own arguments: editors ask for both
            if (entry.stage or key) not in stages or (entry.stage and not json_schema):
                continue
            try:
                schemas.append(locator.schema(name, key))
            except InvalidConfig:
                # a commit before a further script lacks nothing
                if not entry.stage:
                    raise
    if json_schema:
        from launcher.stage.json_schema import combined

        console.print_json(combined(schemas))
        return Exit.OK

    def show() -> None:
        console.print_arguments(schemas, {one.script: explain.notes(one) for one in schemas})

    return answer("schema", shared.format, {"schemas": [one.as_json() for one in schemas]}, show)


@pins.command("status", epilog="Example: launch pin status")
@takes("open_instruct", "format")
def pin_status(shared: Shared) -> Exit:
    """Show which checkout is used, and whether it is the pinned one."""
    from launcher.pin import pin

    status = pin.status(shared.open_instruct, os.environ)
    data, lines = status.as_json(), status.lines()
    return answer("pin status", shared.format, data, lines, status.findings, status.exit_code)


@pins.command("diff", epilog="Example: launch pin diff pin HEAD -c configs/tulu/sft_qwen7b.yaml")
@takes("stage", "open_instruct", "format")
def pin_diff(
    shared: Shared,
    commits: list[str] = Argument(
        ...,
        metavar="OLD NEW",
        help="two commits, OLD..NEW, or NEW alone; `pin` is the pinned commit",
        show_default=False,
    ),
    configs: list[Path] | None = Option(
        None,
        "--config",
        "-c",
        help="stage file, pipeline or folder (repeatable)",
        show_default="all fields",
    ),
    everything: bool = Option(
        False, "--all", help="show changes that do not concern these files too"
    ),
) -> Exit:
    """Show what changes between two commits.

    Arguments, defaults, where they are read, and what the parser refuses.
    """
    from launcher.pin import difference, pin

    pair = pin.find_commits(commits, shared.open_instruct, os.environ)
    paths = [file for path in configs or () for file in files_of(path)]
    changes = difference.between(pair, paths, stage=shared.stage)
    if shared.format == "json":
        new = [finding for config in changes.configs for finding in config.appeared]
        console.print_envelope("pin diff", not changes.worse, new, changes.as_json())
    else:
        console.say("\n".join(difference.lines(changes, everything=everything)))
    return changes.exit_code


@pins.command("move", epilog="Example: launch pin move origin/main")
@takes("open_instruct", "format")
def pin_move(
    shared: Shared,
    commit: str = Argument(
        ..., metavar="COMMIT", help="by any name that git knows", show_default=False
    ),
) -> Exit:
    """Make another commit the pin of this clone.

    For maintainers. Exit code 0: nothing waits for you; 1: moved, and rules or citations are
    listed that do.
    """
    from launcher.pin.move import move

    moved = move.move(commit, shared.open_instruct, os.environ, console.say_aside)
    columns = shutil.get_terminal_size((160, 50)).columns
    lines = [] if shared.format == "json" else list(moved.lines(columns))
    return answer(
        "pin move", shared.format, moved.as_json(), lines, moved.findings, moved.exit_code
    )


@app.command(
    epilog="Example: launch init sft --model Qwen/Qwen2.5-0.5B --data trl-lib/Capybara --gpus 1"
)
@takes("source", "format")
def init(
    shared: Shared,
    stage: Literal["sft", "dpo"] | None = Argument(
        None, metavar="[sft|dpo]", help="training stage", show_default="sft"
    ),
    backend: Literal["open_instruct", "trl"] = Option("trl", "--backend", help="trainer"),
    model: str | None = Option(
        None,
        "--model",
        metavar="NAME",
        help="model: a name on the hub, or a folder; with --from, in place of that of FILE",
    ),
    data: str | None = Option(
        None,
        "--data",
        metavar="NAME",
        help="data set: a name on the hub, a file or a folder; with --from, in place of that of FILE",
    ),
    gpus: int | None = Option(
        None, "--gpus", metavar="N", min=0, help="number of GPUs", show_default="1"
    ),
    lora: bool = Option(False, "--lora", help="train a LoRA adapter instead of all weights"),
    source: Path | None = Option(
        None, "--from", metavar="FILE", help="convert a training script, or a file of another tool"
    ),
    script_args: str | None = Option(
        None,
        "--script-args",
        metavar="ARGS",
        help="arguments that the script of --from is started with",
    ),
    output: Path | None = Option(
        None, "--output", "-o", metavar="FILE", help="the file to write", show_default="STAGE.yaml"
    ),
) -> Exit:
    """Write a first stage file, or make one of a training script.

    Asks for the model, the data and the number of GPUs on a terminal. A file that exists is not
    overwritten.
    """
    from launcher.config import load
    from launcher.stage import draft
    from launcher.stage.conversion.replacement import Replacements
    from launcher.stage.stage import judge

    if source is not None:
        if backend != "trl":
            raise usage(
                "useless-option", "--from takes the trainer from its file", "leave out --backend"
            )
        if lora:
            raise usage("useless-option", "--from takes LoRA from its file", "leave out --lora")
        replacements = Replacements(model=model or None, data=data or None)
        return _convert(shared, source, stage, gpus, output, script_args, replacements)
    if script_args is not None:
        raise usage("useless-option", "--script-args is for a script of --from")
    stage = stage or "sft"
    path = _require_free(output or Path(f"{stage}.yaml"))
    model, data, gpus = _ask(model, data, gpus, interactive=shared.format == "text")
    is_pinned = shared.locator.find(backend).pinned
    new = draft.new(
        stage,
        backend,
        model=model,
        data=data,
        gpus=gpus,
        output=_free_output(path),
        environ=os.environ,
        lora=lora,
        is_pinned=is_pinned,
    )
    text = new.text(path)
    findings = judge(load.load(path, text=text), locator=shared.locator).findings
    _write(path, text)
    facts: dict[str, object] = {
        "path": str(path),
        "stage": new.stage,
        "backend": new.backend,
        "lost": [],
        "remarks": list(new.remarks),
    }
    return _answer_init(shared, new, path, facts, findings)


def _convert(
    shared: Shared,
    source: Path,
    stage: str | None,
    gpus: int | None,
    output: Path | None,
    script_args: str | None,
    replacements: Replacements,
) -> Exit:
    """Write the stage file that a file or script of another tool's describes."""
    from launcher.config import load
    from launcher.stage.conversion import convert
    from launcher.stage.stage import judge

    arguments = _script_arguments(script_args)
    conversion = convert.convert(
        source,
        stage=stage,
        gpus=gpus,
        locator=shared.locator,
        arguments=arguments,
        replacements=replacements,
    )
    new = conversion.draft
    path = _require_free(output or Path(f"{new.stage}.yaml"))
    beside = {_require_free(place): text for place, text in new.place_files(path).items()}
    for place, content in beside.items():
        _write(place, content)
    while True:
        convert.describe(conversion)
        text = new.text(path)
        findings = judge(load.load(path, text=text), locator=shared.locator).findings
        if not convert.settle_refused(conversion, findings):
            break
    _write(path, text)
    facts: dict[str, object] = {
        "path": str(path),
        "stage": new.stage,
        "backend": new.backend,
        "gpus": new.gpus,
        "nodes": new.nodes,
        "lost": conversion.lost,
        "carried": conversion.ledger.carried,
        "left_out": conversion.left_out,
        "files": [str(place) for place in beside],
        "remarks": list(new.remarks),
    }
    return _answer_init(shared, new, path, facts, (*conversion.findings(), *findings))


def _script_arguments(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise usage(
            "useless-option",
            f"--script-args cannot be split: {error}",
            "quote them as for the shell",
        ) from None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _answer_init(
    shared: Shared, new: Draft, path: Path, facts: dict[str, object], findings: tuple[Finding, ...]
) -> Exit:
    code = Exit.CONFIG if errors(findings) else Exit.OK
    command = f"{new.command(path)} --dry-run"
    if code is not Exit.OK:
        command = f"launch validate-config {path}"
    lines = [f"wrote {path}", *new.remarks, f"next: {command}"]
    return answer("init", shared.format, facts, lines, findings, code)


def _require_free(path: Path) -> Path:
    if not can_be_name(str(path)):
        raise usage(
            "impossible-name", f"no file can be called {brief(path)}", "choose another name"
        )
    if exists(path):
        raise usage(
            "output-exists",
            f"{path} exists",
            "launch overwrites no stage file: choose another name",
        )
    return path


def _free_output(path: Path) -> str:
    """An output folder that no other stage file has: two models in one folder would be one run."""
    name = path.with_suffix("")
    if path.is_absolute() or ".." in path.parts:
        name = Path(path.stem)
    folder = Path("output") / name
    number = 2
    while exists(folder):
        folder = Path("output") / f"{name}-{number}"
        number += 1
    return str(folder)


def _ask(
    model: str | None, data: str | None, gpus: int | None, *, interactive: bool
) -> tuple[str, str, int]:
    """What no option names, from whoever sits at the terminal. Raises UsageError where nobody
    does.
    """
    if interactive and sys.stdin.isatty():
        model = model or typer.prompt("Model (a name on the hub, or a folder)", err=True)
        data = data or typer.prompt("Data set (a name on the hub, a file or a folder)", err=True)
        gpus = typer.prompt("GPUs", default=1, type=int, err=True) if gpus is None else gpus
    lacking = [name for name, value in (("--model", model), ("--data", data)) if not value]
    if lacking:
        help = "launch init sft --model Qwen/Qwen2.5-0.5B --data trl-lib/Capybara"
        raise usage("no-input", f"{' and '.join(lacking)} must be given", help)
    return str(model), str(data), 1 if gpus is None else gpus


shipped_files = App(
    help="List the stage files that ship with launch, or copy one.", rich_markup_mode=None
)
app.add_typer(shipped_files, name="configs")


def _shipped() -> dict[str, Path]:
    folder = shipped("configs")
    return {str(path.relative_to(folder).with_suffix("")): path for path in files_of(folder)}


@shipped_files.callback(invoke_without_command=True)
def list_configs(context: typer.Context, format: Format = FORMAT) -> None:
    """List the stage files that ship with launch, or copy one."""
    if context.invoked_subcommand is not None:
        return
    rows = [
        {
            "name": name,
            "path": str(path),
            "summary": path.read_text("utf-8").split("\n")[0].strip("# .:"),
        }
        for name, path in _shipped().items()
    ]
    width = max((len(row["name"]) for row in rows), default=0)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    lines = [f"{row['name']:<{width}}  {row['summary']}"[:columns] for row in rows]
    answer("configs", format, rows, [*lines, "", "launch configs copy NAME copies one"])


@shipped_files.command("copy", epilog="Example: launch configs copy tulu/sft_qwen7b mine.yaml")
def copy_config(
    name: str = Argument(
        ..., metavar="NAME", help="as `launch configs` lists it", show_default=False
    ),
    target: Path = Argument(
        Path("."), metavar="[DEST]", help="a file or a folder", show_default="this folder"
    ),
    format: Format = FORMAT,
) -> Exit:
    """Copy a stage file, or a pipeline with its stage files."""
    from launcher.config.document import read_yaml
    from launcher.config.keys import nearest

    known = _shipped()
    path = known.get(name.removesuffix(".yaml"))
    if path is None:
        raise usage(
            "no-such-config", f"no stage file `{name}` ships with launch", nearest(name, [*known])
        )
    first = target if target.suffix in {".yaml", ".yml"} else target / path.name
    names = [one["config"] for one in read_yaml(path).value.get("stages") or ()]
    copies = {path: first, **{path.parent / name: first.parent / name for name in names}}
    for copy in copies.values():
        _require_free(copy)
    for source, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    files = [str(copy) for copy in copies.values()]
    return answer("configs copy", format, {"files": files}, [f"wrote {copy}" for copy in files])
