"""Runs -> one self-contained HTML file: curves, verdict, plan beside measurement, arguments.

Everything but the curves is plain HTML: it reads without scripts, and every text is escaped where
it enters. The policy in the page's head allows nothing but the style and the script that are in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from launcher import panels, series
from launcher.earlier import listed, mapping
from launcher.markup import Html, details, join, number_cell, table, tag, text
from launcher.panels import Panel
from launcher.plan import titled
from launcher.series import Run, Series

_ASSETS = Path(__file__).resolve().parent / "assets"
_COLOURS = 8
_CITES = 4
_FIGURES, _STEPS = 200_000, 20_000
"""How many figures and steps the curves of a page hold at most: 2 MB, and more than a screen can show."""
_MAIN_PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "datasets", "liger-kernel",
    "flash-attn", "olmo-core", "ai2-olmo-core",
)  # fmt: skip
_MARKS = {"pass": "✓", "ok": "✓", "fail": "✗", "unproven": "?"}


def overlay(runs: Sequence[Run]) -> str:
    """The page of one run, or of several with their curves in the same charts."""
    runs = series.named_apart(runs)
    names = short_names(runs)
    style, script = _style(), _script()
    title = _title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs"
    drawn = any(run.series.steps for run in runs)
    made = {
        "curves": _curves(runs, names) if drawn else "",
        "verdict": _verdicts(runs, names),
        "plan": _planned(runs, names),
        "arguments": _arguments(runs, names),
        "findings": _findings(runs, names),
        "versions": _versions(runs, names),
    }
    there = [key for key, section in made.items() if section]
    parts = [
        _head(title, runs, there),
        _overview(runs, names),
        tag("main", join(made.values())),
    ]
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{''.join(parts)}\n<script>{script}</script>\n</body>\n</html>\n"
    )


# ---- the file around it


@lru_cache(maxsize=1)
def _style() -> str:
    return _asset("uPlot.min.css") + "\n" + _asset("report.css")


@lru_cache(maxsize=1)
def _script() -> str:
    # its licence asks to go where the code goes
    licence = f"/*! uPlot: {_asset('uPlot.LICENSE')} */\n"
    return licence + _asset("uPlot.min.js") + "\n" + _asset("report.js")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def _source(text: str) -> str:
    """What a content security policy calls exactly this text."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _data(runs: Sequence[Run], names: Sequence[str], drawn: Sequence[Series]) -> str:
    """The curves as JSON that no text in it can end early."""
    told = ",".join(
        f'{{"name":{json.dumps(name)},{series.compact(one)[1:]}'
        for one, name in zip(drawn, names, strict=True)
    )
    charts = [
        _chart(panel, folded=folded)
        for folded, group in ((False, panels.first(runs)), (True, panels.further(runs)))
        for panel in group
    ]
    whole = f'{{"version":1,"panels":{json.dumps(charts)},"runs":[{told}]}}'
    return whole.replace("<", "\\u003c")


