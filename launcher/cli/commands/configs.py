"""`launch init`, `validate-config`, `explain`, `schema`, `pin`, `configs`: stage files."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    list_stage_files,
    with_options,
)
from launcher.errors import (
    Exit,
    Finding,
    InvalidConfig,
    LaunchError,
    NotReady,
    select_errors,
    shorten,
    usage,
)
from launcher.lazy_dataclass import dataclass
from launcher.paths import can_be_name, exists, find_shipped
from launcher.report import console

if TYPE_CHECKING:
    from launcher.config.load import Config
    from launcher.findings import CodeSection, Meaning
    from launcher.planning.request import Request
    from launcher.rules.protected import ProtectedPlaces
    from launcher.stage.conversion.replacement import Replacements
    from launcher.stage.draft import Draft
    from launcher.stage.fix import Fix
    from launcher.upstream.schema import Schema


VALIDATED_FOR = 8
"""GPUs that a pipeline is judged for if its file does not say."""

pins = App(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show the pinned checkout, and what another commit changes.",
)
app.add_typer(pins, name="pin")


@app.command(
    "validate-config", epilog="Example: launch validate-config configs/tulu/*.yaml --strict"
)
@with_options("stage", "source", "strict")
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
    overrides = [word for word in words if "=" in word and not exists(Path(word))]
    paths: list[Path] = []
    for word in words:
        if word not in overrides:
            paths += list_stage_files(Path(word))
    if not paths:
        raise usage("no-input", "no stage file is named", "launch validate-config FILE KEY=VALUE")
    shared = replace(shared, overrides=overrides, format="text" if format == "text" else "json")
    findings: list[Finding] = []
    fixes: dict[Path, Fix] = {}
    code = Exit.OK
    if fix:
        fixes, findings = _fix_files(paths, shared)
    if findings:
        code = Exit.NOT_READY
    files: list[dict[str, object]] = []
    judge = _judge_deeply if deep else _judge_each
    for judged in judge(paths, shared):
        of_file = judged.findings
        entry = {"path": str(judged.path), "valid": True, **judged.facts}
        if judged.path in fixes:
            entry["fix"] = fixes[judged.path].as_json()
            of_file = fixes[judged.path].with_reasons(of_file)
        if select_errors(of_file, strict=shared.strict):
            entry["valid"] = False
            code = code or Exit.CONFIG
        files.append(entry)
        findings += of_file
    # a stage file beside the pipeline that names it is judged twice
    distinct = list(dict.fromkeys(findings))
    return answer(
        "validate-config", format, {"files": files}, map(_render_entry, files), distinct, code
    )


@dataclass(frozen=True, slots=True)
class _JudgedFile:
    path: Path
    facts: Mapping[str, object]
    findings: tuple[Finding, ...]


def _fix_files(paths: Sequence[Path], shared: Shared) -> tuple[dict[Path, Fix], list[Finding]]:
    """The fixes that were applied, by file, and the findings about files that cannot be written."""
    fixes: dict[Path, Fix] = {}
    findings: list[Finding] = []
    for path in paths:
        try:
            fixes[path] = _fix_file(path, shared)
        except InvalidConfig:
            # judging the file says why it cannot be read
            continue
        except NotReady as error:
            findings += error.findings
    return fixes, findings


def _fix_file(path: Path, shared: Shared) -> Fix:
    """Apply the mechanical fixes of a file. Raises NotReady if it cannot be written."""
    from launcher.stage import fix

    result = fix.fix_file(path, stage_name=shared.stage, locator=shared.locator)
    fix.apply(result)
    if shared.format == "text":
        for change in result.changes:
            console.say(f"{path}:{change.line}: {change.what}")
    return result


def _judge_each(paths: list[Path], shared: Shared) -> Iterator[_JudgedFile]:
    from launcher.rules.protected import ProtectedPlaces

    protected = ProtectedPlaces()
    for path in paths:
        yield _judge_file(path, shared, protected)


def _judge_deeply(paths: list[Path], shared: Shared) -> Iterator[_JudgedFile]:
    """Each file with the findings of its rehearsal; one server for each script serves all."""
    from launcher.planning import collect
    from launcher.workflows.rehearse import ask, rehearsal

    with ask.Servers() as servers:
        for file in _judge_each(paths, shared):
            # what cannot be read has no shape
            if file.facts.get("shape", "pipeline") == "pipeline":
                yield file
                continue
            judged, trainer = collect.judge_request(shared.request(config=file.path))
            result = rehearsal.rehearse(judged, trainer, servers, say=shared.show_progress)
            facts = {**file.facts, "rehearsal": result.as_json()}
            findings = rehearsal.merge_findings(file.findings, result.findings)
            yield _JudgedFile(file.path, facts, findings)


def _judge_file(path: Path, shared: Shared, protected: ProtectedPlaces) -> _JudgedFile:
    """A stage file, or the stages of a pipeline in turn."""
    from launcher.config import load
    from launcher.stage.stage import judge_stage_file

    try:
        loaded = load.load(path, shared.overrides or ())
        judged = judge_stage_file(
            loaded, stage=shared.stage, locator=shared.locator, protected=protected
        )
    except InvalidConfig as error:
        if {finding.code for finding in error.findings} == {load.PIPELINE}:
            return _judge_pipeline(path, shared)
        return _JudgedFile(path, {}, error.findings)
    source = judged.upstream.as_json() if judged.upstream else None
    facts = {"stage": judged.stage, "shape": loaded.shape, "upstream": source}
    return _JudgedFile(path, facts, judged.findings)


def _judge_pipeline(path: Path, shared: Shared) -> _JudgedFile:
    from launcher.config import pipeline
    from launcher.planning.collect import Scope
    from launcher.workflows.pipeline.plan import PipelineRequest, plan_stages

    try:
        chain = pipeline.load(path, shared.overrides or ())
        gpus: int | None = VALIDATED_FOR
        if all(link.gpus is not None for link in chain.links):
            gpus = None
        common = shared.request(stage=None, config=path, overrides=(), gpus=gpus, strict=False)
        plan = plan_stages(PipelineRequest(chain=chain, common=common), Scope.PLAN)
    except LaunchError as error:
        return _JudgedFile(path, {}, error.findings)
    facts: dict[str, object] = {"shape": "pipeline", "stages": [link.name for link in plan.links]}
    evaluated = [link.name for link in plan.links if link.evaluation is not None]
    if evaluated:
        facts["evaluated"] = evaluated
    return _JudgedFile(path, facts, plan.findings)


def _render_entry(entry: Mapping[str, Any]) -> str:
    word = "valid" if entry["valid"] else "invalid"
    line = f"{entry['path']}: {word}"
    if "stages" in entry:
        stages = ", ".join(entry["stages"])
        line += f" (a pipeline: {stages}"
        if "evaluated" in entry:
            evaluated = ", ".join(entry["evaluated"])
            line += f"; evaluated: {evaluated}"
        return f"{line})"
    source = entry.get("upstream")
    if source is None:
        return line
    from launcher.upstream.schema import name_source

    name = name_source(source["backend"], str(source["version"]))
    place = source["root"] or "the committed snapshot"
    return f"{line} ({entry['stage']}, {name}, {place})"


@app.command(epilog="Example: launch explain use_liger_kernel --stage sft")
@with_options("stage", "backend", "source", "format")
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
    from launcher.config import keys, load
    from launcher.stage import explain

    loaded = None
    redactor = None
    in_pipelines = None
    derived: Mapping[str, tuple[object, str]] = {}
    if config is None:
        in_pipelines = keys.PIPELINE.get(key.partition(".")[0])
    else:
        loaded = load.load(config, overrides or ())
        redactor = loaded.redactor
        request = shared.request(config=config, overrides=overrides or (), gpus=gpus)
        derived = _derive_arguments(request, loaded)
    explained = explain.explain(
        key,
        locator=shared.locator,
        config=loaded,
        stage_name=shared.stage,
        backend=shared.backend,
        derived=derived,
    )
    if in_pipelines is not None:
        # not the arguments that only have the word in their names
        explained = [argument for argument in explained if argument.key == key]
    if not any(argument.known for argument in explained):
        explained = []
    meanings: Sequence[tuple[CodeSection, Meaning]] = ()
    if not explained and in_pipelines is None:
        meanings = _find_meanings(key)
    texts = ["\n".join(argument.lines()) for argument in explained]
    if in_pipelines is not None:
        texts.append("\n".join(explain.describe_pipeline_key(in_pipelines)))
    codes = []
    for section, meaning in meanings:
        text = meaning.plain_text()
        title = section.title
        codes.append({"code": key, "layer": meaning.layer, "meaning": text, "section": title})
        texts.append("\n".join(explain.describe_code(section, meaning, key)))
    data = {
        "explained": [argument.as_json() for argument in explained],
        "pipeline": None if in_pipelines is None else in_pipelines.as_json(),
        "codes": codes,
    }
    # what is the same for SFT and DPO is said once
    text = "\n\n".join(dict.fromkeys(texts))
    return answer("explain", shared.format, data, [text], redactor=redactor)


def _find_meanings(code: str) -> Sequence[tuple[CodeSection, Meaning]]:
    """What a code of findings means. Raises UsageError with what else may have been meant."""
    from launcher import findings
    from launcher.stage import explain

    meanings = tuple(findings.find_rows(code))
    if meanings:
        return meanings
    help = "launch schema lists them all"
    near = " or ".join(f"`{name}`" for name in explain.find_near_names(code))
    if near:
        help = f"did you mean {near}?"
    raise usage("no-such-key", f"no such argument, now or earlier: `{code}`", help)


def _derive_arguments(request: Request, loaded: Config) -> dict[str, tuple[object, str]]:
    """What launch sets for this stage file, with the reason; empty if it is invalid."""
    from launcher.planning import collect, prepare
    from launcher.planning.collect import Scope

    try:
        plan = prepare.complete(collect.collect(request, Scope.PLAN, loaded=loaded)).plan
    except LaunchError:
        return {}
    machine = console.count_gpus(plan.gpus)
    names = plan.stage.entry.names
    derived: dict[str, tuple[object, str]] = {}
    for name, setting in plan.derived.items():
        reason = f"set by launch: {setting.why}"
        if name in (names.per_device, names.accumulation):
            reason = f"batch: {plan.stage.config.origin('batch')}, on {machine}"
        derived[name] = (setting.value, reason)
    return derived


@app.command(epilog="Example: launch schema --json-schema > stage.schema.json")
@with_options("stage", "backend", "source", "format")
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

    stages = [shared.stage] if shared.stage else keys.STAGES
    backends = [shared.backend] if shared.backend else BACKENDS
    schemas: list[Schema] = []
    for backend in backends:
        for key, entry in BACKENDS[backend].STAGES.items():
            if (entry.stage or key) not in stages:
                continue
            if not entry.stage:
                schemas.append(shared.locator.schema(backend, key))
            elif json_schema:
                # a further script of a stage: editors ask for it, and older commits lack it
                with contextlib.suppress(InvalidConfig):
                    schemas.append(shared.locator.schema(backend, key))
    if json_schema:
        from launcher.stage.json_schema import combine_schemas

        console.print_json(combine_schemas(schemas))
        return Exit.OK

    def show() -> None:
        notes = {schema.script: explain.list_notes(schema) for schema in schemas}
        console.print_arguments(schemas, notes)

    data = {"schemas": [schema.as_json() for schema in schemas]}
    return answer("schema", shared.format, data, show)


@pins.command("status", epilog="Example: launch pin status")
@with_options("open_instruct", "format")
def pin_status(shared: Shared) -> Exit:
    """Show which checkout is used, and whether it is the pinned one."""
    from launcher.pin import pin

    status = pin.read_status(shared.open_instruct, os.environ)
    data = status.as_json()
    lines = status.lines()
    return answer("pin status", shared.format, data, lines, status.findings, status.exit_code)


@pins.command("diff", epilog="Example: launch pin diff pin HEAD -c configs/tulu/sft_qwen7b.yaml")
@with_options("stage", "open_instruct", "format")
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

    Arguments, defaults, which arguments are read, and the functions that read them.
    """
    from launcher.pin import difference, pin

    pair = pin.find_commits(commits, shared.open_instruct, os.environ)
    paths: list[Path] = []
    for path in configs or ():
        paths += list_stage_files(path)
    changes = difference.compare_commits(pair, paths, stage=shared.stage)
    if shared.format == "json":
        new: list[Finding] = []
        for config in changes.configs:
            new += config.appeared
        console.print_envelope("pin diff", not changes.worse, new, changes.as_json())
    else:
        console.say("\n".join(difference.render_difference(changes, everything=everything)))
    return changes.exit_code


