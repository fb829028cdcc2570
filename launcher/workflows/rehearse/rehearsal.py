"""A stage rehearsed: what the trainer refuses, named by the arguments without which it does not."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from launcher.artifacts import architecture
from launcher.errors import DISK_FULL, Finding, InvalidConfig, NotReady, brief, errors, launch_finding
from launcher.lifecycle.prepare import ResolvedStage
from launcher.machine.python import Trainer
from launcher.stage.stage import Judged
from launcher.upstream.trainers import Entry, entry_of
from launcher.workflows.rehearse import arguments, memory
from launcher.workflows.rehearse.arguments import ROWS, Arguments
from launcher.workflows.rehearse.ask import Server, Servers, crash, described

Say = Callable[[str], None]
VARIABLE = "LAUNCH_REHEARSE"
"""0: nothing is rehearsed unless the command line or the stage file asks for it."""
MOST_REFUSALS = 8
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
            yield (
                f"{count} rows: {mean:.0f} tokens on average, {self.rows['longest']} at most, "
                f"{self.rows['trained'] / max(1, self.rows['tokens']):.0%} of them trained on"
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
    known = None if anew else memory.recall(judged, trainer)
    if known is not None:
        lists = {name: tuple(known[name]) for name in ("losses", "left_out", "stand_ins")}
        findings = tuple(judged.config.placed(Finding(**one)) for one in known["findings"])
        seconds, rows = known["seconds"], known["rows"]
        return Rehearsal(findings=findings, seconds=seconds, rows=rows, remembered=True, **lists)
    began = time.monotonic()
    say("rehearsing on the CPU; first the trainer's packages are imported")
    with contextlib.nullcontext(servers) if servers is not None else Servers() as opened:
        key = judged.schema.backend, judged.schema.key, judged.upstream.root
        done = Attempts(judged, opened.of(trainer, *key)).all()
    done = replace(done, seconds=time.monotonic() - began)
    memory.keep(judged, trainer, {**done.as_json(), "findings": [one.as_json() for one in done.findings]})
    return done


def combined(first: Iterable[Finding], more: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings of validation, then those of a rehearsal that it does not say itself, or worse."""
    first = tuple(first)
    wrong = {one.key for one in first if one.severity == "error" and one.key}
    codes = {one.code for one in first}
    kept = (one for one in more if one.severity == "note" or one.key not in wrong)
    return (*first, *(one for one in kept if one.code not in codes))


def require(stages: Mapping[str, ResolvedStage], say: Say, *, by_itself: bool) -> tuple[Finding, ...]:
    """Rehearse what is to start, by name; the warnings, each once.

    A stage is rehearsed if the command line or its file says so, or where it happens `by_itself` and neither
    they nor `LAUNCH_REHEARSE=0` say no. Raises InvalidConfig with all that any trainer refuses, and NotReady
    where a rehearsal that was requested cannot be had.
    """
    found: dict[str, Finding] = {}
    strict = False
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
                if one.severity != "note":
                    found.setdefault(one.message, replace(one, message=whose + one.message))
    if errors(found.values(), strict=strict):
        raise InvalidConfig(tuple(found.values()))
    return tuple(found.values())


def row_tokens(resolved: ResolvedStage) -> str | None:
    """Tokens a row as an earlier rehearsal saw them, in the words of `--row-tokens`; None without one."""
    known = memory.recall(resolved.checked, resolved.trainer)
    return None if known is None else known.get("row_tokens")


