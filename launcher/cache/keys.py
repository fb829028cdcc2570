"""`Plan` -> `Cache`: the folders of tokenised data and of reference log-probabilities, by content.

Upstream's own keys hold names where they should hold contents: of a local data file its path and
the number of rows (dataset_transformation.py::DatasetConfig[dataset_name: str],
dataset_transformation.py::DatasetConfig[dataset_range: int]), of the reference model its name
(dpo_utils.py::compute_reference_cache_hash[model_name_or_path]). What those keys do not see makes
the name of the folder they live in:

* the content of local data, of the whole tokenizer (upstream reads four of its files,
  dataset_transformation.py::TokenizerConfig.tokenizer[filenames=], not `chat_template.jinja`,
  `merges.txt` or `tokenizer.model`), and of the model, its `config_name` and
  `additional_model_arguments`;
* upstream's files that tokenise and score, by content: chat templates are text in one of them
  (dataset_transformation.py::get_tokenizer_tulu_v2_2[if tc.chat_template_name in] takes them by
  name), and its own version of the cache is raised by hand
  (dataset_transformation.py::[DATASET_CACHE_VERSION]);
* the versions of transformers and tokenizers.

What a key of upstream's does see (lengths, transforms, amounts, loss, LoRA) stays out: it makes
another entry in the same folder. So do places and times: a project that was moved, a file that was
touched or copied back, finds its cache. Another name for the same data is another key to upstream.

Below upstream lies the cache of `datasets`, whose key knows a local file by its path and time of
last write (datasets/data_files.py::_get_single_origin_metadata[if key in info]): a file written
anew with its old time is not read again. It goes into the same folder if data are local. TRL has no
other cache: its precomputed reference is found by the data and all weights of the model
(trl/trainer/dpo_trainer.py::DPOTrainer._precompute_ref_logps[Hasher.hash((dataset._fingerprint]),
but not by `max_length`, `truncation_mode` and `ld_alpha`, which change it.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from launcher.artifacts.fingerprint import READERS, MissingContent, cache_home
from launcher.cache import inputs
from launcher.errors import Finding
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Misfit, Omission
from launcher.paths import exists, is_dir
from launcher.plan.derive import Derived
from launcher.plan.plan import Plan

Kind = Literal["dataset", "reference"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Role = Literal["data", "tokenizer", "model", "config", "template", "code", "package", "value"]

REFERENCE_VARIABLE = "REFERENCE_LOGPROBS_CACHE_PATH"
DATASETS_VARIABLE = "HF_DATASETS_CACHE"
_FORM = "launch cache 1"
_MISSING = "missing"
# files in a record; a folder of data may hold very many
_FILES_KEPT = 200

_TOKENISING = ("open_instruct/dataset_transformation.py",)
_SCORING = (
    "open_instruct/dpo_utils.py",
    "open_instruct/padding_free_collator.py",
    "open_instruct/dpo_tune_cache.py",
)
# by `Backend.DATA_CACHE`
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "own": ("transformers", "tokenizers"),
    "datasets": ("datasets", "tokenizers", "transformers", "trl"),
}
# they change the reference model, and upstream's key holds none of them
# (dpo_utils.py::compute_reference_cache_hash[config_str = json.dumps]). Liger's loader is not given
# bfloat16 (dpo_tune_cache.py::main.load_model[AutoLigerKernelForCausalLM.from_pretrained]), so it
# loads another model if that is not the checkpoint's own.
_REFERENCE_VALUES = ("additional_model_arguments", "use_liger_kernel")
# dpo_trainer.py hands them to the collator and the sums, after the fingerprint of the data is made
_PRECOMPUTED_VALUES = ("max_length", "truncation_mode", "ld_alpha")

# what upstream's own keys hold, to tell two entries of one folder apart in words
TOKENIZER_KEY = tuple(
    "tokenizer_name_or_path tokenizer_revision trust_remote_code use_fast chat_template_name "
    "add_bos get_tokenizer_fn ground_truths_key sft_messages_key".split()
)
_DATASET_KEY = ("mixer_list", "mixer_list_splits", "transform_fn", "target_columns", "config_hash")
_REFERENCE_KEY = tuple(
    "concatenated_forward loss_type max_train_samples model_name_or_path model_revision packing "
    "use_lora use_qlora".split()
)
_TRL_KEY = tuple(
    "dataset_name dataset_config dataset_train_split model_name_or_path max_length packing "
    "packing_strategy assistant_only_loss completion_only_loss eos_token precompute_ref_log_probs "
    "truncation_mode ld_alpha".split()
)
_MIXTURE_KEY = ("datasets", "test_split_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One thing that a folder's name is derived from.

    `name` is for people and no part of the folder's name, unless it is all there is; `shown` is
    what to say of it: the value itself, or the fingerprint of files.
    """

    role: Role
    name: str
    digest: str
    shown: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One folder for a run, how it is handed over, and what its name is derived from.

    `arguments` are upstream's own options, `env` environment variables. `key` are the values of
    upstream's own key, which decides inside the folder; `stage` and `backend` are whose it is.
    `read` is when reading the contents began, in seconds since 1970.
    """

    kind: Kind
    path: Path
    digest: str
    inputs: tuple[Input, ...]
    stage: str
    backend: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    key: Mapping[str, Any] = field(default_factory=dict)
    read: float = 0.0

    @property
    def why(self) -> str:
        named = [source.name for source in self.inputs if source.role in ("data", "model")]
        what = ", ".join(dict.fromkeys(named)) or "the tokenizer and upstream's own transforms"
        return f"one folder for each content of {what}"

    def as_json(self) -> dict[str, Any]:
        """For the manifest (`caches`) and the record in the folder itself."""
        return {**asdict(self), "path": str(self.path)}


def parse_cache(data: Mapping[str, Any]) -> Cache:
    """What `as_json` wrote. Raises Misfit if it is damaged."""
    left_out: list[Omission] = []
    cache = codec.read_record(Cache, data, left_out)
    if left_out:
        raise Misfit(str(left_out[0]))
    return cache


def derive(plan: Plan, packages: Mapping[str, str], *, lenient: bool = False) -> tuple[Cache, ...]:
    """The cache folders of a plan; nothing is created.

    `packages` are the versions in the trainer's Python. Raises MissingContent if something local
    cannot be read, unless `lenient`: a dry run may name what is not here.
    """
    sources = _Sources(plan, packages, lenient, time.time())
    if plan.stage.backend.DATA_CACHE == "own":
        return tuple(_find_open_instruct_caches(sources))
    return tuple(_find_trl_caches(sources))


def derive_arguments(caches: Iterable[Cache]) -> dict[str, Derived]:
    """The arguments that hand these folders over."""
    arguments = {}
    for cache in caches:
        for name, value in cache.arguments.items():
            arguments[name] = Derived(value=value, why=cache.why)
    return arguments


def derive_environment(caches: Sequence[Cache]) -> dict[str, str]:
    return {name: value for cache in caches for name, value in cache.env.items()}


@dataclass(frozen=True, slots=True)
class _Sources:
    plan: Plan
    packages: Mapping[str, str]
    lenient: bool
    begun: float

    def text(self, name: str) -> str | None:
        value = self.plan.values.get(name)
        return value if isinstance(value, str) and value else None

    def read(self, role: Role, name: str | None, revision: str | None = None) -> list[Input]:
        """The content of a file, a folder or a name on the hub; nothing if none is named."""
        if name is None:
            return []
        try:
            content = READERS[role](name, revision)
        except MissingContent:
            if not self.lenient:
                raise
            return [Input(role=role, name=name, digest=_MISSING)]
        shown = content.as_json()
        shown["count"] = len(content.files)
        shown["files"] = shown["files"][:_FILES_KEPT]
        return [Input(role=role, name=content.name, digest=content.digest, shown=shown)]

    def read_model(self, role: Role) -> list[Input]:
        return self.read(role, self.text("model_name_or_path"), self.text("model_revision"))

    def code(self, labels: Sequence[str]) -> Iterator[Input]:
        stage = self.plan.stage
        for label in labels:
            digest = inputs.code_digest(stage, label) or stage.upstream.version
            yield Input(role="code", name=label, digest=digest)

    def versions(self) -> Iterator[Input]:
        for name in _PACKAGES[self.plan.stage.backend.DATA_CACHE]:
            version = self.packages.get(name, "none")
            yield Input(role="package", name=name, digest=version, shown=version)

    def arguments(self, names: Sequence[str]) -> Iterator[Input]:
        for name, value in self.values(names).items():
            text = json.dumps(value, sort_keys=True, default=str)
            yield Input(role="value", name=name, digest=text, shown=value)

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        values = self.plan.values
        return {name: values[name] for name in names if name in values}

    def cache(
        self, kind: Kind, base: str | None, read: Sequence[Input], key: Mapping[str, Any]
    ) -> Cache:
        """`base` is the user's own folder for such caches; without one it is launch's."""
        options = self.plan.stage.options
        hashed = []
        for source in read:
            # the name counts if the digest does not stand for itself
            if source.role in ("code", "package", "value"):
                hashed.append([source.role, source.name, source.digest])
            else:
                hashed.append([source.role, source.digest])
        text = json.dumps([_FORM, options.backend, kind, hashed])
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        home = Path(base).absolute() if base else cache_home()
        return Cache(
            kind=kind,
            path=home / f"{kind}-{digest[:16]}",
            digest=digest,
            inputs=tuple(read),
            stage=options.stage,
            backend=options.backend,
            key=key,
            read=self.begun,
        )


def _find_open_instruct_caches(sources: _Sources) -> Iterator[Cache]:
    values = sources.plan.values
    refers = sources.plan.stage.refers
    prefix = "dataset_" if "dataset_local_cache_dir" in values else ""
    option = f"{prefix}local_cache_dir"
    key = {}
    for name in _DATASET_KEY:
        if f"{prefix}{name}" in values:
            key[name] = values[f"{prefix}{name}"]
    key |= sources.values(("max_seq_length", *TOKENIZER_KEY))
    named_set = sources.text(f"{prefix}config_hash")
    if named_set is None:
        tokenised = _read_tokenising_inputs(sources)
        if values.get(f"{prefix}cache_mode") == "local":
            base = None
            if values.given(option):
                base = sources.text(option)
            cache = sources.cache("dataset", base, tokenised, key)
            env = {}
            if any(source.role == "data" for source in tokenised):
                env[DATASETS_VARIABLE] = str(cache.path / "datasets")
            yield replace(cache, arguments={option: str(cache.path)}, env=env)
    elif refers:
        # the set is taken from the cache by this name, and no data are looked at
        folder = Path(str(values.get(option)))
        tokenised = sources.read("data", str(folder / named_set))
    if refers:
        key |= sources.values(_REFERENCE_KEY)
        read = [*tokenised, *_read_scoring_inputs(sources)]
        cache = sources.cache("reference", os.environ.get(REFERENCE_VARIABLE), read, key)
        yield replace(cache, env={REFERENCE_VARIABLE: str(cache.path)})


def _read_tokenising_inputs(sources: _Sources) -> list[Input]:
    """What tokenised data depend on and upstream's key does not see."""
    read: list[Input] = []
    for name in inputs.list_data_names(sources.plan):
        # dataset_transformation.py::DatasetConfig.__post_init__[.jsonl]: any other name goes to
        # `load_dataset`, which prefers a folder here
        if name.endswith((".jsonl", ".parquet")) or exists(name):
            read += sources.read("data", name)
    tokenizer = sources.text("tokenizer_name_or_path") or sources.text("model_name_or_path")
    revision = sources.text("tokenizer_revision") or sources.text("model_revision")
    return [
        *read,
        *sources.read("tokenizer", tokenizer, revision),
        *sources.code(_TOKENISING),
        *sources.versions(),
    ]


