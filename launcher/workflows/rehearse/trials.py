"""A stage's arguments, whole or in part, tried by the trainer on the CPU."""

from collections.abc import Iterable
from dataclasses import replace

from launcher.lazy_dataclass import dataclass
from launcher.stage.stage import Judged
from launcher.upstream.trainers import Entry, find_entry
from launcher.workflows.rehearse import local_data
from launcher.workflows.rehearse.arguments import ROWS, Arguments
from launcher.workflows.rehearse.ask import Server
from launcher.workflows.rehearse.inside.records import ErrorRecord, ServerRequest, ServerResponse

MADE_UP_ROWS = "launch/made-up-rows"
_MADE_UP_MODEL = "launch/made-up-model"


@dataclass(frozen=True, slots=True)
class TrainerRefusal:
    """Arguments that the trainer refused, the phase (a key of `cause.DOING`), and its error."""

    arguments: Arguments
    phase: str
    error: ErrorRecord


def refusal_in(response: ServerResponse, tried: Arguments) -> TrainerRefusal | None:
    """The refusal that a response reports; None if it reports none or its process ended."""
    if response.phase is None or response.refusal is None:
        return None
    return TrainerRefusal(tried, response.phase, response.refusal)


class Trials:
    """Has the trainer try arguments of one stage.

    `model` is the folder of a small model; without one the arguments are only parsed. `special` has
    the ids of its special tokens.
    """

    def __init__(self, judged: Judged, server: Server) -> None:
        assert judged.schema is not None
        self.schema = judged.schema
        self.server = server
        self.entry: Entry = find_entry(self.schema)
        self.data_names = (self.entry.names.data, "datasets", "dataset_mixer", "dataset_config")
        self.model: str | None = None
        self.special: dict[str, int] = {}
        args = judged.config.args
        sets = local_data.find_local_sets(args, self.entry)
        self.further = local_data.find_further_rows(args, sets)
        self.sizes = {local.source.name: local.size for local in sets}

    def run(self, arguments: Arguments, *, only_parses: bool = False) -> ServerResponse:
        (response,) = self.server.ask(self.request(arguments, only_parses=only_parses))
        return response

    def request(self, arguments: Arguments, *, only_parses: bool = False) -> ServerRequest:
        further = {}
        for name, rows in self.further.items():
            further[name] = [exemplar.row for exemplar in rows]
        return ServerRequest(
            kind="run",
            words=arguments.words(self.schema),
            config=arguments.in_file(self.schema),
            mixture=local_data.list_mixture_parts(arguments.kept),
            sizes=self.sizes,
            model=self.model,
            only_parses=only_parses or self.model is None,
            pairs=self.schema.pairs,
            rows=ROWS,
            further=further,
            special=self.special,
        )

    def without(self, arguments: Arguments, names: Iterable[str]) -> Arguments:
        """The arguments without some; data are replaced by rows that each trainer takes."""
        removed = set(names)
        added = dict(arguments.added)
        keys = self.entry.names
        if keys.model in removed:
            added[keys.model] = _MADE_UP_MODEL
        if not removed.isdisjoint(self.data_names):
            removed.update(self.data_names)
            added[keys.data] = [MADE_UP_ROWS, "1.0"] if self.entry.mixes else MADE_UP_ROWS
        kept = {}
        for name, value in arguments.kept.items():
            if name not in removed:
                kept[name] = value
        return replace(arguments, kept=kept, added=added)
