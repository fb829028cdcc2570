"""`launch plan`, `doctor`, `preview`, `rehearse`, `prepare`, `ladder`, `bench`, `tune`: before
the long run.
"""

from functools import partial
from pathlib import Path

from typer import Option

from launcher.cli.options import OVERRIDES, STAGE_FILE, Shared, answer, app, several_runs, takes
from launcher.errors import Exit, errors
from launcher.report import console


@app.command(
    epilog="Example: launch plan configs/tulu/sft_qwen7b_25pct.yaml --gpus 1,2,8 --row-tokens 290:1100"
)
@takes("request", "nodes", "price", "rows", "row_tokens")
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

    counts = forecast.counts(gpus)
    resolved = collect.collect(shared.request(gpus=max(counts)), Scope.PLAN)
    terms = forecast.ForecastOptions(
        row_tokens=shared.row_tokens,
        rehearsed_tokens=None if shared.row_tokens else rehearsal.row_tokens(resolved),
        rows=shared.rows,
        gpu=gpu,
        gpu_memory=gpu_memory,
        price=shared.price,
        tokens_per_second=tokens_per_second,
        attention=attention,
        shape=shape,
        fit=fit,
    )
    made = forecast.make(resolved, counts, terms)
    findings = (*made.findings, *rehearsal.dropped_rows(resolved))
    # a count that cannot be must not cost the table of the others
    code = Exit.CONFIG if errors(findings) else Exit.OK
    redactor = resolved.redactor

    def show() -> None:
        rows = made.rows()
        console.print_table(rows, list(rows[0]), redactor)
        console.say("\n".join(made.lines(why=why)), redactor)

    return answer(
        "plan", shared.format, made.as_json(why=why), show, findings, code, redactor=redactor
    )


@app.command(epilog="Example: launch doctor configs/tulu/sft_qwen7b_25pct.yaml --gpus 8")
@takes("gpus", "devices", "source", "backend", "format")
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
        reports = readiness.of_each_backend(request, shared.show_progress)
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
        report = readiness.of_stage(request, importing=not install)
    else:
        report = readiness.of_backend(
            request, shared.backend or "open_instruct", importing=not install
        )
    if install and shared.format == "text":
        console.say("\n".join(step.shell() for step in report.install))
        return Exit.OK
    return answer(
        "doctor", shared.format, report.as_json(), report.lines(), report.findings, report.exit_code
    )


@app.command(epilog="Example: launch preview configs/demo/sft.yaml --row 7")
@takes("request")
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

    judged, trainer = collect.judge(shared.request())
    done = preview.preview(judged, trainer, first=rows, row=row, say=shared.show_progress)
    redactor = judged.config.redactor
    show = partial(text.show, done, redactor, whole=row is not None)
    return answer(
        "preview", shared.format, done.as_json(), show, done.findings, done.exit, redactor=redactor
    )


@app.command(epilog="Example: launch rehearse configs/tulu/sft_qwen7b_25pct.yaml")
@takes("request", "strict")
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

    judged, trainer = collect.judge(shared.request())
    done = rehearsal.rehearse(judged, trainer, anew=again, say=shared.show_progress)
    found = rehearsal.combined(judged.findings, done.findings)
    if errors(found, strict=shared.strict):
        code = Exit.CONFIG
    elif done.failed:
        code = Exit.BUG
    else:
        code = Exit.OK
    redactor = judged.config.redactor
    return answer(
        "rehearse", shared.format, done.as_json(), done.lines(), found, code, redactor=redactor
    )


@app.command(epilog="Example: launch prepare configs/tulu/sft_qwen7b_25pct.yaml --gpus 8")
@takes("request", "gpus", "nodes", "strict", "rehearse")
def prepare(shared: Shared) -> Exit:
    """Download and tokenize what a run needs; uses no GPU."""
    from launcher.planning.collect import Scope, collect
    from launcher.workflows.prefetch import prefetch

    resolved = collect(shared.request(), Scope.HOST)
    done = prefetch.prepare(resolved, console.say_aside)
    # now that model, tokenizer and data are here
    shared.rehearse_first({"": resolved})
    redactor = resolved.redactor
    return answer(
        "prepare",
        shared.format,
        done.as_json(),
        done.lines(),
        done.findings,
        done.exit,
        redactor=redactor,
    )