class Attempts:
    """The arguments of one stage, tried again without what was refused until nothing is."""

    def __init__(self, judged: Judged, server: Server) -> None:
        assert judged.schema is not None and judged.options is not None
        self.config, self.schema, self.server = judged.config, judged.schema, server
        self.entry: Entry = entry_of(self.schema)
        self.findings: list[Finding] = []
        self.stand_ins: list[str] = []
        self.model: str | None = None
        self.special: Mapping[str, int] = {}
        self.whole = arguments.of_stage(self.config.args, judged.options, self.schema, self.entry)
        self.refused = {one.key.removeprefix("args.").partition("[")[0] for one in errors(judged.findings) if one.key}
        for name in self.refused:
            self.whole = self.without(self.whole, [name])

    def first(self) -> dict[str, Any]:
        """What came of all arguments together: `phase`, and `refusal` if there is one. Takes `model`."""
        return self.server.ask(self.request(self.whole))[0]

    def all(self) -> Rehearsal:
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
            culprits = self.blame(answer)
            self.findings.append(self.refusal(answer, culprits))
            if not culprits:
                break
            self.whole = self.without(self.whole, culprits[:1])
        clean = answer.get("refusal") is None
        rows = answer.get("data", {}) if clean else {}
        self.findings += _about_rows(rows, self.entry) if clean else ()
        if answer.get("raw"):
            message = "OLMo-core cannot export this model: the run leaves model_state_dict.pt, which "
            message += "transformers cannot load (olmo_core_utils.py:287)"
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
            losses=tuple(answer.get("losses", ())) if clean else (),
            left_out=tuple(self.whole.left_out),
            stand_ins=tuple(self.stand_ins),
        )

    def request(self, whole: Arguments, level: str = "train") -> dict[str, Any]:
        """What the server is asked; without a model it only parses."""
        return {
            "kind": "run",
            "level": level if self.model else "parse",
            "words": whole.words(self.schema),
            "model": self.model,
            "stage": self.entry.stage or self.schema.key,
            "pairs": self.schema.pairs,
            "entry": self.schema.key,
            "rows": ROWS,
            "special": self.special,
            "report_to": list(whole.report_to),
        }

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
        # what a CPU alone lacks is no fault of the file
        if refusal is None or re.search(r"GPU|CUDA|cuda", refusal["message"]):
            return
        (alone,) = self.server.ask(self.request(self.whole, "parse"))
        if alone.get("refusal"):
            return
        culprits = [name for name in given if name in refusal["message"]] or list(given)
        self.findings.append(self.refusal(answer, culprits[:1]))

    def note(self, answer: Mapping[str, Any]) -> None:
        """Keep what stood in for something that is not on this machine."""
        for kind, name in answer.get("notes", ()):
            text = _STAND_INS[kind].format(name)
            if name == MADE_UP_ROWS:
                text = "made-up rows in place of those that are refused"
            if text not in self.stand_ins:
                self.stand_ins.append(text)

    def blame(self, answer: Mapping[str, Any]) -> list[str]:
        """The arguments of the file without any one of which this refusal does not come, likeliest first."""
        refusal, given = answer["refusal"], dict(self.whole.given)
        if self.whole.report_to:
            given["report_to"] = self.whole.report_to
        names = [name for name in given if name != self.entry.names.model]
        likely = _likely(refusal, given, names)
        if answer["phase"] in {"data", "construct"} or refusal["type"] == "KeyError":
            likely += [name for name in self.data_names() if name in self.whole.given and name not in likely]
        likely = likely[:6]
        culprits, change = self.test(answer, likely)
        if change > 1:
            return culprits
        rest = [name for name in names if name not in likely]
        return self.halve(answer, rest, more_than=change) or culprits

    def test(self, answer: Mapping[str, Any], names: Sequence[str]) -> tuple[list[str], int]:
        """Those of some arguments whose absence changes the refusal most, and how; all are tried at once."""
        tried = [self.request(self.without(self.whole, [name])) for name in names]
        changes = [_change(answer, other) for other in self.server.ask(*tried)] if tried else []
        best = max(changes, default=0)
        return [name for name, change in zip(names, changes, strict=True) if change == best > 0], best

    def halve(self, answer: Mapping[str, Any], names: list[str], more_than: int) -> list[str]:
        """The one argument whose absence changes the refusal so, by halves; none where it takes several."""

        def changes(some: list[str]) -> bool:
            (other,) = self.server.ask(self.request(self.without(self.whole, some)))
            return _change(answer, other) > more_than

        if names and not changes(names):
            return []
        while len(names) > 1:
            middle = len(names) // 2
            for half in (names[:middle], names[middle:]):
                if changes(half):
                    names = half
                    break
            else:
                return names
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

    def data_names(self) -> tuple[str, ...]:
        return (self.entry.names.data, "datasets", "dataset_mixer", "dataset_config")

    def refusal(self, answer: Mapping[str, Any], culprits: list[str]) -> Finding:
        """What the trainer said, in its words, at the argument that it is about."""
        refusal, what, key = answer["refusal"], "this stage", None
        also = " and ".join(f"`{name}`" for name in culprits[1:3])
        advice = next((text for words, text in _ADVICE if words in refusal["message"]), None)
        help = advice or (f"it is also gone without {also}" if also else None)
        if culprits:
            value, key = self.config.args.get(culprits[0]), f"args.{culprits[0]}"
            what = f"`{culprits[0]}: {brief(value)}`"
        message = f"the trainer refuses {what} {_DOING[answer['phase']]}: {described(refusal)}"
        return _of_trainer("error", "trainer-refuses", message, help, key=key)