@pins.command("move", epilog="Example: launch pin move origin/main")
@with_options("open_instruct", "format")
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
    data = moved.as_json()
    lines = moved.lines()
    return answer("pin move", shared.format, data, lines, moved.findings, moved.exit_code)


@app.command(
    epilog="Example: launch init sft --model Qwen/Qwen2.5-0.5B --data trl-lib/Capybara --gpus 1"
)
@with_options("source", "format")
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
        help="data set: a name on the hub, a file or a folder; with --from, in place of that "
        "of FILE",
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
    from launcher.stage import draft
    from launcher.stage.conversion.replacement import Replacements

    if source is not None:
        if backend != "trl":
            message = "--from takes the trainer from its file"
            raise usage("useless-option", message, "leave out --backend")
        if lora:
            raise usage("useless-option", "--from takes LoRA from its file", "leave out --lora")
        replacements = Replacements(model=model or None, data=data or None)
        return _convert_file(shared, source, stage, gpus, output, script_args, replacements)
    if script_args is not None:
        raise usage("useless-option", "--script-args is for a script of --from")
    stage = stage or "sft"
    path = _require_free(output or Path(f"{stage}.yaml"))
    if shared.format == "text" and sys.stdin.isatty():
        model = model or typer.prompt("Model (a name on the hub, or a folder)", err=True)
        data = data or typer.prompt("Data set (a name on the hub, a file or a folder)", err=True)
        if gpus is None:
            gpus = typer.prompt("GPUs", default=1, type=int, err=True)
    if not model or not data:
        options = {"--model": model, "--data": data}
        lacking = " and ".join(name for name in options if not options[name])
        help = "launch init sft --model Qwen/Qwen2.5-0.5B --data trl-lib/Capybara"
        raise usage("no-input", f"{lacking} must be given", help)
    new = draft.draft_stage(
        stage,
        backend,
        model=model,
        data=data,
        gpus=1 if gpus is None else gpus,
        output=_choose_free_output(path),
        environ=os.environ,
        lora=lora,
        is_pinned=shared.locator.find(backend).pinned,
    )
    findings = _judge_draft(shared, new, path)
    _write_file(path, new.text(path))
    return _answer_init(shared, new, path, {"lost": []}, findings)