def _read_scoring_inputs(sources: _Sources) -> list[Input]:
    """What the reference's log-probabilities depend on beside the tokenised data."""
    config = sources.text("config_name")
    return [
        *sources.read_model("model"),
        *sources.read("config", config, sources.text("model_revision")),
        *sources.arguments(_REFERENCE_VALUES),
        *sources.code(_SCORING),
    ]


def _find_trl_caches(sources: _Sources) -> Iterator[Cache]:
    """`datasets` caches what TRL reads and tokenises: the folder's name holds what its key lacks.

    Local sets count by their content. The hub's are known by their commit
    (datasets/data_files.py::_get_single_origin_metadata[resolved_path = fs.resolve_path]), and
    need a folder of their own only beside local ones, or for a precomputed reference.
    """
    values = sources.plan.values
    names = inputs.list_data_names(sources.plan)
    if values.get("datasets"):
        local = [name for name in names if exists(Path(name))]
        streams = values.get("streaming")
        key = sources.values((*_TRL_KEY, *_MIXTURE_KEY))
    else:
        local = [name for name in names if is_dir(name)]
        streams = values.get("dataset_streaming")
        key = sources.values(_TRL_KEY)
    precomputed = values.get("precompute_ref_log_probs") is True
    if not names or streams is True or not (local or precomputed):
        return
    hub = [name for name in names if name not in local]
    read = _read_trl_inputs(sources, local, hub)
    if precomputed:
        read += sources.arguments(_PRECOMPUTED_VALUES)
        # TRL's own key holds a hash of the weights, which under ZeRO-3 are empty here
        # (trl/trainer/utils.py::hash_module)
        read += sources.read_model("model")
    cache = sources.cache("dataset", os.environ.get(DATASETS_VARIABLE), read, key)
    yield replace(cache, env={DATASETS_VARIABLE: str(cache.path)})


def _read_trl_inputs(sources: _Sources, local: Sequence[str], hub: Sequence[str]) -> list[Input]:
    """What tokenised data depend on: local data by content, those of the hub by name."""
    read: list[Input] = []
    for name in local:
        read += sources.read("data", name)
    for name in hub:
        digest = hashlib.sha256(name.encode()).hexdigest()
        read.append(Input(role="data", name=name, digest=digest))
    read += sources.read_model("tokenizer")
    read += sources.read("template", sources.text("chat_template_path"))
    read += sources.versions()
    return read


def check_caches(plan: Plan, caches: Sequence[Cache]) -> Iterator[Finding]:
    """What the folders of a run that is about to start cannot prevent."""
    for cache in caches:
        if cache.kind != "reference":
            continue
        for source in cache.inputs:
            is_shown = source.role == "model" and isinstance(source.shown, dict)
            if not is_shown or source.shown["kind"] != "name":
                continue
            message = (
                f"{source.name} is not in the hub's cache: the next start, which has it, "
                "computes the reference again"
            )
            finding = Finding(
                severity="note",
                layer="run",
                code="model-not-here",
                key="args.model_name_or_path",
                message=message,
                help=f"hf download {source.name}",
            )
            yield plan.stage.config.placed(finding)