def _drawn(runs: Sequence[Run]) -> list[Series]:
    share = _FIGURES // len(runs)
    return [
        series.thinned(run.series, min(_STEPS, share // (len(run.series.columns) + 1)))
        for run in runs
    ]


def _chart(panel: Panel, *, folded: bool) -> dict[str, object]:
    lines = [{"columns": n.columns, "label": n.label, "second": n.second} for n in panel.lines]
    return {
        "key": panel.key, "lines": lines, "floor": panel.floor, "marks": panel.marks,
        "noisy": panel.noisy, "folded": folded,
    }  # fmt: skip


# ---- pieces


def _section(key: str, title: str, inner: object) -> Html:
    return tag("section", join([tag("h2", title, id=key), inner])) if inner else Html("")


def _word(status: object) -> Html:
    """A judgement: by colour, by sign and by word."""
    key = str(status)
    return tag("span", f"{_MARKS.get(key, '')} {key}".strip(), class_=f"word {_known(key)}")


def _known(status: str) -> str:
    return {"ok": "pass"}.get(status, status) if status in _MARKS else ""


def _swatch(nth: int) -> Html:
    return Html(f'<span class="swatch k{nth % _COLOURS}" aria-hidden="true"></span>')


def _named(nth: int, name: object) -> Html:
    """A run by colour, number and name: colour alone does not tell everybody."""
    return join([_swatch(nth), tag("span", nth + 1, class_="no"), name])


def _title(run: Run) -> str:
    name = str(run.manifest.get("name") or run.name)
    return titled(run.stage or "", name) if run.manifest else name


def short_names(runs: Sequence[Run]) -> list[str]:
    """The names that the stage files gave, where they tell the runs apart."""
    short = [_title(run) for run in runs]
    return short if len(set(short)) == len(short) else [run.name for run in runs]


# ---- head, overview


def _head(title: str, runs: Sequence[Run], there: Sequence[str]) -> Html:
    status = runs[0].verdict.get("status") if len(runs) == 1 else None
    badge = Html(f' <span class="status">{_word(status)}</span>') if status else ""
    words = {"plan": "plan and measurement", "versions": "versions and command"}
    nav = join((tag("a", words.get(key, key), href=f"#{key}") for key in there), " ")
    choice = Html(
        '<form><label class="soft" for="theme">theme</label> <select id="theme" autocomplete="off">'
        '<option value="auto">as the system</option><option value="light">light</option>'
        '<option value="dark">dark</option></select></form>'
    )
    folder = runs[0].name if len(runs) == 1 and runs[0].name != title else ""
    below = tag("p", folder, class_="folder") if folder else ""
    told = tag("div", join([tag("h1", join([title, badge])), below, tag("nav", nav)]))
    return tag("header", join([told, choice]), class_="top")


def _overview(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """One line a run: how it ended, and the figures that people ask for first."""
    head = [
        "run" if len(runs) > 1 else "stage",
        "verdict",
        *map(_right, _OVERVIEW),
        "model",
        "started",
    ]
    rows = []
    for nth, (run, name) in enumerate(zip(runs, names, strict=True)):
        seen = series.measured(run)
        rate = seen["tokens_per_second"]
        if rate is None:
            rate = seen["logged_tokens_per_second"]
        told = (seen["steps"], seen["first_loss"], seen["last_loss"], rate, seen["peak_gib"])
        folder = tag("small", run.name)
        shown = name if name == run.name else join([name, Html("<br>"), folder])
        rows.append(
            [
                tag("th", _named(nth, shown), scope="row", class_="run")
                if len(runs) > 1
                else tag("th", run.stage or "–", scope="row"),
                _word(run.verdict.get("status") or "unproven"),
                *map(number_cell, told),
                tag("td", _clock(seen["hours"]), class_="number"),
                tag("td", _model(run), class_="value"),
                tag("td", _when(run.manifest.get("created")), class_="time"),
            ]
        )
    return table(head, rows, "overview")


_OVERVIEW = ("steps", "first loss", "last loss", "tokens/s", "peak GiB", "time")


def _right(word: str) -> Html:
    return tag("th", word, scope="col", class_="number")


def _model(run: Run) -> str:
    entry = run.asked.get("model_name_or_path") or {}
    return str(entry.get("value") or "–")


def _when(created: object) -> str:
    return str(created or "–").replace("T", " ").replace("+00:00", " UTC")


def _clock(hours: float | None) -> str:
    if hours is None:
        return "–"
    minutes, seconds = divmod(round(hours * 3600), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


# ---- curves


def _curves(runs: Sequence[Run], names: Sequence[str]) -> Html:
    shown = join(_figure_of(panel) for panel in panels.first(runs))
    more = panels.further(runs)
    folded = tag("div", join(_figure_of(panel) for panel in more), class_="grid")
    drawn = _drawn(runs)
    parts = [
        _controls(runs, names),
        _thinning(runs, names, drawn),
        Html("<noscript><p>The curves need scripts; everything else does not.</p></noscript>"),
        tag("div", shown, class_="grid"),
        details(f"{len(more)} more", folded, id="more-curves") if more else "",
        Html('<div id="spoken" class="visually-hidden" aria-live="polite"></div>'),
        Html(
            f'<script type="application/json" id="curves-data">{_data(runs, names, drawn)}</script>'
        ),
    ]
    return _section("curves", "Curves", join(parts))


def _thinning(runs: Sequence[Run], names: Sequence[str], drawn: Sequence[Series]) -> Html:
    """That not every step is drawn, where that is so."""
    told = [
        f"{name}: {len(one.steps):,} of {len(run.series.steps):,} steps are drawn. "
        for run, name, one in zip(runs, names, drawn, strict=True)
        if len(one.steps) < len(run.series.steps)
    ]
    if not told:
        return Html("")
    why = "The least and the greatest value of every stretch are among them; metrics.jsonl has all steps."
    return tag("p", "".join(told) + why, class_="soft")


def _controls(runs: Sequence[Run], names: Sequence[str]) -> Html:
    boxes = [
        Html(
            f'<label><input type="checkbox" data-run="{nth}" checked autocomplete="off">'
            f"{_named(nth, name)}</label>"
        )
        for nth, name in enumerate(names)
    ]
    legend = tag("fieldset", join([Html('<legend class="visually-hidden">runs</legend>'), *boxes]))
    tools = Html(
        '<div class="tools"><label class="soft">smoothing '
        '<input type="range" id="smoothing" min="0" '
        'max="0.99" step="0.01" value="0" autocomplete="off"> <output id="smoothing-is">0.00</output></label>'
        '<button type="button" id="reset" title="drag over a chart to zoom">all steps</button>'
        '<output id="at" class="at soft">last step</output></div>'
    )
    return tag("div", join([legend if len(runs) > 1 else "", tools]), class_="controls")


def _figure_of(panel: Panel) -> Html:
    """The place of one chart."""
    unit = tag("span", f" {panel.unit}", class_="unit") if panel.unit else ""
    key = f"panel-{panel.key}"
    lines = [
        tag("span", line.label, **({"class_": "second"} if line.second else {}))
        for line in panel.lines
        if line.label
    ]
    caption = [
        tag("h3", join([panel.title, unit]), id=f"{key}-title"),
        tag("span", join(lines), class_="lines") if lines else "",
        Html('<button type="button" aria-pressed="false" title="logarithmic y axis">log</button>')
        if panel.floor is None or panel.floor == "zero"
        else "",
    ]
    return Html(
        f'<figure id="{key}" tabindex="0" role="group" aria-labelledby="{key}-title">'
        f"<figcaption>{join(caption)}</figcaption>"
        '<ul class="readout" aria-hidden="true"></ul><div class="plot" aria-hidden="true"></div></figure>\n'
    )


# ---- verdict


def _verdicts(runs: Sequence[Run], names: Sequence[str]) -> Html:
    parts: list[object] = []
    judged = [(nth, run) for nth, run in enumerate(runs) if _points_of(run)]
    if len(judged) > 1:
        parts.append(_matrix(judged, names))
    for nth, run in judged:
        shown = _points(run)
        if len(runs) == 1:
            parts.append(shown)
        else:
            what = join([_named(nth, names[nth]), " ", _word(run.verdict.get("status"))])
            # what is in order needs no second look
            folded = run.verdict.get("status") == "pass"
            attributes = {} if folded else {"open": "open"}
            parts.append(details(tag("h3", what), shown, **attributes))
    return _section("verdict", "Verdict", join(parts))


def _points_of(run: Run) -> list[Mapping[str, Any]]:
    return [point for point in listed(run.verdict.get("points")) if isinstance(point, Mapping)]


def _matrix(judged: Sequence[tuple[int, Run]], names: Sequence[str]) -> Html:
    """Points by runs."""
    by_run = [{str(p.get("name")): p for p in _points_of(run)} for _, run in judged]
    rows = []
    for name in dict.fromkeys(name for points in by_run for name in points):
        cells: list[object] = [name]
        for points in by_run:
            point = points.get(name)
            cells.append("–" if point is None else _ok(point, point.get("state")))
        rows.append(cells)
    head = ["point", *(_named(nth, names[nth]) for nth, _ in judged)]
    return table(head, rows)


def _points(run: Run) -> Html:
    rows = []
    for point in _points_of(run):
        rows.append(
            [
                point.get("name"),
                tag("td", point.get("state"), class_="mono"),
                tag("td", point.get("expected") or "–", class_="mono"),
                _ok(point),
                join([_why(mapping(point.get("detail"))), _cites(point.get("evidence"))]),
            ]
        )
    return table(("point", "state", "expected", "", "evidence"), rows, "wide")


def _ok(point: Mapping[str, Any], words: object = None) -> Html:
    """By colour and sign whether a point is as asked for, beside other words if there are any."""
    ok = point.get("ok")
    if ok is True and point.get("expected") in (None, "any"):
        return tag("span", words or "–", class_="soft")
    status = "ok" if ok is True else "fail" if ok is False else "unproven"
    shown = _word(status)
    return shown if words is None else join([shown, " ", words])


def _why(detail: Mapping[str, Any]) -> Html:
    """What there is to say beyond the lines that prove it."""
    error = mapping(detail.get("error"))
    said = []
    if error:
        where = f"  ({error['at']})" if error.get("at") else ""
        said.append(f"{error.get('type')}: {error.get('message')}{where}")
    said += [str(detail[key]) for key in ("reason", "help", "detail", "wasted") if detail.get(key)]
    return join(tag("p", line, class_="why") for line in said)


def _cites(found: object) -> Html:
    cites = [mapping(entry) for entry in listed(found)]
    items = []
    for cite in cites[:_CITES]:
        file, line = str(cite.get("file") or ""), cite.get("line")
        place = file.rpartition("/")[2] + ("" if line is None else f":{line}")
        shown = tag("span", place, class_="place mono", title=f"{cite.get('source')}: {file}")
        items.append(tag("li", join([shown, tag("code", cite.get("text") or "")])))
    if len(cites) > _CITES:
        items.append(tag("li", f"and {len(cites) - _CITES} more", class_="soft"))
    return tag("ul", join(items), class_="cites") if items else Html("")


# ---- plan beside measurement

# key, words, significant digits, factor, unit; the first four stand there whether known or not
_QUANTITIES: tuple[tuple[str, str, int, float, str], ...] = (
    ("rows_per_step", "batch, rows a step", 4, 1, ""),
    ("steps", "steps", 4, 1, ""),
    ("tokens_per_second", "tokens/s, steady", 4, 1, ""),
    ("peak_gib", "peak memory allocated, GiB", 4, 1, ""),
    ("reserved_gib", "peak memory reserved, GiB", 4, 1, ""),
    ("processes", "processes", 4, 1, ""),
    ("tokens_per_step", "tokens a step", 4, 1, ""),
    ("logged_tokens_per_second", "tokens/s as logged", 4, 1, ""),
    ("wasted_share", "wasted positions", 3, 100, " %"),
    ("mfu", "MFU", 3, 100, " %"),
    ("hours", "time", 3, 1, ""),
)
_ALWAYS = 4


def _planned(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """The plan of each run beside what was measured, and where both are known their ratio."""
    if not any(run.manifest for run in runs) and not any(run.series.steps for run in runs):
        return Html("")
    told = [(series.planned(run), series.measured(run)) for run in runs]
    head = [""]
    if len(runs) > 1:
        over = join(
            tag("th", _named(nth, name), scope="colgroup", colspan="3", class_="number")
            for nth, name in enumerate(names)
        )
        head_rows = tag("tr", join([Html("<td></td>"), over]))
    else:
        head_rows = Html("")
    head += [_right(word) for _ in runs for word in ("plan", "measured", "ratio")]
    rows = []
    for nth, (key, words, digits, scale, unit) in enumerate(_QUANTITIES):
        pairs = [(plan.get(key), seen.get(key)) for plan, seen in told]
        if nth >= _ALWAYS and all(a is None and b is None for a, b in pairs):
            continue
        cells: list[object] = [words]
        for plan, seen in pairs:
            if key == "hours":
                cells += [tag("td", _clock(n), class_="number") for n in (plan, seen)]
            else:
                cells += [number_cell(n, digits, scale, unit) for n in (plan, seen)]
            known = plan is not None and seen is not None and plan > 0
            ratio = f"{seen / plan:.0%}" if known and plan and seen is not None else ""
            cells.append(tag("td", ratio, class_="number soft"))
        rows.append(cells)
    shown = table(head, rows, "figures")
    shown = Html(shown.replace("<thead>", f"<thead>{head_rows}", 1))
    return _section("plan", "Plan and measurement", shown)


# ---- arguments


def _arguments(runs: Sequence[Run], names: Sequence[str]) -> Html:
    if not any(run.asked for run in runs):
        return Html("")
    inner = _own_arguments(runs[0]) if len(runs) == 1 else _compared(runs, names)
    return _section("arguments", "Arguments", inner)


def _is_default(entry: Mapping[str, Any]) -> bool:
    return str(entry.get("origin", "")).startswith("default: ")


def _own_arguments(run: Run) -> Html:
    """What was set, by whom; the defaults folded."""
    own = {name: entry for name, entry in run.asked.items() if not _is_default(entry)}
    rest = {name: entry for name, entry in run.asked.items() if name not in own}
    parts = [_argument_table(own)]
    if rest:
        parts.append(details(f"{len(rest)} defaults", _argument_table(rest)))
    return join(parts)


def _argument_table(entries: Mapping[str, Mapping[str, Any]]) -> Html:
    rows = [
        [
            tag("code", name),
            tag("td", tag("code", _yaml(entry.get("value"))), class_="value"),
            str(entry.get("origin", "")),
        ]
        for name, entry in entries.items()
    ]
    return table(("argument", "value", "set by"), rows, "wide")


def _compared(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """What differs between runs first, then what was set alike, the defaults folded."""
    keys = dict.fromkeys(name for run in runs for name in run.asked)
    differing: list[list[object]] = []
    alike: list[list[object]] = []
    defaults: list[list[object]] = []
    for key in keys:
        entries = [run.asked.get(key) for run in runs]
        known = {_yaml(entry.get("value")) for entry in entries if entry is not None}
        row: list[object] = [tag("code", key), *map(_value_cell, entries)]
        set_here = any(entry is not None and not _is_default(entry) for entry in entries)
        if len(known) > 1 or (set_here and None in entries):
            differing.append(row)
        elif set_here:
            alike.append(row)
        else:
            defaults.append(row)
    head = ["argument", *(_named(nth, name) for nth, name in enumerate(names))]
    parts: list[object] = [tag("h3", f"{len(differing)} that differ"), table(head, differing)]
    for rows, words in ((alike, "set alike"), (defaults, "defaults")):
        if rows:
            parts.append(details(f"{len(rows)} {words}", table(head, rows)))
    return join(parts)


def _value_cell(entry: Mapping[str, Any] | None) -> Html:
    if entry is None:
        return tag("td", "–", class_="soft")
    origin = tag("small", entry.get("origin", ""))
    shown = [tag("code", _yaml(entry.get("value"))), Html("<br>"), origin]
    return tag("td", join(shown), class_="value")


def _yaml(value: object) -> str:
    """A value as a stage file would have it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---- findings, versions, command


def _findings(runs: Sequence[Run], names: Sequence[str]) -> Html:
    several = len(runs) > 1
    rows: list[list[object]] = []
    for nth, run in enumerate(runs):
        for found in map(mapping, listed(run.manifest.get("findings"))):
            file, line = found.get("file") or "", found.get("line")
            helped = [Html("<br>"), tag("small", found["help"])] if found.get("help") else []
            row = [
                tag("code", f"{found.get('severity')}[{found.get('code')}]"),
                tag("small", f"{file}:{line}" if line else file),
                join([found.get("message") or "", *helped]),
            ]
            rows.append([_named(nth, names[nth]), *row] if several else [*row])
    head = ["run"] * several + ["finding", "place", ""]
    return _section("findings", "Findings", table(head, rows, "wide"))


def _versions(runs: Sequence[Run], names: Sequence[str]) -> Html:
    parts: list[object] = []
    for nth, run in enumerate(runs):
        inner = _own_versions(run, nth)
        if inner and len(runs) > 1:
            inner = details(tag("h3", _named(nth, names[nth])), inner)
        parts.append(inner)
    return _section("versions", "Versions and command", join(parts))


def _own_versions(run: Run, nth: int) -> Html:
    told, trainer = run.manifest, mapping(run.manifest.get("trainer"))
    source, machine = mapping(told.get("upstream")), mapping(told.get("machine"))
    packages = mapping(trainer.get("packages"))
    pinned = "" if source.get("pinned", True) else f", not the pin {source.get('pin')}"
    facts: list[tuple[str, object]] = [
        ("source", titled(str(source.get("backend") or ""), str(source.get("version") or "")) + pinned),
        ("changed files", ", ".join(map(str, listed(source.get("changed_files"))))),
        ("where", source.get("root")),
        ("launch", told.get("launch_commit")),
        ("trainer", f"Python {trainer.get('version')}, {trainer.get('python')}" if trainer else None),
        ("packages", ", ".join(f"{n} {packages[n]}" for n in _MAIN_PACKAGES if n in packages)),
        ("machine", ", ".join(str(machine[key]) for key in ("host", "system") if machine.get(key))),
        ("GPUs", "; ".join(map(str, listed(machine.get("gpus"))))),
        ("stage file", told.get("config")),
        ("model folder", told.get("output")),
        ("attempt", told.get("attempt")),
        ("ended", _ended(run)),
    ]  # fmt: skip
    parts: list[object] = [table(("", ""), [row for row in facts if row[1]], "wide facts")]
    if argv := listed(told.get("argv")):
        key = f"command-{nth}"
        variables = ", ".join(map(str, listed(told.get("env")))) or "no variable"
        where = f"in {told.get('cwd')}, with {variables} set"
        parts += [tag("h3", "Command"), tag("p", where, class_="soft")]
        parts.append(tag("pre", shlex.join(map(str, argv)), id=key, tabindex="0"))
        parts.append(tag("p", tag("button", "copy", type="button", data_copy=key)))
    return join(parts) if told else Html("")


def _ended(run: Run) -> str | None:
    if not run.ended:
        return None
    said = f"exit code {run.ended.get('returncode')}"
    if run.ended.get("signal"):
        said += f", signal {run.ended['signal']}"
    return f"{said}, {run.ended.get('ended')}" if run.ended.get("ended") else said
