"""Runs -> one self-contained HTML file: curves, verdict, plan beside measurement, arguments.

Everything but the curves is plain HTML: it reads without scripts, and every text is escaped where
it enters. The policy in the page's head allows nothing but the style and the script that are in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from launcher import files
from launcher.errors import not_ready
from launcher.plan.plan import titled
from launcher.report import series
from launcher.report.html import Html, details, join, number_cell, table, tag, text
from launcher.report.series import Run, any_number
from launcher.runs import rundir
from launcher.runs.record import listed, mapping

_ASSETS = Path(__file__).resolve().parent / "assets"
_COLOURS = 8
_CITES = 4
_MAIN_PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "datasets", "liger-kernel",
    "flash-attn", "olmo-core", "ai2-olmo-core",
)  # fmt: skip
_MARKS = {"pass": "✓", "ok": "✓", "fail": "✗", "unproven": "?"}
_NAVIGATION = {"plan": "plan and measurement", "versions": "versions and command"}
_TOOLS = Html(
    '<div class="tools"><label class="soft">smoothing <input type="range" id="smoothing" min="0" '
    'max="0.99" step="0.01" value="0" autocomplete="off"> <output id="smoothing-is">0.00</output></label>'
    '<button type="button" id="reset" title="drag over a chart to zoom">all steps</button>'
    '<output id="at" class="at soft">last step</output></div>'
)


class Named(NamedTuple):
    """A run as the page shows it: its number, and the name of its stage file, if that tells it apart."""

    nth: int
    name: str
    run: Run

    @property
    def heading(self) -> Html:
        """By colour, number and name: colour alone does not tell everybody."""
        swatch = f'<span class="swatch k{self.nth % _COLOURS}" aria-hidden="true"></span>'
        return join([Html(swatch), tag("span", self.nth + 1, class_="no"), self.name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart over the optimizer steps.

    Of a run each line draws the first of its columns that the run has; a second line is dashed. The y axis
    begins at `zero`, or is a `share` of 1. `marks` shows where a step was not finite; what is not `noisy` is
    never smoothed.
    """

    key: str
    title: str
    lines: Mapping[str, tuple[str, ...]]
    unit: str = ""
    floor: str | None = None
    marks: bool = False
    noisy: bool = True

    def drawn(self, runs: Iterable[Run]) -> set[str]:
        """The columns that it draws of any of these runs."""
        drawn = set()
        for columns in self.lines.values():
            for run in runs:
                there = (n for n in columns if any_number(run.series.columns.get(n, ())))
                drawn |= set([*there][:1])
        return drawn

    def as_json(self, *, folded: bool) -> dict[str, object]:
        """As the page's script reads it."""
        lines = [
            {"columns": columns, "label": label, "second": nth > 0}
            for nth, (label, columns) in enumerate(self.lines.items())
        ]
        return {
            "key": self.key, "lines": lines, "floor": self.floor, "marks": self.marks,
            "noisy": self.noisy, "folded": folded,
        }  # fmt: skip

    def figure(self) -> Html:
        """The place of the chart."""
        key, unit = f"panel-{self.key}", tag("span", f" {self.unit}", class_="unit")
        lines = [
            tag("span", label, **({"class_": "second"} if nth else {}))
            for nth, label in enumerate(self.lines)
            if label
        ]
        caption = [
            tag("h3", join([self.title, unit if self.unit else ""]), id=f"{key}-title"),
            tag("span", join(lines), class_="lines") if lines else "",
        ]
        return Html(
            f'<figure id="{key}" role="group" aria-labelledby="{key}-title">'
            f"<figcaption>{join(caption)}</figcaption>"
            '<ul class="readout" aria-hidden="true"></ul>'
            '<div class="plot" aria-hidden="true"></div></figure>\n'
        )


def _panel(key: str, title: str, *columns: str, **options: Any) -> Panel:
    return Panel(key=key, title=title, lines={"": columns}, **options)


