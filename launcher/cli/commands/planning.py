"""`launch plan`, `doctor`, `preview`, `rehearse`, `prepare`, `ladder`, `bench`, `tune`: before
the long run.
"""

from functools import partial
from pathlib import Path

from typer import Option

from launcher.cli.options import (
    OVERRIDES,
    STAGE_FILE,
    Shared,
    answer,
    app,
    start_several_runs,
    with_options,
)
from launcher.errors import Exit, select_errors
from launcher.report import console


@app.command(
    epilog="Example: launch plan configs/tulu/sft_qwen7b_25pct.yaml --gpus 1,2,8 "
    "--row-tokens 290:1100"
)
@with_options("request", "nodes", "price", "rows", "row_tokens")
def plan(
    shared: Shared,
    gpus: str = Option(
        "8", "--gpus", metavar="1,2,8", help="GPUs on each machine, one column each"
    ),
    gpu: str | None = Option(
        None,
        "--gpu",
        metavar="NAME",
        help="GPU type: H100, A100",
        show_default="that of the GPUs here",
    ),
    gpu_memory: float | None = Option(
        None,
        "--gpu-memory",
        metavar="GIB",
        help="memory of one GPU",
        show_default="that of the GPUs here",
    ),
    tokens_per_second: float | None = Option(
        None, "--tokens-per-second", metavar="X", help="measured speed of all GPUs together"
    ),
    attention: str | None = Option(
        None,
        "--attention",
        metavar="NAME",
        help="flash_2, flash_3, flash_4, sdpa or eager",
        show_default="flash_2",
    ),
    shape: str | None = Option(
        None, "--shape", metavar="MODEL", help="use this model's size", show_default="the file's"
    ),
    fit: bool = Option(False, "--fit", help="find the largest per-device batch that fits"),
    why: bool = Option(False, "--why", help="show every part with its formula"),
) -> Exit:
    """Predict batch, steps, memory, time and cost on N GPUs."""
    from launcher.planning import collect, forecast
    from launcher.planning.collect import Scope
    from launcher.workflows.rehearse import rehearsal

    counts = forecast.parse_counts(gpus)
    facts = collect.collect(shared.request(gpus=max(counts)), Scope.PLAN)
    options = forecast.ForecastOptions(
        row_tokens=shared.row_tokens,
        rehearsed_tokens=None if shared.row_tokens else rehearsal.recall_row_tokens(facts),
        rows=shared.rows,
        gpu=gpu,
        gpu_memory=gpu_memory,
        price=shared.price,
        tokens_per_second=tokens_per_second,
        attention=attention,
        shape=shape,
        fit=fit,
    )
    result = forecast.forecast_stage(facts, counts, options)
    findings = (*result.findings, *rehearsal.recall_dropped_rows(facts))
    # an impossible count of GPUs must not hide the table of the others
    code = Exit.CONFIG if select_errors(findings) else Exit.OK

    def show() -> None:
        rows = result.rows()
        console.print_table(rows, list(rows[0]), facts.redactor)
        console.say("\n".join(result.lines(why=why)), facts.redactor)

    data = result.as_json(why=why)
    return answer("plan", shared.format, data, show, findings, code, redactor=facts.redactor)


@app.command(epilog="Example: launch doctor configs/tulu/sft_qwen7b_25pct.yaml --gpus 8")
@with_options("gpus", "devices", "source", "backend", "format")
def doctor(
    shared: Shared,
    config: Path | None = STAGE_FILE,
    overrides: list[str] | None = OVERRIDES,
    install: bool = Option(
        False,
        "--install",
        help="print the commands that build the trainer's environment; `sh` runs them",
    ),
) -> Exit:
    """Check whether this machine is ready to train.

    Looks at the packages by importing them, at GPUs, driver, disk and caches.
    """
    from launcher.planning.doctor import readiness

    request = shared.request(config=config or Path(), overrides=overrides or ())
    if config is None and shared.backend is None and not install:
        reports = readiness.examine_each_backend(request, shared.show_progress)
        return answer(
            "doctor",
            shared.format,
            reports.as_json(),
            reports.lines(),
            reports.findings,
            reports.exit_code,
        )
    if not install:
        shared.show_progress("importing what training imports; this can take a minute")
    if config is not None:
        report = readiness.examine_stage(request, importing=not install)
    else:
        report = readiness.examine_backend(
            request, shared.backend or "open_instruct", importing=not install
        )
    if install and shared.format == "text":
        console.say("\n".join(step.shell() for step in report.install))
        return Exit.OK
    return answer(
        "doctor", shared.format, report.as_json(), report.lines(), report.findings, report.exit_code
    )


