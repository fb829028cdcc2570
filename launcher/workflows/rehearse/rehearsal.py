"""A stage rehearsed: what the trainer refuses, named by the arguments without which it does not."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any

from launcher.artifacts import architecture
from launcher.errors import DISK_FULL, Finding, InvalidConfig, NotReady, brief, errors, launch_finding
from launcher.machine.python import Trainer
from launcher.planning.collect import Facts
from launcher.rules import registry
from launcher.rules.context import Context
from launcher.stage.stage import Judged
from launcher.upstream.citations import rendered
from launcher.upstream.trainers import Entry, entry_of
from launcher.workflows.rehearse import arguments, further, memory
from launcher.workflows.rehearse.arguments import ROWS, Arguments
from launcher.workflows.rehearse.ask import Server, Servers, crash, described

Say = Callable[[str], None]
VARIABLE = "LAUNCH_REHEARSE"
"""0: nothing is rehearsed unless the command line or the stage file asks for it."""
MOST_REFUSALS = 8
MOST_SUSPECTS = 6
MOST_NAMED = 3
PACKAGES = frozenset({"optim-missing", "quantiser-missing", "report-missing"})
"""Codes of rules about packages for what a rehearsal leaves out: they know the trainer's Python."""
FAILED = "rehearsal-failed"
"""The code of a failure of launch's own code, which says nothing about the stage."""
DROPPED = "rows-dropped"
"""The code of rows that the trainer leaves out."""
MUCH = 0.1
"""The share of rows from which a remark about rows is worth a warning."""
_DOING = {
    "shrink": "while its model was made",
    "parse": "when it reads the arguments",
    "data": "when it loads the data",
    "construct": "when it prepares the data and the trainer",
    "train": "in the first two steps",
    "evaluate": "when it evaluates",
    "save": "when it saves",
    "load": "when the saved model is loaded",
}
PHASES = tuple(_DOING)
# what to do about words of the trainers that do not say it
_ADVICE = (
    ("No examples left after transformation", "longer rows, or a chat template that marks the answers"),
    ("No columns in the dataset match", "leave `skip_prepare_dataset` out: these rows are not tokenised"),
    ("Please check the target modules", "`all-linear`, or a list of names such as q_proj"),
    ("Repo id must", "a folder that is here, or the name of a repository: organisation/name"),
    ("change no weight", "a learning rate above 0, and rows with tokens that count in the loss"),
    ("no row is left", "a larger `max_length`: rows whose prompt fills it are dropped"),
)
_NEEDS_GPU = re.compile(
    r"(requires?|needs?|without|no|only|not)\b[^.\n]*(\bGPUs?\b|\bCUDA|\bcuda|[Ff]lash.?[Aa]tt|\bTriton\b)"
)
_STAND_INS = {
    "model": "random weights in the shape of {}, whose config is not on this machine",
    "tokenizer": "a tokenizer of single bytes, as that of {} is not on this machine",
    "data": "made-up rows, as {} is not on this machine",
    "package": "an empty package, as {} is not installed",
}
MADE_UP_ROWS = "launch/made-up-rows"
_COMMON = "qwen/qwen2.5-0.5b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What a rehearsal found and saw. `rows` describes the prepared rows as `inside/rows.py` does."""

    findings: tuple[Finding, ...]
    seconds: float
    rows: Mapping[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    left_out: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    remembered: bool = False

    @property
    def failed(self) -> bool:
        """Whether launch's own code failed: nothing is known of the stage then."""
        return any(finding.code == FAILED for finding in self.findings)

    @property
    def row_tokens(self) -> str | None:
        count = self.rows.get("rows")
        if not count or self.stand_ins:
            return None
        return f"{max(1, round(self.rows['tokens'] / count))}:{self.rows['longest']}"

    def as_json(self) -> dict[str, Any]:
        data = asdict(replace(self, findings=(), seconds=round(self.seconds, 1)))
        del data["findings"]
        return {**data, "row_tokens": self.row_tokens}

    def lines(self) -> Iterator[str]:
        if count := self.rows.get("rows"):
            mean = self.rows["tokens"] / count
            share = self.rows["trained"] / max(1, self.rows["tokens"])
            yield (
                f"{_seen(self.rows)}: {mean:.0f} tokens on average, {self.rows['longest']} at most, "
                f"{share:.0%} of them trained on"
            )
        if self.losses:
            yield f"loss of the first steps: {', '.join(f'{loss:.3f}' for loss in self.losses[:4])}"
        if self.row_tokens:
            yield f"for launch plan: --row-tokens {self.row_tokens}"
        yield f"rehearsed in {self.seconds:.0f} s" + (", earlier" if self.remembered else "")


def rehearse(
    judged: Judged, trainer: Trainer, servers: Servers | None = None, *, anew: bool = False, say: Say = lambda _: None
) -> Rehearsal:
    """Run a stage's own script on the CPU with a tiny model, and say everything it refuses.

    It uses one of the `servers`, else one of its own; `say` gets a line before what takes long. What errors
    of `judged` are about is left out, so that the rest is found too. Raises NotReady where the trainer's
    Python cannot import the script.
    """
    if judged.schema is None or judged.options is None or judged.upstream is None:
        return Rehearsal(findings=(), seconds=0)
    entry = entry_of(judged.schema)
    if entry.rehearsal is None:
        message = f"{entry.script} is not rehearsed: how it trains on a CPU with few rows is not described"
        help = "`launch prepare` tokenises its data; a short run: max_train_steps=2"
        note = launch_finding("note", "not-rehearsed", message, help)
        return Rehearsal(findings=(judged.config.placed(note),), seconds=0)
    known = None if anew else memory.recall(judged, trainer)
    if known is not None:
        lists = {name: tuple(known[name]) for name in ("losses", "left_out", "stand_ins")}
        findings = tuple(judged.config.placed(Finding(**one)) for one in known["findings"])
        seconds, rows = known["seconds"], known["rows"]
        return Rehearsal(findings=findings, seconds=seconds, rows=rows, remembered=True, **lists)
    began = time.monotonic()
    say(f"rehearsing {judged.config.path} on the CPU: importing packages, usually 15 to 60 s")
    with contextlib.nullcontext(servers) if servers is not None else Servers() as opened:
        key = judged.schema.backend, judged.schema.key, judged.upstream.root
        done = Attempts(judged, opened.of(trainer, *key)).all()
    done = replace(done, seconds=time.monotonic() - began)
    if done.failed:
        return done
    memory.keep(judged, trainer, {**done.as_json(), "findings": [one.as_json() for one in done.findings]})
    return done


def combined(first: Iterable[Finding], more: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings of validation, then those of a rehearsal that it does not say itself, or worse."""
    first = tuple(first)
    wrong = {one.key for one in first if one.severity == "error" and one.key}
    codes = {one.code for one in first}
    kept = (one for one in more if one.severity == "note" or one.key not in wrong)
    return (*first, *(one for one in kept if one.code not in codes))


def require(stages: Mapping[str, Facts], say: Say, *, by_itself: bool) -> tuple[Finding, ...]:
    """Rehearse what is to start, by name; the warnings, each once.

    A stage is rehearsed if the command line or its file says so, or where it happens `by_itself` and neither
    they nor `LAUNCH_REHEARSE=0` say no. Raises InvalidConfig with all that any trainer refuses, and NotReady
    where a rehearsal that was requested cannot be had.
    """
    found: dict[str, Finding] = {}
    strict = False
    failed = list[Finding]()
    with Servers() as servers:
        for name, resolved in stages.items():
            requested = resolved.request.rehearse
            if requested is None:
                requested = resolved.stage.options.rehearse
            if requested is None and os.environ.get(VARIABLE) == "0":
                requested = False
            if not (by_itself if requested is None else requested):
                continue
            try:
                findings = rehearse(resolved.checked, resolved.trainer, servers, say=say).findings
            except NotReady as error:
                if requested:
                    raise
                findings = tuple(
                    replace(one, severity="warning", code="not-rehearsed", message=f"not rehearsed: {one.message}")
                    for one in error.findings
                )
            strict = strict or resolved.request.strict
            whose = f"[{name}] " if len(stages) > 1 else ""
            for one in findings:
                if one.code == FAILED:
                    failed.append(replace(one, message=whose + one.message))
                elif one.severity != "note":
                    found.setdefault(one.message, replace(one, message=whose + one.message))
    if errors(found.values(), strict=strict):
        raise InvalidConfig((*found.values(), *failed))
    return (*found.values(), *failed)


def row_tokens(resolved: Facts) -> str | None:
    """Tokens a row as an earlier rehearsal saw them, in the words of `--row-tokens`; None without one."""
    known = memory.recall(resolved.checked, resolved.trainer)
    return None if known is None else known.get("row_tokens")


def dropped_rows(resolved: Facts) -> tuple[Finding, ...]:
    """What a plan, which counts every row, does not know: the rows that the trainer drops, as a rehearsal saw them.

    Without a rehearsal a note says that it would count them.
    """
    stage = resolved.stage
    known = memory.recall(resolved.checked, resolved.trainer)
    if known is not None:
        dropped = [Finding(**one) for one in known["findings"] if one["code"] == DROPPED]
        counted = [replace(one, message=f"{one.message}; the plan counts them") for one in dropped]
        return tuple(map(stage.config.placed, counted))
    name = stage.entry.names.max_length
    limit = stage.values.get(name)
    joins = stage.entry.packing == "always" or bool(stage.values.get(stage.entry.names.packing or ""))
    if not isinstance(limit, int) or joins:
        return ()
    message = f"the plan counts every row: how many the trainer drops at `{name}: {limit}` is not known"
    help = f"`launch rehearse {stage.config.path}` counts those among the first {ROWS}"
    note = launch_finding("note", DROPPED, message, help, key=f"args.{name}")
    return (stage.config.placed(note),)


class Attempts:
    """The arguments of one stage, tried again without what was refused until nothing is."""

    def __init__(self, judged: Judged, server: Server) -> None:
        assert judged.schema is not None and judged.options is not None
        self.judged, self.options = judged, judged.options
        self.config, self.schema, self.server = judged.config, judged.schema, server
        self.entry: Entry = entry_of(self.schema)
        self.findings: list[Finding] = []
        self.stand_ins: list[str] = []
        self.model: str | None = None
        self.special: Mapping[str, int] = {}
        self.whole = arguments.of_stage(self.config.args, judged.options, self.schema, self.entry)
        self.further = further.of_stage(self.config.args, self.entry)
        self.refused = {one.key.removeprefix("args.").partition("[")[0] for one in errors(judged.findings) if one.key}
        for name in self.refused:
            self.whole = self.without(self.whole, [name])

    def first(self) -> dict[str, Any]:
        """What came of all arguments together: `phase`, and `refusal` if there is one. Takes `model`."""
        # to count the rows may take seconds
        return self.server.ask({**self.request(self.whole), "count": True})[0]

    def all(self) -> Rehearsal:
        self.findings += self.missing_packages()
        self.shrink()
        self.parse_what_is_left_out()
        answer: dict[str, Any] = {}
        for _ in range(MOST_REFUSALS):
            answer = self.first()
            self.note(answer)
            if "phase" not in answer:
                self.findings.append(crash(answer, self.server.log(answer)))
                break
            if (refusal := answer.get("refusal")) is None:
                break
            if refusal.get("errno") in DISK_FULL or refusal["type"] == "MemoryError":
                what, help = "there is no space left", "free some, or set TMPDIR to a larger disk"
                if refusal["type"] == "MemoryError":
                    what, help = "there is not enough memory", "free some"
                message = f"{what} for a rehearsal: {described(refusal)}"
                self.findings.append(launch_finding("error", "rehearsal-no-room", message, help))
                break
            if refusal.get("own"):
                self.findings.append(_own_failure(refusal))
                break
            culprits = self.blame(answer)
            if _NEEDS_GPU.search(refusal["message"]):
                # what a CPU alone lacks is no fault of the file
                key = f"args.{culprits[0]}" if culprits else None
                message = f"not rehearsed on the CPU: {described(refusal)}"
                self.findings.append(launch_finding("note", "not-rehearsed", message, key=key))
            else:
                self.findings.append(self.refusal(answer, culprits))
            if not culprits:
                break
            self.whole = self.without(self.whole, culprits[:1])
        rows = self.rows_seen(answer)
        self.findings += _about_rows(rows, self.entry, self.data_key())
        if answer.get("raw"):
            message = "OLMo-core cannot export this model: the run leaves model_state_dict.pt, which "
            saves = rendered("olmo_core_utils.py::save_state_dict_as_hf[except NotImplementedError]")
            message += f"transformers cannot load ({saves})"
            help = "an OLMo-2 or OLMo-3 model, or the script dpo_tune_cache.py"
            self.findings.append(_of_trainer("warning", "no-hf-export", message, help, key="args.config_name"))
        for what, names in self.whole.left_out.items():
            key = f"args.{names[0]}" if names else "deepspeed"
            note = f"not rehearsed on the CPU: {what}"
            self.findings.append(launch_finding("note", "not-rehearsed", note, key=key))
        self.findings += [launch_finding("note", "stand-in", f"rehearsed with {text}") for text in self.stand_ins]
        return Rehearsal(
            findings=tuple(map(self.config.placed, self.findings)),
            seconds=0,
            rows=rows,
            losses=tuple(answer.get("losses", ())) if rows else (),
            left_out=tuple(self.whole.left_out),
            stand_ins=tuple(self.stand_ins),
        )

    def rows_seen(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """What is known of the run's own rows; nothing where others stood in for them, or nothing was trained."""
        made_up = any(kind == "data" for kind, _ in answer.get("notes", ()))
        rows: dict[str, Any] = answer.get("data", {})
        if "phase" not in answer or answer.get("refusal") is not None or made_up or not rows:
            return {}
        sets = answer.get("sets", [])
        totals = [entry["total"] for entry in sets]
        read = sum(entry["read"] for entry in sets)
        total = None if None in totals or not totals else sum(totals)
        more = any(entry["more"] for entry in sets)
        beyond = answer.get("further", 0)
        dropped = answer.get("dropped", [])
        return {**rows, "read": read, "further": beyond, "total": total, "more": more, "dropped": dropped}

    def request(self, whole: Arguments, level: str = "train") -> dict[str, Any]:
        """What the server is asked; without a model it only parses."""
        return {
            "kind": "run",
            "level": level if self.model else "parse",
            "words": whole.words(self.schema),
            "config": whole.in_file(self.schema),
            "mixture": further.mixture_as_json(whole.given),
            "model": self.model,
            "stage": self.entry.stage or self.schema.key,
            "pairs": self.schema.pairs,
            "entry": self.schema.key,
            "rows": ROWS,
            "further": further.as_json(self.further) if level == "train" else {},
            "special": self.special,
            "report_to": list(whole.report_to),
        }

    def missing_packages(self) -> Iterator[Finding]:
        """Packages that arguments ask for and that the trainer's Python lacks."""
        if self.judged.values is None:
            return
        context = Context(
            values=self.judged.values,
            environ=os.environ,
            deepspeed=self.options.read_deepspeed()[0],
            packages=self.server.trainer.packages,
        )
        for finding in registry.apply_in(context):
            if finding.code in PACKAGES:
                yield finding

    def shrink(self) -> None:
        """Have the small model made; without one the arguments are only parsed, which is said."""
        name = str(self.config.args.get(self.entry.names.model))
        table = architecture.table()
        # where nothing else is known: as a hub model's name says, or the most common family
        shape = table.get(name.lower()) or table[_COMMON]
        out = str(self.server.folder())
        revision = self.config.args.get("model_revision")
        request = {"kind": "shrink", "model": name, "out": out, "shape": dict(shape), "revision": revision}
        (answer,) = self.server.ask(request)
        self.note(answer)
        if "phase" in answer and answer.get("refusal") is None:
            self.model, self.special = out, answer.get("special", {})
            return
        why = described(answer["refusal"]) if answer.get("refusal") else "its process ended"
        message = f"no small model of this kind can be made, so the arguments are only parsed: {why}"
        key = f"args.{self.entry.names.model}"
        self.findings.append(launch_finding("note", "not-rehearsed", message, key=key))

    def parse_what_is_left_out(self) -> None:
        """The arguments that are not rehearsed as they are, are at least parsed so, with the others."""
        given = {
            name: value
            for name, value in self.config.args.items()
            if name in self.schema.fields and name not in {*self.whole.given, *self.refused} and value is not None
        }
        if not given:
            return
        added = {name: value for name, value in self.whole.added.items() if name not in given}
        whole = replace(self.whole, given={**self.whole.given, **given}, added=added)
        (answer,) = self.server.ask(self.request(whole, "parse"))
        refusal = answer.get("refusal")
        if refusal is None or re.search(r"GPU|CUDA|cuda", refusal["message"]):
            return
        (alone,) = self.server.ask(self.request(self.whole, "parse"))
        if alone.get("refusal"):
            return
        if refusal.get("own"):
            self.findings.append(_own_failure(refusal))
            return
        requests = [self.request(self.without(whole, [name]), "parse") for name in given]
        answers = self.server.ask(*requests)
        culprits = [name for name, other in zip(given, answers, strict=True) if _effect(answer, other) >= Effect.LATER]
        self.findings.append(self.refusal(answer, culprits))

    def note(self, answer: Mapping[str, Any]) -> None:
        """Keep what stood in for something that is not on this machine."""
        for kind, name in answer.get("notes", ()):
            text = _STAND_INS[kind].format(name)
            if name == MADE_UP_ROWS:
                text = "made-up rows in place of those that are refused"
            if text not in self.stand_ins:
                self.stand_ins.append(text)

    def blame(self, answer: Mapping[str, Any]) -> list[str]:
        """The arguments of the file that are shown to cause a refusal, likeliest first.

        Shown is what the refusal does not come without: it is gone, or the trainer gets to a later phase. Another
        refusal in the same phase may be an earlier one, which the argument kept from coming: then the argument has
        to bring the refusal about without the others, or to stand in its words.
        """
        refusal = answer["refusal"]
        given = dict(self.whole.given)
        if self.whole.report_to:
            given["report_to"] = self.whole.report_to
        names = [name for name in given if name != self.entry.names.model]
        likely = _likely(refusal, given, names)
        if answer["phase"] in {"data", "construct"} or refusal["type"] == "KeyError":
            likely += [name for name in self.data_names() if name in self.whole.given and name not in likely]
        likely = likely[:MOST_SUSPECTS]
        effects = self.effects(answer, self.whole, likely)
        best = max(effects.values(), default=Effect.NONE)
        shown = [name for name in likely if effects[name] == best >= Effect.LATER]
        suspects = [name for name in likely if effects[name] == Effect.ELSEWHERE]
        quoted = [name for name in (*shown, *suspects) if _quotes(str(refusal["message"]), given[name])]
        named = [*quoted, *(name for name in shown if name not in quoted)]
        # with other data much is gone that is not about the data
        if not set(named) <= set(self.data_names()):
            return named
        rest = [name for name in names if name not in likely]
        culprits = self.halve(answer, rest)
        if culprits and given[culprits[0]] is True:
            # a switch brings others into play, and one of those is rather what is wrong
            culprits = self.halve(answer, [name for name in rest if name not in culprits]) + culprits
        if culprits or named:
            return [*culprits, *named]
        return self.alone(answer, likely, suspects) if suspects else []

    def effects(self, answer: Mapping[str, Any], whole: Arguments, names: Sequence[str]) -> dict[str, "Effect"]:
        """What becomes of a refusal of `whole` without each of some arguments; all are tried at once."""
        requests = [self.request(self.without(whole, [name])) for name in names]
        answers = self.server.ask(*requests) if requests else []
        return {name: _effect(answer, other) for name, other in zip(names, answers, strict=True)}

    def alone(self, answer: Mapping[str, Any], kept: Sequence[str], suspects: Sequence[str]) -> list[str]:
        """Those of `suspects` that cause the refusal where no arguments but `kept` and the data are there."""
        needed = {self.entry.names.model, *self.data_names()}
        others = [name for name in self.whole.given if name not in kept and name not in needed]
        few = self.without(self.whole, others)
        (again,) = self.server.ask(self.request(few))
        if _effect(answer, again) != Effect.NONE or again.get("refusal") is None:
            return []
        effects = self.effects(again, few, suspects)
        return [name for name in suspects if effects[name] >= Effect.LATER]

    def halve(self, answer: Mapping[str, Any], names: list[str]) -> list[str]:
        """The one argument without which the refusal does not come, by halves; none where it takes several."""

        def matters(some: list[str]) -> bool:
            (other,) = self.server.ask(self.request(self.without(self.whole, some)))
            return _effect(answer, other) >= Effect.LATER

        if not names or not matters(names):
            return []
        while len(names) > 1:
            middle = len(names) // 2
            first, second = names[:middle], names[middle:]
            if matters(first):
                names = first
            elif matters(second):
                names = second
            else:
                return []
        return names

    def without(self, whole: Arguments, names: Iterable[str]) -> Arguments:
        """The arguments without some; in the place of the data comes a set that each trainer takes."""
        names, added = set(names), dict(whole.added)
        left = names
        if names & set(self.data_names()):
            left = names | set(self.data_names())
            added[self.entry.names.data] = [MADE_UP_ROWS, "1.0"] if self.entry.mixes else MADE_UP_ROWS
        if self.entry.names.model in names:
            added[self.entry.names.model] = "launch/made-up-model"
        given = {name: value for name, value in whole.given.items() if name not in left}
        report_to = () if "report_to" in names else whole.report_to
        return replace(whole, given=given, added=added, report_to=report_to)

    def data_key(self) -> str:
        """The key of the file that names the data."""
        return "args.datasets" if self.config.args.get("datasets") else f"args.{self.entry.names.data}"

    def data_names(self) -> tuple[str, ...]:
        return (self.entry.names.data, "datasets", "dataset_mixer", "dataset_config")

    def refused_rows(self, answer: Mapping[str, Any]) -> list[str]:
        """Which of the further rows bring a refusal about; none where the first rows do already."""
        request = self.request(self.whole)
        if not self.further or _effect(answer, self.server.ask({**request, "further": {}})[0]) == Effect.NONE:
            return []
        places = []
        requests = []
        for name, exemplars in self.further.items():
            for exemplar in exemplars:
                places.append(str(exemplar.place))
                requests.append({**request, "further": {name: [exemplar.row]}})
        answers = self.server.ask(*requests[:MOST_SUSPECTS])
        return [place for place, other in zip(places, answers, strict=False) if _effect(answer, other) == Effect.NONE]

    def refusal(self, answer: Mapping[str, Any], culprits: list[str]) -> Finding:
        """What the trainer said, in its words, at the argument that it is about."""
        refusal, what, key = answer["refusal"], "this stage", None
        also = " and ".join(f"`{name}`" for name in culprits[1:3])
        advice = next((text for words, text in _ADVICE if words in refusal["message"]), None)
        help = advice or (f"it is also gone without {also}" if also else None)
        if culprits and culprits[0] in self.data_names() and (places := self.refused_rows(answer)):
            which = " and ".join(places[:MOST_NAMED])
            help = f"correct or remove {which}, and rows like it: the first {ROWS} rows are not refused"
        if culprits:
            value, key = self.config.args.get(culprits[0]), f"args.{culprits[0]}"
            what = f"`{culprits[0]}: {brief(value)}`"
        message = f"the trainer refuses {what} {_DOING[answer['phase']]}: {described(refusal)}"
        return _of_trainer("error", "trainer-refuses", message, help, key=key)


def _likely(refusal: Mapping[str, Any], given: Mapping[str, Any], names: list[str]) -> list[str]:
    """Arguments that a refusal names, or whose value it quotes, or that the code that raised it reads."""
    message, code = str(refusal["message"]), "\n".join(refusal.get("code", ()))
    words = set(re.findall(r"[A-Za-z_][\w.]*", message))

    by_name = [name for name in names if name in words or f"--{name}" in message]
    by_value = [name for name in names if _quotes(message, given[name])]
    by_code = [name for name in names if re.search(rf"\b{re.escape(name)}\b", code)]
    return list(dict.fromkeys([*by_name, *by_value, *by_code]))


def _quotes(message: str, value: Any) -> bool:
    """Whether a text that an argument was given stands in a message; a number may stand there for anything."""
    if isinstance(value, list | tuple):
        return any(_quotes(message, entry) for entry in value)
    if isinstance(value, Mapping):
        return any(_quotes(message, entry) for entry in (*value, *value.values()))
    text = str(value)
    if not isinstance(value, str) or len(text) <= 2 or re.fullmatch(r"[\d.eE+-]+", text):
        return False
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", message) is not None


class Effect(IntEnum):
    """What becomes of a refusal without an argument; from LATER on it is shown to cause the refusal."""

    NONE = 0
    ELSEWHERE = 1
    LATER = 2
    GONE = 3


def _effect(before: Mapping[str, Any], now: Mapping[str, Any]) -> Effect:
    """NONE also where nothing is known: the process ended, or launch's own code failed."""
    if "phase" not in now:
        return Effect.NONE
    refusal = now.get("refusal")
    if refusal is None:
        return Effect.GONE
    if refusal.get("own") or _signature(refusal) == _signature(before["refusal"]):
        return Effect.NONE
    was, is_ = PHASES.index(before["phase"]), PHASES.index(now["phase"])
    if is_ > was:
        return Effect.LATER
    # data are loaded while the trainer is prepared
    loading = (before["phase"], now["phase"]) == ("construct", "data")
    return Effect.ELSEWHERE if is_ == was or loading else Effect.NONE


def _signature(refusal: Mapping[str, Any]) -> tuple[Any, ...]:
    message = str(refusal["message"])
    if refusal["type"] == "Refused":
        # launch's own: one kind of fault a line, with other figures each time
        message = ""
    elif refusal["type"] != "KeyError":
        # the same sentence about other columns, rows or numbers
        message = re.sub(r"\d+|\[[^\]]*\]|\([^)]*\)", "#", message)
    return refusal["type"], refusal.get("file"), refusal.get("line"), message[:120]


def _own_failure(refusal: Mapping[str, Any]) -> Finding:
    """What is wrong with launch, and not with the stage."""
    place = f" ({refusal['file']}:{refusal['line']})" if refusal.get("file") else ""
    message = f"launch could not rehearse this: {described({**refusal, 'file': None})}{place}"
    help = "this is a failure of launch, not of the stage file: nothing is refused; please report it"
    return launch_finding("note", FAILED, message, help)


def _seen(rows: Mapping[str, Any]) -> str:
    """How many rows were rehearsed, of how many: `64 of 200 rows and 1 further row of another kind`."""
    read, total = rows.get("read") or rows["rows"], rows.get("total")
    seen = f"{read} rows" if total is None or total == read else f"{read:,} of {total:,} rows"
    if rows.get("more"):
        seen = f"{read:,} of more than {total:,} rows"
    further = rows.get("further", 0)
    if further:
        seen += " and 1 further row of another kind" if further == 1 else f" and {further} further rows of other kinds"
    prepared = rows["rows"]
    return seen if prepared == read + further else f"{seen}, {prepared:,} once prepared"


# what a pass that leaves rows out says of itself, why it does, and what to do
_LARGER = "a larger `{length}`, or shorter prompts"
_DROPPED = (
    ("fully masked", "no token of them that counts in the loss is within `{length}`", _LARGER),
    ("fully truncated", "their prompt alone fills `{length}`", _LARGER),
    ("sft_tulu_filter", "no token of them that counts in the loss is within `{length}`", _LARGER),
    ("preference_tulu_filter", "no token of an answer that counts in the loss is within `{length}`", _LARGER),
    ("sft_filter", "they are longer than the filter allows, or no token of them counts in the loss", None),
    ("preference_filter", "they are longer than the filter allows", None),
)


def _which(rows: Mapping[str, Any], count: int | None = None) -> str:
    """The rows that were rehearsed, in words: they are the first ones, unless some of other kinds were added."""
    number = "" if count is None else f"{count:,} "
    return f"the {number}rows rehearsed" if rows.get("further") else f"the first {number}rows"


def _about_dropped(rows: Mapping[str, Any], entry: Entry, data: str) -> Iterator[Finding]:
    """Rows that the trainer leaves out, by the sizes of its own data set before and after."""
    for one in rows.get("dropped", ()):
        words = (words for words in _DROPPED if words[0] in one["what"])
        _, why, help = next(words, (None, f"left out by {one['what']}" if one["what"] else None, None))
        # open-instruct repeats the rows of a set of which more are wanted than it has
        whole = rows.get("total") == one["before"] and not rows.get("more")
        where = f"{one['before']:,} rows" if whole else _which(rows, one["before"])
        message = f"{one['before'] - one['after']:,} of {where} are dropped"
        if why is not None:
            message += f": {why.format(length=entry.names.max_length)}"
        if help is not None:
            help = help.format(length=entry.names.max_length)
        key = f"args.{entry.names.max_length}" if help else data
        yield _of_trainer("warning", DROPPED, message, help, key=key)


def _about_rows(rows: Mapping[str, Any], entry: Entry, data: str) -> Iterator[Finding]:
    """What is wrong with rows although nobody refuses them; `rows` is empty where they were not seen.

    `data` is the key that names the data.
    """
    count = rows.get("rows")
    if not count:
        return
    yield from _about_dropped(rows, entry, data)
    length = f"args.{entry.names.max_length}"
    empty, masked, cut = (rows[name] / count for name in ("empty", "masked", "cut"))
    if empty:
        message = f"{empty:.0%} of {_which(rows)} have no token"
        yield _of_trainer("error" if empty == 1 else "warning", "empty-rows", message, key=data)
    if masked > empty:
        message = f"{masked:.0%} of {_which(rows)} have no token that counts in the loss"
        help = "an answer that is cut off, or a chat template without the markers that masking needs"
        yield _of_trainer("error" if masked == 1 else "warning", "nothing-to-learn", message, help, key=data)
    if cut >= MUCH:
        message = f"{cut:.0%} of {_which(rows)} are cut off at the limit"
        help = f"a larger `{entry.names.max_length}`"
        yield _of_trainer("warning", "cut-rows", message, help, key=length)
    for token, present in rows.get("present", {}).items():
        if present < (1 - cut) * count * (1 - MUCH):
            message = f"only {present / count:.0%} of {_which(rows)} hold the tokenizer's end token `{token}`: "
            message += "the model does not learn to stop"
            help = "a chat template that ends answers with it"
            yield _of_trainer("warning", "no-end-token", message, help, key=data)


def _of_trainer(*finding: Any, key: str | None) -> Finding:
    return replace(launch_finding(*finding, key=key), layer="trainer")
