"""`launch cache`: the caches of launch."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.commands.vocabulary import Format, FormatOption, answer, app, found_run
from launcher.errors import Exit, usage

cache = typer.Typer(
    no_args_is_help=True, help="Which caches there are, why one was hit or missed, and their end."
)
app.add_typer(cache, name="cache")
CacheKind = Annotated[str | None, typer.Option("--kind", help="dataset or reference")]


@cache.command("list", epilog="Example: launch cache list --format json")
def cache_list(format: FormatOption = Format.text) -> Exit:
    """List the cache folders that launch has made."""
    from launcher import cache_folders, report

    rows = [folder.row() for folder in cache_folders.known()]

    def show() -> None:
        report.table([cache_folders.shown(row) for row in rows], cache_folders.COLUMNS)

    return answer("cache list", format, rows, show if rows else ["no caches yet"])


@cache.command("why", epilog="Example: launch cache why last")
def cache_why(
    target: Annotated[str, typer.Argument(metavar="RUN", help="a run, or `last`")],
    format: FormatOption = Format.text,
) -> Exit:
    """Say why the caches of a run were hit or missed: what differed from the nearest run before."""
    from launcher import cache_reasons

    reasons = cache_reasons.why(found_run(target))
    lines = [line for one in reasons for line in one.lines()] or ["it had no caches of launch's"]
    return answer("cache why", format, [one.as_json() for one in reasons], lines)


@cache.command(
    "clear", epilog="Example: launch cache clear --older-than 30d --kind reference --dry-run"
)
def cache_clear(
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="not used for 30d, 12h, 2w")
    ] = None,
    kind: CacheKind = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list what would be deleted, delete nothing")
    ] = False,
    format: FormatOption = Format.text,
) -> Exit:
    """Remove cache folders that no run uses; never anything else."""
    from launcher import cache_folders, caches

    if kind not in {None, *caches.KINDS}:
        raise usage(
            "bad-kind", f"`{kind}` is no kind of cache", "--kind dataset or --kind reference"
        )
    seconds = None if older_than is None else cache_folders.age(older_than)
    done = cache_folders.clear(
        cache_folders.known(), kind=kind, older_than_s=seconds, dry_run=dry_run
    )
    lines = [one.line() for one in done] or ["nothing to clear"]
    return answer("cache clear", format, [one.as_json() for one in done], lines)