@app.command(epilog="Example: launch preview configs/demo/sft.yaml --row 7")
@with_options("request")
def preview(
    shared: Shared,
    rows: int = Option(3, "--rows", metavar="N", min=0, help="show the first N rows"),
    row: str | None = Option(
        None,
        "--row",
        metavar="I",
        help="show this row in full: its number from 1, or FILE:LINE",
        show_default=False,
    ),
) -> Exit:
    """Show rows as the model gets them, trained tokens marked.

    The trainer's own code prepares them, on the CPU and without weights. Rows that are cut or
    dropped are counted.
    """
    from launcher.planning import collect
    from launcher.workflows.preview import preview, text

    judged, trainer = collect.judge_request(shared.request())
    result = preview.preview(judged, trainer, first=rows, row=row, say=shared.show_progress)
    redactor = judged.config.redactor
    show = partial(text.show, result, redactor, whole=row is not None)
    return answer(
        "preview",
        shared.format,
        result.as_json(),
        show,
        result.findings,
        result.exit,
        redactor=redactor,
    )


@app.command(epilog="Example: launch rehearse configs/tulu/sft_qwen7b_25pct.yaml")
@with_options("request", "strict")
def rehearse(
    shared: Shared,
    again: bool = Option(
        False, "--again", help="repeat it although the same rehearsal has a result"
    ),
) -> Exit:
    """Run two steps on the CPU with a tiny model and your data.

    It is the real training script, a model of the same architecture, and the first 64 rows.
    """
    from launcher.planning import collect
    from launcher.workflows.rehearse import rehearsal

    judged, trainer = collect.judge_request(shared.request())
    result = rehearsal.rehearse(judged, trainer, anew=again, say=shared.show_progress)
    findings = rehearsal.merge_findings(judged.findings, result.findings)
    code = Exit.BUG if result.failed else Exit.OK
    if select_errors(findings, strict=shared.strict):
        code = Exit.CONFIG
    data = result.as_json()
    lines = result.lines()
    redactor = judged.config.redactor
    return answer("rehearse", shared.format, data, lines, findings, code, redactor=redactor)


@app.command(epilog="Example: launch prepare configs/tulu/sft_qwen7b_25pct.yaml --gpus 8")
@with_options("request", "gpus", "nodes", "strict", "rehearse")
def prepare(shared: Shared) -> Exit:
    """Download and tokenize what a run needs; uses no GPU."""
    from launcher.planning.collect import Scope, collect
    from launcher.workflows.prefetch import prefetch

    facts = collect(shared.request(), Scope.HOST)
    result = prefetch.prepare_caches(facts, console.say_aside)
    # it needs the model, tokenizer and data that were just fetched
    shared.rehearse_first({"": facts})
    return answer(
        "prepare",
        shared.format,
        result.as_json(),
        result.lines(),
        result.findings,
        result.exit,
        redactor=facts.redactor,
    )


@app.command(
    epilog="Example: launch ladder configs/tulu/sft_qwen7b.yaml --gpus 1,2,8 --steps 50 --price 2.5"
)
@with_options(
    "request",
    "price",
    "rows",
    "row_tokens",
    "dry_run",
    "allow_unproven",
    "strict",
    "rehearse",
    "fresh",
    "background",
)
@start_several_runs
def ladder(
    shared: Shared,
    gpus: str = Option(
        "1,2,8", "--gpus", metavar="1,2,8", help="numbers of GPUs to try in turn; 0 is the CPU"
    ),
    steps: int = Option(50, "--steps", min=5, help="optimizer steps of each run"),
) -> Exit:
    """Try 1, 2, 8 GPUs in short runs; stop at the first red flag.

    Ends with go or no-go, and what the full run takes.
    """
    from launcher.planning import forecast
    from launcher.planning.collect import Scope
    from launcher.workflows.ladder import ladder

    counts = forecast.parse_counts(gpus)
    terms = ladder.make_forecast_options(
        counts, price=shared.price, rows=shared.rows, row_tokens=shared.row_tokens
    )
    scope = Scope.FILE if shared.dry_run or shared.slurm else Scope.START
    planned = ladder.plan_rungs(shared.request(), counts, steps=steps, terms=terms, scope=scope)
    findings = planned.findings
    redactor = planned.redactor
    if shared.dry_run:

        def show() -> None:
            for rung in planned.rungs:
                console.say(f"# rung: {ladder.format_gpus(rung.plan.gpus)}")
                console.print_dry_run(rung.plan, rung.command)

        data = {"rungs": [rung.as_json() for rung in planned.rungs]}
        return answer("ladder", shared.format, data, show, findings, redactor=redactor)
    shared.print_findings(findings, redactor)
    shared.rehearse_first({"": planned.resolved})
    if shared.hands_over:
        name = planned.stage.name
        options = planned.stage.options.slurm
        return shared.hand_over("ladder", name, gpus=max(counts), options=options)
    quiet = shared.format == "json"
    ladder.climb(planned, fresh=shared.fresh, allow_unproven=shared.allow_unproven, quiet=quiet)
    return answer(
        "ladder",
        shared.format,
        planned.as_json(),
        partial(ladder.show, planned),
        code=planned.exit,
        before=findings,
        redactor=redactor,
    )


