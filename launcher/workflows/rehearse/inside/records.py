"""What launch asks the trainer's Python and what it answers: records that travel as JSON.

Both sides import this module, so it needs nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class ScriptFacts:
    """How an entry script is called; see `RehearsalRecipe` and `Entry` of `upstream/entry.py`."""

    module: str = ""
    classes: Sequence[tuple[str, str]] = ()
    parses: str = ""
    trainer: str = ""
    adapts: str = ""
    imports_others: bool = False
    final_model: str = ""
    ends_after: Sequence[str] = ()


@dataclass(kw_only=True)
class MixturePart:
    """One set of a mixture.

    `call` are the arguments that load it (`CALL`), `pieces` its rows: a split, the first row and
    the one after the last. `bytes` is the size of its files.
    """

    key: str
    call: list[Any]
    pieces: list[tuple[str, int, int]]
    rows: int | None
    bytes: int | None


@dataclass(kw_only=True)
class SetSize:
    """A data set on this machine; without `bytes` only its first rows are looked at."""

    rows: int | None = None
    bytes: int | None = None


CALL = ("path", "name", "data_dir", "data_files", "split")


@dataclass(kw_only=True)
class ServerRequest:
    """One request. `kind` is `shrink`, `run` or `preview`.

    `scratch`, `folder` (the working directory) and `limit_s` are set by `Server.ask`, `script` by
    the server. `sizes` are those of the local sets; `further` are rows beyond the first `rows`;
    `numbers` are rows to show, from 0. The rows of a preview are written
    to `result`, a model into `out`.
    """

    kind: str
    id: int = 0
    scratch: str = ""
    folder: str = ""
    limit_s: float = 0.0
    script: ScriptFacts = field(default_factory=ScriptFacts)
    words: Sequence[str] = ()
    config: dict[str, Any] = field(default_factory=dict)
    mixture: Sequence[MixturePart] = ()
    sizes: dict[str, SetSize] = field(default_factory=dict)
    model: str | None = None
    revision: str | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    out: str = ""
    only_parses: bool = False
    pairs: bool = False
    rows: int = 0
    further: dict[str, list[Any]] = field(default_factory=dict)
    special: dict[str, int] = field(default_factory=dict)
    first: int = 0
    numbers: Sequence[int] = ()
    result: str = ""

    @classmethod
    def from_json(cls, content: Any, script: ScriptFacts) -> ServerRequest:
        request = cls(**content)
        request.script = script
        request.mixture = [MixturePart(**part) for part in content["mixture"]]
        request.sizes = {name: SetSize(**size) for name, size in content["sizes"].items()}
        return request


@dataclass(kw_only=True)
class ErrorRecord:
    """An exception. `file` and `line` are where it was raised, `code` the last lines before that.

    `by_launch` says that launch's code raised it, and not the trainer's.
    """

    type: str
    message: str
    file: str | None = None
    line: int | None = None
    errno: int | None = None
    by_launch: bool = False
    code: Sequence[str] = ()


@dataclass(kw_only=True)
class FilterPass:
    """One pass of `Dataset.filter`: rows before and after it, and its description."""

    before: int
    after: int
    what: str


@dataclass(kw_only=True)
class PreparedRows:
    """Rows after the trainer's preparation: how many, and how many are empty, cut, or untrained.

    `tokens`, `longest` and `trained` are tokens; `present` counts the rows with a special token.
    `read` are the rows that were read of the `total` in the data (None where unknown), `further`
    those of other kinds that were added.
    """

    rows: int = 0
    tokens: int = 0
    longest: int = 0
    empty: int = 0
    masked: int = 0
    cut: int = 0
    trained: int = 0
    present: dict[str, int] = field(default_factory=dict)
    read: int = 0
    further: int = 0
    total: int | None = 0
    dropped: list[FilterPass] = field(default_factory=list)


@dataclass(kw_only=True)
class ServerResponse:
    """The answer to a request. Without a `phase` its process ended by itself.

    Then `ended` is the exit code or minus the signal, `hung` says that the time was over, and
    `stack` is where it was. `notes` are (kind, name) of what stood in for something, `absent` is
    (kind, name) of what a preview lacks.
    """

    id: int = 0
    phase: str | None = None
    refusal: ErrorRecord | None = None
    notes: list[tuple[str, str]] = field(default_factory=list)
    absent: tuple[str, str] | None = None
    special: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    rows: PreparedRows = field(default_factory=PreparedRows)
    ended: int | None = None
    hung: bool = False
    stack: str = ""

    @property
    def is_fine(self) -> bool:
        return self.phase is not None and self.refusal is None


@dataclass(kw_only=True)
class RowPiece:
    """Tokens of one kind that follow each other; `differs` is None outside of pairs."""

    text: str
    tokens: int
    trained: bool
    special: bool
    cut: bool
    differs: bool | None = None


@dataclass(kw_only=True)
class RowSection:
    """A part of a row: tokens that are left of it, trained ones, and those that are cut."""

    name: str
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    cut_at: str | None = None
    pieces: list[RowPiece] = field(default_factory=list)


@dataclass(kw_only=True)
class PairDifference:
    """How the answers of a pair differ, in tokens."""

    equal: bool
    same_start: int
    same_end: int
    chosen: int
    rejected: int


@dataclass(kw_only=True)
class ShownRow:
    """One row as it is trained on. `row` is its number in the data; `reason` is why it is dropped.

    `tokens` are those that the model gets: of a pair, the prompt counts in both sequences. `taken`
    says whether the mixture takes the row. `row` counts from 0 in the trainer's Python; launch
    counts from 1, and adds the place.
    """

    row: int
    file: str | None = None
    line: int | None = None
    status: str = "kept"
    reason: str | None = None
    taken: bool
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    sequences: int = 1
    sections: list[RowSection] = field(default_factory=list)
    difference: PairDifference | None = None


@dataclass(kw_only=True)
class DroppedRows:
    """Rows that are left out: their trained tokens are beyond the limit, or there are none."""

    too_long: int = 0
    untrained: int = 0


@dataclass(kw_only=True)
class RowCounts:
    """What becomes of rows. `lengths` are tokens before any cut, `tokens` and `trained` after it.

    `looked_at` are rows of the `total`, which is None where it is unknown.
    """

    total: int | None = None
    looked_at: int = 0
    sampled: bool = False
    cut: int = 0
    dropped: DroppedRows = field(default_factory=DroppedRows)
    tokens: int = 0
    trained: int = 0
    sequences: int = 0
    lengths: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class TemplateFacts:
    """A chat template, from an `argument`, the `tokenizer` or `none`; `bos`: one is added."""

    used: bool
    source: str
    name: str | None
    fallback: bool = False
    replaced: bool = False
    text: str | None
    bos: bool = False
    description: str = ""


@dataclass(kw_only=True)
class PreviewContent:
    """What a preview writes to its file. `counts` is None where the trainer refuses a row.

    `refused` is the number of that row.
    """

    template: TemplateFacts
    counts: RowCounts | None
    refused: int | None
    rows: list[ShownRow]
    limit: int | None
    packs: bool
    total: int | None