def _convert_file(
    shared: Shared,
    source: Path,
    stage: str | None,
    gpus: int | None,
    output: Path | None,
    script_args: str | None,
    replacements: Replacements,
) -> Exit:
    """Convert a file or script of another tool into a stage file."""
    from launcher.stage.conversion import convert

    conversion = convert.convert(
        source,
        stage=stage,
        gpus=gpus,
        locator=shared.locator,
        arguments=_split_script_args(script_args),
        replacements=replacements,
    )
    new = conversion.draft
    path = _require_free(output or Path(f"{new.stage}.yaml"))
    files = new.place_files(path)
    for file in files:
        _require_free(file)
    for file, content in files.items():
        _write_file(file, content)
    convert.describe(conversion)
    findings = _judge_draft(shared, new, path)
    while convert.settle_refused(conversion, findings):
        convert.describe(conversion)
        findings = _judge_draft(shared, new, path)
    _write_file(path, new.text(path))
    facts = {
        "gpus": new.gpus,
        "nodes": new.nodes,
        "lost": conversion.lost,
        "carried": conversion.ledger.carried,
        "left_out": conversion.left_out,
        "files": [str(file) for file in files],
    }
    return _answer_init(shared, new, path, facts, (*conversion.findings(), *findings))


def _judge_draft(shared: Shared, new: Draft, path: Path) -> tuple[Finding, ...]:
    from launcher.config import load
    from launcher.stage.stage import judge_stage_file

    return judge_stage_file(load.load(path, text=new.text(path)), locator=shared.locator).findings