@app.command(
    epilog="Example: launch bench configs/tulu/sft_qwen7b.yaml --vary packing=false,true --gpus 8"
)
@with_options("request", "gpus", "devices", "cpu", "strict", "rehearse", "fresh", "background")
@start_several_runs
def bench(
    shared: Shared,
    vary: list[str] | None = Option(
        None, "--vary", metavar="KEY=A,B", help="values to compare; repeat for a grid"
    ),
    variant: list[str] | None = Option(
        None,
        "--variant",
        metavar="NAME:KEY=A,KEY=B",
        help="one variant that sets several keys (repeatable)",
    ),
    steps: int = Option(20, "--steps", min=2, help="optimizer steps of each run"),
    repeats: int = Option(3, "--repeats", min=1, max=7, help="runs of each variant"),
    timeout: str = Option(
        "30m", "--timeout", metavar="30m", help="time limit of one run, start-up included"
    ),
) -> Exit:
    """Compare settings in short runs: speed, memory and loss."""
    from launcher.config import durations
    from launcher.planning.collect import Scope
    from launcher.workflows.bench import bench, comparison, variants

    grid = tuple(variants.combine_variants(vary or (), variant or ()))
    limit_s = durations.parse_seconds(timeout)
    request = shared.request()
    if not shared.slurm:
        request = bench.require_gpu(request, cpu=shared.cpu)
    draft = bench.Bench(
        request=request, variants=grid, steps=steps, repeats=repeats, timeout_s=limit_s
    )
    scope = Scope.FILE if shared.slurm else Scope.START
    planned = bench.plan(draft, scope)
    shared.print_findings(planned.findings, planned.redactor)
    shared.rehearse_first(planned.resolved)
    if shared.hands_over:
        facts = planned.resolved[planned.variants[0].name]
        options = facts.stage.options.slurm
        return shared.hand_over("bench", shared.config.stem, gpus=facts.gpus, options=options)
    with bench.open_campaign(planned, fresh=shared.fresh) as opened:
        code = bench.run(opened, show=shared.show_progress)
        bench.write_page(opened)
        answer(
            "bench",
            shared.format,
            opened.as_json(),
            partial(bench.show, opened),
            code=code,
            before=(*planned.findings, *comparison.find_baseline_fault(opened.samples)),
            redactor=opened.redactor,
        )
        if shared.format == "text" and code is Exit.INTERRUPTED:
            console.say(bench.describe_interruption(opened))
    return code


@app.command(epilog="Example: launch tune configs/bench/hand_recipe.yaml --gpus 2 -o tuned.yaml")
@with_options("request", "gpus", "devices", "cpu", "row_tokens", "rehearse", "fresh", "background")
@start_several_runs
def tune(
    shared: Shared,
    budget: str = Option(
        "10m", "--budget", metavar="10m", help="time limit of all trials together"
    ),
    steps: int = Option(8, "--steps", min=3, help="optimizer steps of each trial"),
    output: Path | None = Option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="the stage file to write",
        show_default="beside the trials",
    ),
) -> Exit:
    """Search the fastest setting that trains the same.

    Global batch and loss stay; the result is written as a stage file.
    """
    from launcher.config import durations
    from launcher.planning import check
    from launcher.planning.collect import Scope, collect
    from launcher.workflows.bench import bench, comparison
    from launcher.workflows.tune import tune

    budget_s = durations.parse_seconds(budget)
    if shared.slurm:
        # levers, and what fits, depend on the machine of the job
        facts = collect(shared.request(), Scope.FILE)
        check.require(facts)
    else:
        prepared = tune.prepare_tuning(
            shared.request(),
            cpu=shared.cpu,
            steps=steps,
            row_tokens=shared.row_tokens,
            budget_s=budget_s,
            output=output,
        )
        facts = prepared.resolved
    shared.rehearse_first({"": facts})
    if shared.hands_over:
        options = facts.stage.options.slurm
        return shared.hand_over("tune", shared.config.stem, gpus=facts.gpus, options=options)
    with tune.open_campaign(prepared, fresh=shared.fresh) as opened:
        code = tune.run(opened, show=shared.show_progress)
        findings = opened.findings
        if opened.search.runs:
            trials = opened.bench()
            bench.write_page(trials)
            if shared.format == "text":
                bench.show(trials)
        if shared.format == "json":
            samples = [trial.sample for trial in opened.search.runs]
            findings = (*findings, *comparison.find_baseline_fault(samples))
        data = opened.as_json()
        ending = tune.describe_ending(opened)
        answer("tune", shared.format, data, ending, findings, code, redactor=facts.redactor)
    return code
