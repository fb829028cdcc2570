"""Which arguments cause a refusal: the trainer is asked again without each that may."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from launcher.workflows.rehearse.inside.records import ErrorRecord, ServerResponse
from launcher.workflows.rehearse.trials import TrainerRefusal, Trials, refusal_in

DOING = {
    "shrink": "while its model was made",
    "parse": "when it reads the arguments",
    "data": "when it loads the data",
    "construct": "when it prepares the data and the trainer",
    "train": "in the first two steps",
    "evaluate": "when it evaluates",
    "save": "when it saves",
    "load": "when the saved model is loaded",
}
_PHASES = tuple(DOING)
_MOST_SUSPECTS = 6
_WORD = re.compile(r"[A-Za-z_][\w.]*")
_NUMBER = re.compile(r"[\d.eE+-]+")
_DETAILS = re.compile(r"\d+|\[[^\]]*\]|\([^)]*\)")


class Effect(IntEnum):
    """What becomes of a refusal without one argument; from LATER on that argument is a cause."""

    NONE = 0
    ELSEWHERE = 1  # the trainer refuses something else in the same phase
    LATER = 2  # it refuses something in a later phase
    GONE = 3


class CauseSearch:
    """Finds the arguments, and the rows, without which a refusal does not come.

    Another refusal in the same phase proves nothing: the argument may have kept an earlier refusal
    from coming. Such an argument is a cause if the refusal quotes it, or comes without the others.
    """

    def __init__(self, trials: Trials, refusal: TrainerRefusal) -> None:
        self.trials = trials
        self.refusal = refusal
        self.arguments = refusal.arguments

    def find_causes(self) -> list[str]:
        """The arguments of the file that are shown to cause the refusal, likeliest first."""
        args = self.arguments.kept
        model_name = self.trials.entry.names.model
        names = [name for name in args if name != model_name]
        suspects = self._pick_suspects(names)
        effects = self._remove_each(suspects)
        proven = _pick_strongest(effects)
        unsure = [name for name in suspects if effects[name] == Effect.ELSEWHERE]
        quoted = []
        for name in proven + unsure:
            if quotes(self.refusal.error.message, args[name]):
                quoted.append(name)
        causes = list(dict.fromkeys(quoted + proven))
        # other data end many refusals that are not about the data
        if not set(causes) <= set(self.trials.data_names):
            return causes
        unlikely = [name for name in names if name not in suspects]
        others = self.confirm(unlikely)
        # a switch brings others into play, and one of those is rather what is wrong
        others.sort(key=lambda name: args[name] is True)
        if others or causes or not unsure:
            return others + causes
        return self._find_without_the_rest(suspects, unsure)

    def _pick_suspects(self, names: Sequence[str]) -> list[str]:
        error = self.refusal.error
        suspects = find_suspects(error, self.arguments.kept, names)
        if self.refusal.phase in {"data", "construct"} or error.type == "KeyError":
            for name in self.trials.data_names:
                if name in self.arguments.kept and name not in suspects:
                    suspects.append(name)
        return suspects[:_MOST_SUSPECTS]

    def _find_without_the_rest(self, suspects: list[str], unsure: list[str]) -> list[str]:
        """The causes among the unsure, without the arguments that nothing suspects.

        Suspects, model and data are tried alone. If they are refused in the same way, each unsure
        one is left out in turn. Otherwise the cause is elsewhere, and there are none.
        """
        kept = {*suspects, *self.trials.data_names, self.trials.entry.names.model}
        rest = [name for name in self.arguments.kept if name not in kept]
        fewer = self.trials.without(self.arguments, rest)
        response = self.trials.run(fewer)
        again = refusal_in(response, fewer)
        if again is None or compare(self.refusal, response) != Effect.NONE:
            return []
        return CauseSearch(self.trials, again).confirm(unsure)

    def confirm(self, names: Sequence[str]) -> list[str]:
        """Those of the arguments without which the refusal does not come."""
        effects = self._remove_each(names)
        return [name for name in names if effects[name] >= Effect.LATER]

    def _remove_each(self, names: Sequence[str]) -> dict[str, Effect]:
        """What becomes of the refusal without each of the arguments."""
        only_parses = self.refusal.phase == "parse"
        requests = []
        for name in names:
            fewer = self.trials.without(self.arguments, [name])
            requests.append(self.trials.request(fewer, only_parses=only_parses))
        effects = {}
        for name, response in zip(names, self.trials.server.ask(*requests), strict=True):
            effects[name] = compare(self.refusal, response)
        return effects

    def find_rows(self) -> Iterator[str]:
        """Places of the further rows that cause it; none if the first rows are refused already."""
        if not self.trials.further:
            return
        request = self.trials.request(self.arguments)
        ask = self.trials.server.ask
        (without_further,) = ask(replace(request, further={}))
        if compare(self.refusal, without_further) == Effect.NONE:
            return
        places = []
        requests = []
        for name, rows in self.trials.further.items():
            for exemplar in rows:
                places.append(str(exemplar.place))
                requests.append(replace(request, further={name: [exemplar.row]}))
        responses = ask(*requests[:_MOST_SUSPECTS])
        for place, response in zip(places, responses, strict=False):
            if compare(self.refusal, response) == Effect.NONE:
                yield place


def _pick_strongest(effects: Mapping[str, Effect]) -> list[str]:
    """The arguments whose removal helps most, if it is one of them that causes the refusal."""
    best = max(effects.values(), default=Effect.NONE)
    if best < Effect.LATER:
        return []
    return [name for name, effect in effects.items() if effect == best]


def compare(refusal: TrainerRefusal, now: ServerResponse) -> Effect:
    """NONE also where nothing is known: the process ended, or launch's own code failed."""
    if now.phase is None:
        return Effect.NONE
    if now.refusal is None:
        return Effect.GONE
    if now.refusal.by_launch:
        return Effect.NONE
    if _compute_signature(now.refusal) == _compute_signature(refusal.error):
        return Effect.NONE
    if _PHASES.index(now.phase) > _PHASES.index(refusal.phase):
        return Effect.LATER
    # data are loaded while the trainer is prepared
    is_loading = refusal.phase == "construct" and now.phase == "data"
    if now.phase == refusal.phase or is_loading:
        return Effect.ELSEWHERE
    return Effect.NONE


def _compute_signature(refusal: ErrorRecord) -> tuple[Any, ...]:
    message = refusal.message
    if refusal.type == "Refused":
        # launch's own: one kind of fault a line, with other figures each time
        message = ""
    elif refusal.type != "KeyError":
        # the same sentence about other columns, rows or numbers
        message = _DETAILS.sub("#", message)
    return refusal.type, refusal.file, refusal.line, message[:120]


def find_suspects(refusal: ErrorRecord, args: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Arguments that a refusal names, or whose value it quotes, or that its code reads."""
    words = set(_WORD.findall(refusal.message))
    code = set(_WORD.findall("\n".join(refusal.code).replace(".", " ")))
    by_name = []
    by_value = []
    by_code = []
    for name in names:
        if name in words or f"--{name}" in refusal.message:
            by_name.append(name)
        elif quotes(refusal.message, args[name]):
            by_value.append(name)
        elif name in code:
            by_code.append(name)
    return by_name + by_value + by_code


def quotes(message: str, value: Any) -> bool:
    """Whether a message holds a text of this value; a number may stand there for anything."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return any(quotes(message, entry) for entry in value)
    if not isinstance(value, str) or len(value) <= 2 or _NUMBER.fullmatch(value):
        return False
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", message) is not None