def _split_script_args(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        message = f"--script-args cannot be split: {error}"
        raise usage("useless-option", message, "quote them as for the shell") from None


def _write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _answer_init(
    shared: Shared,
    new: Draft,
    path: Path,
    facts: Mapping[str, object],
    findings: tuple[Finding, ...],
) -> Exit:
    code = Exit.OK
    command = f"{new.command(path)} --dry-run"
    if select_errors(findings):
        code = Exit.CONFIG
        command = f"launch validate-config {path}"
    data = {
        "path": str(path),
        "stage": new.stage,
        "backend": new.backend,
        **facts,
        "remarks": list(new.remarks),
    }
    lines = [f"wrote {path}", *new.remarks, f"next: {command}"]
    return answer("init", shared.format, data, lines, findings, code)


def _require_free(path: Path) -> Path:
    if not can_be_name(str(path)):
        message = f"no file can be called {shorten(path)}"
        raise usage("impossible-name", message, "choose another name")
    if exists(path):
        help = "launch overwrites no stage file: choose another name"
        raise usage("output-exists", f"{path} exists", help)
    return path


def _choose_free_output(path: Path) -> str:
    """An output folder that does not exist: two stage files must not share one."""
    name = path.with_suffix("")
    if path.is_absolute() or ".." in path.parts:
        name = Path(path.stem)
    folder = Path("output") / name
    number = 2
    while exists(folder):
        folder = Path("output") / f"{name}-{number}"
        number += 1
    return str(folder)


shipped_files = App(
    help="List the stage files that ship with launch, or copy one.", rich_markup_mode=None
)
app.add_typer(shipped_files, name="configs")


def _find_shipped() -> dict[str, Path]:
    folder = find_shipped("configs")
    files = {}
    for path in list_stage_files(folder):
        name = path.relative_to(folder).with_suffix("")
        files[str(name)] = path
    return files


@shipped_files.callback(invoke_without_command=True)
def list_configs(context: typer.Context, format: Format = FORMAT) -> None:
    """List the stage files that ship with launch, or copy one."""
    if context.invoked_subcommand is not None:
        return
    rows = []
    lines = []
    files = _find_shipped()
    width = max(map(len, files), default=0)
    columns = 1000
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
    for name, path in files.items():
        summary = path.read_text("utf-8").split("\n")[0].strip("# .:")
        rows.append({"name": name, "path": str(path), "summary": summary})
        lines.append(f"{name:<{width}}  {summary}"[:columns])
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
    from launcher.config.document import SUFFIXES, read_yaml
    from launcher.config.keys import suggest_name

    files = _find_shipped()
    path = files.get(name.removesuffix(".yaml"))
    if path is None:
        message = f"no stage file `{name}` ships with launch"
        raise usage("no-such-config", message, suggest_name(name, list(files)))
    if target.suffix not in SUFFIXES:
        target /= path.name
    copies = {path: target}
    for stage in read_yaml(path).value.get("stages") or ():
        copies[path.parent / stage["config"]] = target.parent / stage["config"]
    for copy in copies.values():
        _require_free(copy)
    for source, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    written = [str(copy) for copy in copies.values()]
    lines = [f"wrote {copy}" for copy in written]
    return answer("configs copy", format, {"files": written}, lines)
