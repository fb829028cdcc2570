"""A run's verdict, plan and arguments as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from launcher.check import Verdict
from launcher.plan import titled

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem; }
th, td { text-align: left; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
th:last-child, td:last-child { width: 100%; white-space: normal; overflow-wrap: anywhere; }
th { font-weight: 600; } code { font-size: 13px; } small { color: var(--soft); }
.pass, .ok { color: #1a7f37; } .fail { color: #cf222e; } .unproven { color: #9a6700; }
"""


def render(manifest: Mapping[str, Any], verdict: Verdict) -> str:
    """The page; readable offline, in light and dark."""
    name = escape(titled(str(manifest.get("stage", "")), str(manifest.get("name", ""))))
    points = _table(
        ("point", "state", "expected", "", "evidence"),
        (
            (p.name, p.state, p.expected or "-", _mark(p.ok), _Raw(_evidence(p.evidence)))
            for p in verdict.points
        ),
    )
    figures = _table(
        ("figure", "value"), ((k, f"{v:,.5g}") for k, v in verdict.metrics.items() if v is not None)
    )
    plan = _table(("plan", ""), manifest.get("plan", {}).items())
    fields = (
        (key, entry["value"], entry["origin"]) for key, entry in manifest.get("args", {}).items()
    )
    chosen = (row for row in fields if not str(row[2]).startswith("default: "))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}</title>"
        f"<style>{_STYLE}</style><h1>{name} "
        f"<span class={verdict.status}>{verdict.status}</span></h1>"
        f"<p>{verdict.steps or 0} steps, started {escape(str(manifest.get('created', '')))}, "
        f"<small>{escape(_source(manifest))}</small></p>"
        f"{points}{figures}{plan}"
        f"{_table(('argument', 'value', 'set by'), chosen)}</html>\n"
    )


class _Raw(str):
    """Already HTML."""


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>" if body else ""


def _cell(value: Any) -> str:
    return str(value) if isinstance(value, _Raw) else escape(str(value))


def _mark(ok: bool | None) -> _Raw:
    word = {True: "ok", False: "fail", None: "unproven"}[ok]
    return _Raw(f"<span class={word}>{word}</span>")


def _evidence(found: Iterable[Any]) -> str:
    shown = [
        f"<small>{escape(e.source)} {escape(str(e.file).rpartition('/')[2])}:{e.line}</small> "
        f"<code>{escape(e.text)}</code>"
        for e in list(found)[:4]
    ]
    return "<br>".join(shown)


def _source(manifest: Mapping[str, Any]) -> str:
    source = manifest.get("upstream", {})
    return titled(str(source.get("backend", "")), str(source.get("version", "")))