def _likely(refusal: Mapping[str, Any], given: Mapping[str, Any], names: list[str]) -> list[str]:
    """Arguments that a refusal names, or whose value it quotes, or that the code that raised it reads."""
    message, code = str(refusal["message"]), "\n".join(refusal.get("code", ()))
    words = set(re.findall(r"[A-Za-z_][\w.]*", message))

    def quoted(value: Any) -> bool:
        texts = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, dict):
            texts = [*value, *value.values()]
        return any(len(str(text)) > 2 and str(text) in message for text in texts)

    by_name = [name for name in names if name in words or f"--{name}" in message]
    by_value = [name for name in names if not isinstance(given[name], bool) and quoted(given[name])]
    by_code = [name for name in names if re.search(rf"\b{re.escape(name)}\b", code)]
    return list(dict.fromkeys([*by_name, *by_value, *by_code]))


def _change(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """What became of a refusal: 0, it comes still, or nothing is known; 1, other words at the same place.

    2, another refusal in its place or after it; 3, none.
    """
    if "phase" not in now:
        return 0
    if now.get("refusal") is None:
        return 3
    if PHASES.index(now["phase"]) < PHASES.index(before["phase"]):
        return 0
    was, is_ = _signature(before["refusal"]), _signature(now["refusal"])
    return 0 if was == is_ else 1 if was[:3] == is_[:3] else 2


def _signature(refusal: Mapping[str, Any]) -> tuple[Any, ...]:
    message = str(refusal["message"])
    if refusal["type"] == "Refused":
        # launch's own: one kind of fault a line, with other figures each time
        message = ""
    elif refusal["type"] != "KeyError":
        # the same sentence about other columns, rows or numbers
        message = re.sub(r"\d+|\[[^\]]*\]|\([^)]*\)", "#", message)
    return refusal["type"], refusal.get("file"), refusal.get("line"), message[:120]


def _about_rows(rows: Mapping[str, Any], entry: Entry) -> Iterator[Finding]:
    """What is wrong with rows although nobody refuses them; `rows` is empty where they were not seen."""
    count = rows.get("rows")
    if not count:
        return
    data, length = f"args.{entry.names.data}", f"args.{entry.names.max_length}"
    empty, masked, cut = (rows[name] / count for name in ("empty", "masked", "cut"))
    if empty:
        message = f"{empty:.0%} of the first rows have no token"
        yield _of_trainer("error" if empty == 1 else "warning", "empty-rows", message, key=data)
    if masked > empty:
        message = f"{masked:.0%} of the first rows have no token that counts in the loss"
        help = "an answer that is cut off, or a chat template without the markers that masking needs"
        yield _of_trainer("error" if masked == 1 else "warning", "nothing-to-learn", message, help, key=data)
    if cut >= MUCH:
        message = f"{cut:.0%} of the first rows are cut off at the limit"
        help = f"a larger `{entry.names.max_length}`"
        yield _of_trainer("warning", "cut-rows", message, help, key=length)
    for token, present in rows.get("present", {}).items():
        if present < (1 - cut) * count * (1 - MUCH):
            message = f"only {present / count:.0%} of the first rows hold the tokenizer's end token `{token}`: "
            message += "the model does not learn to stop"
            help = "a chat template that ends answers with it"
            yield _of_trainer("warning", "no-end-token", message, help, key=data)


def _of_trainer(*finding: Any, key: str | None) -> Finding:
    return replace(launch_finding(*finding, key=key), layer="trainer")