@app.command(
    epilog="Example: launch ladder configs/tulu/sft_qwen7b.yaml --gpus 1,2,8 --steps 50 --price 2.5"
)
@takes(
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
@several_runs
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

    counts = forecast.counts(gpus)
    terms = ladder.terms(counts, price=shared.price, rows=shared.rows, row_tokens=shared.row_tokens)
    quiet = shared.format == "json"
    scope = Scope.FILE if shared.dry_run or shared.slurm else Scope.START
    planned = ladder.plan_rungs(shared.request(), counts, steps=steps, terms=terms, scope=scope)
    if shared.dry_run:

        def show() -> None:
            for rung in planned.rungs:
                console.say(f"# rung: {ladder.label(rung.plan.gpus)}")
                console.print_dry_run(rung.plan, rung.command)

        data = {"rungs": [rung.as_json() for rung in planned.rungs]}
        return answer(
            "ladder", shared.format, data, show, planned.findings, redactor=planned.redactor
        )
    console.print_findings(() if quiet else planned.findings, planned.redactor)
    shared.rehearse_first({"": planned.resolved})
    if shared.hands_over:
        stage = planned.stage
        return shared.hand_over("ladder", stage.name, gpus=max(counts), options=stage.options.slurm)
    ladder.climb(planned, fresh=shared.fresh, allow_unproven=shared.allow_unproven, quiet=quiet)
    return answer(
        "ladder",
        shared.format,
        planned.as_json(),
        lambda: ladder.show(planned),
        code=planned.exit,
        before=planned.findings,
        redactor=planned.redactor,
    )


@app.command(
    epilog="Example: launch bench configs/tulu/sft_qwen7b.yaml --vary packing=false,true --gpus 8"
)
@takes("request", "gpus", "devices", "cpu", "strict", "rehearse", "fresh", "background")
@several_runs
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

    grid = tuple(variants.combinations(vary or (), variant or ()))
    limit = durations.seconds(timeout)
    request = shared.request()
    if not shared.slurm:
        request = bench.require_gpu(request, cpu=shared.cpu)
    draft = bench.Bench(
        request=request, variants=grid, steps=steps, repeats=repeats, timeout_s=limit
    )
    planned = bench.plan(draft, Scope.FILE if shared.slurm else Scope.START)
    text = shared.format == "text"
    console.print_findings(planned.findings if text else (), planned.redactor)
    shared.rehearse_first(planned.resolved)
    if shared.hands_over:
        first = planned.resolved[planned.variants[0].name]
        return shared.hand_over(
            "bench", shared.config.stem, gpus=first.gpus, options=first.stage.options.slurm
        )
    with bench.opened(planned, fresh=shared.fresh) as opened:
        code = bench.run(opened, show=shared.show_progress)
        bench.write_page(opened)
        found = (*planned.findings, *comparison.baseline_fault(opened.samples))
        show = partial(bench.show, opened)
        data = opened.as_json()
        answer(
            "bench", shared.format, data, show, code=code, before=found, redactor=opened.redactor
        )
        if text and code is Exit.INTERRUPTED:
            console.say(bench.interrupted(opened))
    return code


@app.command(epilog="Example: launch tune configs/bench/hand_recipe.yaml --gpus 2 -o tuned.yaml")
@takes("request", "gpus", "devices", "cpu", "row_tokens", "rehearse", "fresh", "background")
@several_runs
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

    budget_s = durations.seconds(budget)
    if shared.slurm:
        # levers, and what fits, depend on the machine of the job
        resolved = collect(shared.request(), Scope.FILE)
        check.require(resolved)
    else:
        request, cpu, rows = shared.request(), shared.cpu, shared.row_tokens
        prepared = tune.prepare(
            request, cpu=cpu, steps=steps, row_tokens=rows, budget_s=budget_s, output=output
        )
        resolved = prepared.resolved
    shared.rehearse_first({"": resolved})
    if shared.hands_over:
        return shared.hand_over(
            "tune", shared.config.stem, gpus=resolved.gpus, options=resolved.stage.options.slurm
        )
    with tune.opened(prepared, fresh=shared.fresh) as opened:
        code = tune.run(opened, show=shared.show_progress)
        trials = opened.bench() if opened.search.runs else None
        if trials is not None:
            bench.write_page(trials)
        found = opened.findings
        if shared.format == "json":
            found = (*found, *comparison.baseline_fault([one.sample for one in opened.search.runs]))
        elif trials is not None:
            bench.show(trials)
        redactor = resolved.redactor
        answer(
            "tune",
            shared.format,
            opened.as_json(),
            tune.ending(opened),
            found,
            code,
            redactor=redactor,
        )
    return code
