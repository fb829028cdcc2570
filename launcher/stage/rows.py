"""The rows that a new stage file will train on: their form, and whether the trainer reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from launcher.config.keys import PAIRED
from launcher.dataset import shapes, sources, survey
from launcher.dataset.mixer import LOCAL_SUFFIXES
from launcher.dataset.shapes import RowForm
from launcher.dataset.sources import Source
from launcher.dataset.survey import Survey
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_file

Kind = Literal["chats", "completions", "texts", "pairs"]
# the roles that chat templates know
_TEMPLATE_ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Local rows: where, what they are like, and their `kind`, None if the trainer reads none."""

    source: Source
    survey: Survey
    kind: Kind | None
    wants_pairs: bool

    @property
    def conversion(self) -> RowForm | None:
        """What `launch data convert` makes of rows that the trainer does not read."""
        if self.kind is not None:
            return None
        are_pairs = shapes.find_pair_columns(self.survey) is not None
        if are_pairs is not self.wants_pairs:
            # rows of the other stage
            return None
        return shapes.recognise(self.survey)

    @property
    def convertible(self) -> Path:
        """What to give to `launch data convert`: the only file, or the folder."""
        files = self.source.files
        if len(files) == 1:
            return files[0]
        return Path(self.source.name)


def read_rows(data: str, stage: str, backend: str, environ: Mapping[str, str]) -> Rows | None:
    """The rows of a file, a folder or a data set in the hub's cache; None if there are none."""
    if is_file(data):
        source = sources.open_file_source(data)
        is_readable = data.endswith(_SUFFIXES.get(backend, ""))
    else:
        source = sources.find_named_source(data, "train", None, environ)
        is_readable = True
    if not source.files:
        return None
    surveyed = survey.look(source.files)
    if not surveyed.rows:
        return None
    kind = None
    if is_readable:
        kind = _KINDS[backend, stage](surveyed)
    return Rows(source=source, survey=surveyed, kind=kind, wants_pairs=stage in PAIRED)


def _classify_trl_answers(surveyed: Survey) -> Kind | None:
    """`prompt` decides first, then `messages`, then the text.

    trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset.tokenize_fn[in example:]
    """
    if {"prompt", "completion"} <= surveyed.columns:
        return "completions"
    if "prompt" in surveyed.columns:
        return None
    if _is_chat(surveyed, "messages"):
        return "chats"
    column = "conversations"
    if surveyed.kind(column) == "list" and surveyed.count(column, "from-value"):
        # TRL renames the keys and leaves the roles
        # (trl/data_utils.py::maybe_convert_to_chatml[List of possible])
        if _TEMPLATE_ROLES.issuperset(surveyed.named(column, "role:")):
            return "chats"
        return None
    if surveyed.kind("text") == "text":
        return "texts"
    return None


def _is_chat(surveyed: Survey, column: str) -> bool:
    return surveyed.kind(column) == "list" and not surveyed.count(column, "from-value")


def _classify_trl_pairs(surveyed: Survey) -> Kind | None:
    if _has_trl_pairs(surveyed):
        return "pairs"
    return None


def _has_trl_pairs(surveyed: Survey) -> bool:
    """Whether a prompt is in a column, or at the start of both answers.

    trl/data_utils.py::extract_prompt
    """
    if not {"chosen", "rejected"} <= surveyed.columns:
        return False
    if surveyed.count("chosen", "json-messages"):
        return False
    kind = surveyed.kind("chosen")
    if kind == "list" and not _is_chat(surveyed, "chosen"):
        return False
    if "prompt" in surveyed.columns:
        return surveyed.kind("prompt") == kind
    if kind == "list":
        return not surveyed.count("chosen", "starts-with:assistant")
    return kind == "text" and not shapes.find_prompt_columns(surveyed)


def _classify_open_instruct_answers(surveyed: Survey) -> Kind | None:
    if _is_chat(surveyed, "messages"):
        return "chats"
    return None


def _classify_open_instruct_pairs(surveyed: Survey) -> Kind | None:
    """Two whole conversations: a column `prompt` is not read.

    dataset_transformation.py::preference_tulu_tokenize_and_truncate_v1
    """
    are_chats = _is_chat(surveyed, "chosen") and _is_chat(surveyed, "rejected")
    if not are_chats or surveyed.count("chosen", "starts-with:assistant"):
        return None
    return "pairs"


_KINDS: Mapping[tuple[str, str], Callable[[Survey], Kind | None]] = {
    ("trl", "sft"): _classify_trl_answers,
    ("trl", "dpo"): _classify_trl_pairs,
    ("open_instruct", "sft"): _classify_open_instruct_answers,
    ("open_instruct", "dpo"): _classify_open_instruct_pairs,
}
# the only names of files that a trainer reads
# (dataset_transformation.py::DatasetConfig.__post_init__[.jsonl])
_SUFFIXES: Mapping[str, tuple[str, ...]] = {"open_instruct": LOCAL_SUFFIXES}