PANELS: tuple[Panel, ...] = (
    _panel("loss", "loss", "loss", marks=True),
    _panel("learning_rate", "learning rate", "learning_rate", floor="zero", noisy=False),
    _panel("tokens", "tokens/s", "tokens_per_second", "logged_tokens_per_second", floor="zero"),
    Panel(
        key="memory", title="peak memory", unit="GiB", floor="zero", noisy=False,
        lines={"allocated": ("allocated_gib",), "reserved": ("reserved_gib",)},
    ),
    Panel(
        key="rewards", title="rewards",
        lines={"chosen": ("rewards/chosen",), "rejected": ("rewards/rejected",)},
    ),
    _panel("margin", "reward margin", "rewards/margins", "rewards/margin"),
    _panel(
        "accuracy", "reward accuracy", "rewards/accuracies", "rewards/accuracy", floor="share"
    ),
    _panel("grad_norm", "gradient norm", "grad_norm", floor="zero"),
    _panel("wasted", "wasted share", "wasted_share", floor="zero"),
)  # fmt: skip
"""The charts that everybody looks at; any other column has one of its own, folded away."""


def overlay(runs: Sequence[Run]) -> str:
    """The page of one run, or of several with their curves in the same charts."""
    runs = series.named_apart(runs)
    titles = [_title(run) for run in runs]
    if len({*titles}) < len(runs):
        titles = [run.name for run in runs]
    shown = [
        Named(nth, name, run) for nth, (name, run) in enumerate(zip(titles, runs, strict=True))
    ]
    style = _asset("uPlot.min.css") + "\n" + _asset("report.css")
    # its licence asks to go where the code goes
    licence = f"/*! uPlot: {_asset('uPlot.LICENSE')} */\n"
    script = licence + _asset("uPlot.min.js") + "\n" + _asset("report.js")
    title = _title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs"
    sections = {
        "curves": _curves(shown),
        "verdict": _verdicts(shown),
        "plan": _planned(shown),
        "arguments": _arguments(shown),
        "findings": _findings(shown),
        "versions": _section("versions", "Versions and command", _each(shown, _versions)),
    }
    parts = [
        _head(title, runs, [key for key, section in sections.items() if section]),
        _overview(shown),
        tag("main", join(sections.values())),
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


def usual_path(runs: Sequence[Run]) -> Path:
    """Where the page goes when nobody says: into the run's own folder, else `report.html` here."""
    if len(runs) == 1 and runs[0].path.is_dir():
        return rundir.RunFolder(runs[0].path).report
    return Path("report.html")


def write(runs: Sequence[Run], path: Path) -> None:
    """Write the page. Raises NotReady where it cannot be written."""
    whole = overlay(runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, whole)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise not_ready("unwritable-file", message, file=str(path)) from None


@lru_cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def _source(content: str) -> str:
    """What a content security policy calls exactly this text."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# ---- pieces


def _section(key: str, title: str, inner: object) -> Html:
    return tag("section", join([tag("h2", title, id=key), inner])) if inner else Html("")


def _each(shown: Sequence[Named], inner_of: Callable[[Named], Html]) -> Html:
    """A part of every run, of several below their names; what is in order needs no second look."""
    if len(shown) == 1:
        return inner_of(shown[0])
    parts = []
    for one in shown:
        if inner := inner_of(one):
            status = one.run.verdict.get("status")
            attributes = {} if inner_of is _versions or status == "pass" else {"open": "open"}
            word = [] if inner_of is _versions else [" ", _word(status)]
            parts.append(details(tag("h3", join([one.heading, *word])), inner, **attributes))
    return join(parts)


def _word(status: object) -> Html:
    """A judgement: by colour, by sign and by word."""
    key = str(status)
    colour = {"ok": "pass"}.get(key, key) if key in _MARKS else ""
    return tag("span", f"{_MARKS.get(key, '')} {key}".strip(), class_=f"word {colour}")


def _title(run: Run) -> str:
    name = str(run.manifest.get("name") or run.name)
    return titled(run.stage or "", name) if run.manifest else name


def _right(word: str) -> Html:
    return tag("th", word, scope="col", class_="number")


def _clock(hours: float | None) -> Html:
    shown = "–"
    if hours is not None:
        minutes, seconds = divmod(round(hours * 3600), 60)
        shown = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    return tag("td", shown, class_="number")


# ---- head, overview


def _head(title: str, runs: Sequence[Run], sections: Sequence[str]) -> Html:
    status = runs[0].verdict.get("status") if len(runs) == 1 else None
    badge = Html(f' <span class="status">{_word(status)}</span>') if status else ""
    links = (tag("a", _NAVIGATION.get(key, key), href=f"#{key}") for key in sections)
    folder = runs[0].name if len(runs) == 1 and runs[0].name != title else ""
    below = tag("p", folder, class_="folder") if folder else ""
    left = tag("div", join([tag("h1", join([title, badge])), below, tag("nav", join(links, " "))]))
    return tag("header", left, class_="top")


def _overview(shown: Sequence[Named]) -> Html:
    """One line a run: how it ended, and the figures that people ask for first."""
    several = len(shown) > 1
    figures = ("steps", "first loss", "last loss", "tokens/s", "peak GiB", "time")
    head = ["run" if several else "stage", "verdict", *map(_right, figures), "model", "started"]
    rows = []
    for one in shown:
        run, seen = one.run, series.measured(one.run)
        rate = seen["tokens_per_second"]
        rate = seen["logged_tokens_per_second"] if rate is None else rate
        first = tag("th", run.stage or "–", scope="row")
        if several:
            folder = [] if one.name == run.name else [Html("<br>"), tag("small", run.name)]
            first = tag("th", join([one.heading, *folder]), scope="row", class_="run")
        numbers = (seen["steps"], seen["first_loss"], seen["last_loss"], rate, seen["peak_gib"])
        model = mapping(run.asked.get("model_name_or_path")).get("value")
        created = str(run.manifest.get("created") or "–")
        rows.append(
            [
                first,
                _word(run.verdict.get("status") or "unproven"),
                *map(number_cell, numbers),
                _clock(seen["hours"]),
                tag("td", model or "–", class_="value"),
                tag("td", created.replace("T", " ").replace("+00:00", " UTC"), class_="time"),
            ]
        )
    return table(head, rows, "overview")


# ---- curves


def _curves(shown: Sequence[Named]) -> Html:
    runs = [one.run for one in shown]
    if not any(run.series.steps for run in runs):
        return Html("")
    first = [panel for panel in PANELS if panel.drawn(runs)]
    drawn = {name for panel in PANELS for name in panel.drawn(runs)}
    names = dict.fromkeys(
        name for run in runs for name, column in run.series.columns.items() if any_number(column)
    )
    further = [
        _panel(f"column-{n}", name, name) for n, name in enumerate(names) if name not in drawn
    ]
    charts = [panel.as_json(folded=False) for panel in first]
    charts += [panel.as_json(folded=True) for panel in further]
    grids = [
        tag("div", join(p.figure() for p in group), class_="grid") for group in (first, further)
    ]
    legend = [_switch(one) for one in shown] if len(shown) > 1 else []
    title = Html('<legend class="visually-hidden">runs</legend>')
    fieldset = tag("fieldset", join([title, *legend])) if legend else ""
    parts = [
        tag("div", join([fieldset, _TOOLS]), class_="controls"),
        Html("<noscript><p>The curves need scripts; everything else does not.</p></noscript>"),
        grids[0],
        details(f"{len(further)} more", grids[1], id="more-curves") if further else "",
        Html(f'<script type="application/json" id="curves-data">{_data(shown, charts)}</script>'),
    ]
    return _section("curves", "Curves", join(parts))


def _data(shown: Sequence[Named], charts: Sequence[object]) -> str:
    """The curves as JSON that no text in it can end early."""
    curves = ",".join(
        f'{{"name":{json.dumps(one.name)},{series.compact(one.run.series)[1:]}' for one in shown
    )
    whole = f'{{"version":1,"panels":{json.dumps(charts)},"runs":[{curves}]}}'
    return whole.replace("<", "\\u003c")


def _switch(one: Named) -> Html:
    return Html(
        f'<label><input type="checkbox" data-run="{one.nth}" checked autocomplete="off">'
        f"{one.heading}</label>"
    )


# ---- verdict


def _verdicts(shown: Sequence[Named]) -> Html:
    judged = [one for one in shown if _points_of(one.run)]
    matrix = _matrix(judged) if len(judged) > 1 else ""
    points = _each(shown, _points) if judged else ""
    return _section("verdict", "Verdict", join([matrix, points]))


def _points_of(run: Run) -> list[Mapping[str, Any]]:
    return [point for point in listed(run.verdict.get("points")) if isinstance(point, Mapping)]


def _matrix(judged: Sequence[Named]) -> Html:
    """Points by runs."""
    by_run = [{str(p.get("name")): p for p in _points_of(one.run)} for one in judged]
    rows = [
        [name, *("–" if name not in ps else _ok(ps[name], ps[name].get("state")) for ps in by_run)]
        for name in dict.fromkeys(name for points in by_run for name in points)
    ]
    return table(["point", *(one.heading for one in judged)], rows)


def _points(one: Named) -> Html:
    rows = [
        [
            point.get("name"),
            tag("td", point.get("state"), class_="mono"),
            tag("td", point.get("expected") or "–", class_="mono"),
            _ok(point),
            join([_why(mapping(point.get("detail"))), _cites(point.get("evidence"))]),
        ]
        for point in _points_of(one.run)
    ]
    return table(("point", "state", "expected", "", "evidence"), rows, "wide")


def _ok(point: Mapping[str, Any], words: object = None) -> Html:
    """By colour and sign whether a point is as asked for, beside other words if there are any."""
    ok = point.get("ok")
    if ok is True and point.get("expected") in (None, "any"):
        return tag("span", words or "–", class_="soft")
    shown = _word("ok" if ok is True else "fail" if ok is False else "unproven")
    return shown if words is None else join([shown, " ", words])


def _why(detail: Mapping[str, Any]) -> Html:
    """What there is to say beyond the lines that prove it."""
    error, lines = mapping(detail.get("error")), []
    if error:
        where = f"  ({error['at']})" if error.get("at") else ""
        lines.append(f"{error.get('type')}: {error.get('message')}{where}")
    lines += [str(detail[key]) for key in ("reason", "help", "detail", "wasted") if detail.get(key)]
    return join(tag("p", line, class_="why") for line in lines)


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


class _Quantity(NamedTuple):
    key: str
    words: str
    digits: int = 4
    scale: float = 1
    unit: str = ""


_QUANTITIES = (
    _Quantity("rows_per_step", "batch, rows a step"),
    _Quantity("steps", "steps"),
    _Quantity("tokens_per_second", "tokens/s, steady"),
    _Quantity("peak_gib", "peak memory allocated, GiB"),
    _Quantity("reserved_gib", "peak memory reserved, GiB"),
    _Quantity("processes", "processes"),
    _Quantity("tokens_per_step", "tokens a step"),
    _Quantity("logged_tokens_per_second", "tokens/s as logged"),
    _Quantity("wasted_share", "wasted positions", 3, 100, " %"),
    _Quantity("mfu", "MFU", 3, 100, " %"),
    _Quantity("hours", "time"),
)
_ALWAYS = 4  # of them stand there whether known or not


def _planned(shown: Sequence[Named]) -> Html:
    """The plan of each run beside what was measured, and where both are known their ratio."""
    if not any(one.run.manifest or one.run.series.steps for one in shown):
        return Html("")
    figures = [(series.planned(one.run), series.measured(one.run)) for one in shown]
    rows = []
    for nth, quantity in enumerate(_QUANTITIES):
        pairs = [(plan.get(quantity.key), seen.get(quantity.key)) for plan, seen in figures]
        if nth < _ALWAYS or any(number is not None for pair in pairs for number in pair):
            cells = [cell for pair in pairs for cell in _plan_cells(quantity, *pair)]
            rows.append([quantity.words, *cells])
    head = ["", *(_right(word) for _ in shown for word in ("plan", "measured", "ratio"))]
    whole = table(head, rows, "figures")
    if len(shown) > 1:
        names = (
            tag("th", one.heading, scope="colgroup", colspan="3", class_="number") for one in shown
        )
        above = tag("tr", join([Html("<td></td>"), *names]))
        whole = Html(whole.replace("<thead>", f"<thead>{above}", 1))
    return _section("plan", "Plan and measurement", whole)


def _plan_cells(quantity: _Quantity, plan: float | None, seen: float | None) -> list[Html]:
    ratio = f"{seen / plan:.0%}" if plan is not None and seen is not None and plan > 0 else ""
    values = (plan, seen)
    if quantity.key == "hours":
        cells = [_clock(value) for value in values]
    else:
        cells = [number_cell(v, quantity.digits, quantity.scale, quantity.unit) for v in values]
    return [*cells, tag("td", ratio, class_="number soft")]


# ---- arguments


def _arguments(shown: Sequence[Named]) -> Html:
    if not any(one.run.asked for one in shown):
        return Html("")
    inner = _own_arguments(shown[0].run) if len(shown) == 1 else _compared(shown)
    return _section("arguments", "Arguments", inner)


def _is_default(entry: Mapping[str, Any] | None) -> bool:
    return entry is None or str(entry.get("origin", "")).startswith("default: ")


def _own_arguments(run: Run) -> Html:
    """What was set, by whom; the defaults folded."""
    own, rest = ([x for x in run.asked.items() if _is_default(x[1]) is d] for d in (False, True))
    folded = details(f"{len(rest)} defaults", _argument_table(rest)) if rest else ""
    return join([_argument_table(own), folded])


def _argument_table(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> Html:
    rows = [
        [
            tag("code", name),
            tag("td", tag("code", _yaml(entry.get("value"))), class_="value"),
            str(entry.get("origin", "")),
        ]
        for name, entry in entries
    ]
    return table(("argument", "value", "set by"), rows, "wide")


def _compared(shown: Sequence[Named]) -> Html:
    """What differs between runs first, then what was set alike, the defaults folded."""
    groups: dict[str, list[list[object]]] = {"that differ": [], "set alike": [], "defaults": []}
    for key in dict.fromkeys(name for one in shown for name in one.run.asked):
        entries = [one.run.asked.get(key) for one in shown]
        values = {_yaml(entry.get("value")) for entry in entries if entry is not None}
        is_set = not all(map(_is_default, entries))
        differs = len(values) > 1 or (is_set and None in entries)
        group = "that differ" if differs else "set alike" if is_set else "defaults"
        groups[group].append([tag("code", key), *map(_value_cell, entries)])
    head = ["argument", *(one.heading for one in shown)]
    differing = groups.pop("that differ")
    parts = [tag("h3", f"{len(differing)} that differ"), table(head, differing)]
    for words, rows in groups.items():
        if rows:
            parts.append(details(f"{len(rows)} {words}", table(head, rows)))
    return join(parts)


def _value_cell(entry: Mapping[str, Any] | None) -> Html:
    if entry is None:
        return tag("td", "–", class_="soft")
    origin = tag("small", entry.get("origin", ""))
    parts = [tag("code", _yaml(entry.get("value"))), Html("<br>"), origin]
    return tag("td", join(parts), class_="value")


def _yaml(value: object) -> str:
    """A value as a stage file would have it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---- findings, versions, command


def _findings(shown: Sequence[Named]) -> Html:
    several = len(shown) > 1
    rows: list[list[object]] = []
    for one in shown:
        for found in map(mapping, listed(one.run.manifest.get("findings"))):
            file, line = found.get("file") or "", found.get("line")
            helped = [Html("<br>"), tag("small", found["help"])] if found.get("help") else []
            row = [
                tag("code", f"{found.get('severity')}[{found.get('code')}]"),
                tag("small", f"{file}:{line}" if line else file),
                join([found.get("message") or "", *helped]),
            ]
            rows.append([one.heading, *row] if several else [*row])
    head = ["run"] * several + ["finding", "place", ""]
    return _section("findings", "Findings", table(head, rows, "wide"))


def _versions(one: Named) -> Html:
    told, trainer = one.run.manifest, mapping(one.run.manifest.get("trainer"))
    if not told:
        return Html("")
    source, machine = mapping(told.get("upstream")), mapping(told.get("machine"))
    packages, ended = mapping(trainer.get("packages")), one.run.ended
    pinned = "" if source.get("pinned", True) else f", not the pin {source.get('pin')}"
    signal = f", signal {ended['signal']}" if ended.get("signal") else ""
    when = f", {ended['ended']}" if ended.get("ended") else ""
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
        ("ended", ended and f"exit code {ended.get('returncode')}{signal}{when}"),
    ]  # fmt: skip
    parts: list[object] = [table(("", ""), [row for row in facts if row[1]], "wide facts")]
    if argv := listed(told.get("argv")):
        key = f"command-{one.nth}"
        variables = ", ".join(map(str, listed(told.get("env")))) or "no variable"
        where = f"in {told.get('cwd')}, with {variables} set"
        parts += [tag("h3", "Command"), tag("p", where, class_="soft")]
        parts.append(tag("pre", shlex.join(map(str, argv)), id=key, tabindex="0"))
        parts.append(tag("p", tag("button", "copy", type="button", data_copy=key)))
    return join(parts)
