"""`Plan` -> `Cache`: the folders of tokenised data and of reference log-probabilities, by content.

Upstream's own keys know names where they should know contents: of a local data file its path and the
number of rows (dataset_transformation.py::DatasetConfig[dataset_name: str],
dataset_transformation.py::DatasetConfig[dataset_range: int]), of the reference model its name
(dpo_utils.py::compute_reference_cache_hash[model_name_or_path]). What those keys do not see makes the name of the
folder they live in:

* the content of local data, of the whole tokenizer (upstream reads four of its files,
  dataset_transformation.py::TokenizerConfig.tokenizer[filenames=], not `chat_template.jinja`, `merges.txt` or
  `tokenizer.model`), and of the model, its `config_name` and `additional_model_arguments`;
* upstream's files that tokenise and score, by content: chat templates are text in one of them
  (dataset_transformation.py::get_tokenizer_tulu_v2_2[if tc.chat_template_name in] takes them by name), and its own
  version of the cache is raised by hand (dataset_transformation.py::[DATASET_CACHE_VERSION]);
* the versions of transformers and tokenizers.

What a key of upstream's does see (lengths, transforms, amounts, loss, LoRA) stays out: it makes
another entry in the same folder. So do places and times: a project that was moved, a file that was
touched or copied back, finds its cache. Another name for the same data is another key to upstream.

Below upstream lies the cache of `datasets`, which knows a local file by its path and time of last
write (datasets/data_files.py::_get_single_origin_metadata[if key in info]): a file written anew with its old time is
not read again. It goes into the same folder wherever data are local. TRL has no other: its precomputed reference is
found by the data and all weights of the model
(trl/trainer/dpo_trainer.py::DPOTrainer._precompute_ref_logps[Hasher.hash((dataset._fingerprint]), but not by
`max_length`, `truncation_mode` and `ld_alpha`, which change it.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from launcher.artifacts.fingerprint import READERS, MissingContent, cache_home
from launcher.dataset import mixture
from launcher.errors import Finding
from launcher.machine import codec
from launcher.machine.codec import Misfit, Omission
from launcher.paths import exists, is_dir
from launcher.plan.derive import Derived
from launcher.plan.plan import Plan
from launcher.upstream import facts

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
_SCORING = ("open_instruct/dpo_utils.py", "open_instruct/padding_free_collator.py", "open_instruct/dpo_tune_cache.py")
# by `Backend.DATA_CACHE`
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "own": ("transformers", "tokenizers"),
    "datasets": ("datasets", "tokenizers", "transformers", "trl"),
}
# they change the reference model, and upstream's key holds none of them
# (dpo_utils.py::compute_reference_cache_hash[config_str = json.dumps]). Liger's loader is not given bfloat16
# (dpo_tune_cache.py::main.load_model[AutoLigerKernelForCausalLM.from_pretrained]), so it is another model where that
# is not the checkpoint's own.
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
    "dataset_name dataset_config dataset_train_split model_name_or_path max_length packing packing_strategy "
    "assistant_only_loss completion_only_loss eos_token precompute_ref_log_probs truncation_mode ld_alpha".split()
)
_MIXTURE_KEY = ("datasets", "test_split_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One thing that a folder's name is derived from.

    `name` is how people know it and no part of the folder's name, except where it is all there is;
    `shown` what to say of it: the value itself, or the fingerprint of files.
    """

    role: Role
    name: str
    digest: str
    shown: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One folder for a run, how it is handed over, and what its name is derived from.

    `arguments` are upstream's own options, `env` environment variables. `key` are the values of
    upstream's own key, which decides inside the folder; `stage` and `backend` whose it is. `read` is
    when reading the contents began, in seconds since 1970.
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
        named = [one.name for one in self.inputs if one.role in {"data", "model"}]
        what = ", ".join(dict.fromkeys(named)) or "the tokenizer and upstream's own transforms"
        return f"one folder for each content of {what}"

    def as_json(self) -> dict[str, Any]:
        """For the manifest (`caches`) and the record in the folder itself."""
        return {**asdict(self), "path": str(self.path), "inputs": [asdict(i) for i in self.inputs]}


def from_json(data: Mapping[str, Any]) -> Cache:
    """What `as_json` wrote. Raises Misfit where it is damaged."""
    left_out: list[Omission] = []
    cache = codec.read_record(Cache, data, left_out)
    if left_out:
        raise Misfit(str(left_out[0]))
    return cache


def derive(plan: Plan, packages: Mapping[str, str], *, lenient: bool = False) -> tuple[Cache, ...]:
    """The cache folders of a plan; nothing is created.

    `packages` are the versions in the trainer's Python. Raises MissingContent where something local
    cannot be read, unless `lenient`: a plan may name what is not here.
    """
    reader = _Sources(plan, packages, lenient, time.time())
    return tuple(_open_instruct(reader) if plan.stage.backend.DATA_CACHE == "own" else _trl(reader))


def derived(caches: Iterable[Cache]) -> dict[str, Derived]:
    """The arguments that hand these folders over."""
    return {name: Derived(value=value, why=cache.why) for cache in caches for name, value in cache.arguments.items()}


def environment(caches: Sequence[Cache]) -> dict[str, str]:
    return {name: value for one in caches for name, value in one.env.items()}


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
        """What a file, a folder or a name on the hub holds; nothing where none is named."""
        if name is None:
            return []
        try:
            found = READERS[role](name, revision)
        except MissingContent:
            if not self.lenient:
                raise
            return [Input(role=role, name=name, digest=_MISSING)]
        shown = found.as_json()
        shown |= {"count": len(found.files), "files": shown["files"][:_FILES_KEPT]}
        return [Input(role=role, name=found.name, digest=found.digest, shown=shown)]

    def code(self, labels: Sequence[str]) -> Iterator[Input]:
        stage = self.plan.stage
        for label in labels:
            digest = facts.digest(stage.upstream.packages, label) or stage.schema.digests.get(label)
            yield Input(role="code", name=label, digest=digest or stage.upstream.version)

    def versions(self) -> Iterator[Input]:
        for name in _PACKAGES[self.plan.stage.backend.DATA_CACHE]:
            version = self.packages.get(name, "none")
            yield Input(role="package", name=name, digest=version, shown=version)

    def arguments(self, names: Sequence[str]) -> Iterator[Input]:
        values = self.plan.values
        for name in names:
            if name in values:
                text = json.dumps(values[name], sort_keys=True, default=str)
                yield Input(role="value", name=name, digest=text, shown=values[name])

    def cache(self, kind: Kind, base: str | None, inputs: Sequence[Input], key: Mapping[str, Any]) -> Cache:
        """`base` is the user's own folder for such caches; without one it is launch's."""
        options = self.plan.stage.options
        # the name counts where the digest does not stand for itself
        named = {"code", "package", "value"}
        hashed = [[one.role, *([one.name] if one.role in named else ()), one.digest] for one in inputs]
        text = json.dumps([_FORM, options.backend, kind, hashed])
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        home = Path(base).absolute() if base else cache_home()
        return Cache(
            kind=kind,
            path=home / f"{kind}-{digest[:16]}",
            digest=digest,
            inputs=tuple(inputs),
            stage=options.stage,
            backend=options.backend,
            key=key,
            read=self.begun,
        )


def _open_instruct(reader: _Sources) -> Iterator[Cache]:
    values = reader.plan.values
    prefix = "dataset_" if "dataset_local_cache_dir" in values else ""
    option, own = f"{prefix}local_cache_dir", reader.text(f"{prefix}config_hash")
    refers = reader.plan.stage.refers
    names = {name: f"{prefix}{name}" for name in _DATASET_KEY}
    names |= {name: name for name in ("max_seq_length", *TOKENIZER_KEY)}
    key = {name: values[field] for name, field in names.items() if field in values}
    if own is not None:
        # the set is taken from the cache by this name, and no data are looked at
        tokenised = reader.read("data", str(Path(str(values.get(option))) / own)) if refers else []
    else:
        tokenised = _tokenising(reader)
    if own is None and values.get(f"{prefix}cache_mode") == "local":
        base = reader.text(option) if values.given(option) else None
        made = reader.cache("dataset", base, tokenised, key)
        local = any(one.role == "data" for one in tokenised)
        env = {DATASETS_VARIABLE: str(made.path / "datasets")} if local else {}
        yield replace(made, arguments={option: str(made.path)}, env=env)
    if refers:
        revision = reader.text("model_revision")
        key |= {name: values.get(name) for name in _REFERENCE_KEY if name in values}
        inputs = [
            *tokenised,
            *reader.read("model", reader.text("model_name_or_path"), revision),
            *reader.read("config", reader.text("config_name"), revision),
            *reader.arguments(_REFERENCE_VALUES),
            *reader.code(_SCORING),
        ]
        made = reader.cache("reference", os.environ.get(REFERENCE_VARIABLE), inputs, key)
        yield replace(made, env={REFERENCE_VARIABLE: str(made.path)})


def _tokenising(reader: _Sources) -> list[Input]:
    """What tokenised data depend on and upstream's key does not see."""
    data = reader.plan.values.get(reader.plan.stage.entry.names.data)
    names = [str(name) for name in data[::2]] if isinstance(data, list) else []
    # dataset_transformation.py::DatasetConfig.__post_init__[.jsonl]: any other name goes to `load_dataset`, which
    # prefers a folder here
    local = [name for name in names if name.endswith((".jsonl", ".parquet")) or exists(name)]
    tokenizer = reader.text("tokenizer_name_or_path") or reader.text("model_name_or_path")
    return [
        *(one for name in local for one in reader.read("data", name)),
        *reader.read("tokenizer", tokenizer, reader.text("tokenizer_revision") or reader.text("model_revision")),
        *reader.code(_TOKENISING),
        *reader.versions(),
    ]


def _trl(reader: _Sources) -> Iterator[Cache]:
    """`datasets` caches what TRL reads and tokenises: beside its own key goes what that cannot see."""
    values, name = reader.plan.values, reader.text("dataset_name")
    mixed = mixture.of_values(values, os.environ)
    if mixed is not None:
        yield from _trl_mixture(reader, mixed)
        return
    precomputed = values.get("precompute_ref_log_probs") is True
    if name is None or values.get("dataset_streaming") is True:
        return
    local = is_dir(name)
    if not local and not precomputed:
        # the hub's sets are known by their commit
        # (datasets/data_files.py::_get_single_origin_metadata[resolved_path = fs.resolve_path])
        return
    inputs = [
        *reader.read("data", name if local else None),
        *reader.read("tokenizer", reader.text("model_name_or_path"), reader.text("model_revision")),
        *reader.read("template", reader.text("chat_template_path")),
        *reader.versions(),
        *(reader.arguments(_PRECOMPUTED_VALUES) if precomputed else ()),
    ]
    if precomputed:
        # TRL's own key holds a hash of the weights, which under ZeRO-3 are empty here
        # (trl/trainer/utils.py::hash_module)
        inputs += reader.read("model", reader.text("model_name_or_path"), reader.text("model_revision"))
    if not local:
        digest = hashlib.sha256(name.encode()).hexdigest()
        inputs.insert(0, Input(role="data", name=name, digest=digest))
    key = {name: values[name] for name in _TRL_KEY if name in values}
    made = reader.cache("dataset", os.environ.get(DATASETS_VARIABLE), inputs, key)
    yield replace(made, env={DATASETS_VARIABLE: str(made.path)})


def _trl_mixture(reader: _Sources, mixed: mixture.Mixture) -> Iterator[Cache]:
    """The same for the sets of a mixture: the local ones by their content, the others by their names."""
    values = reader.plan.values
    names = mixed.names()
    local = [name for name in names if exists(Path(name))]
    precomputed = values.get("precompute_ref_log_probs") is True
    if values.get("streaming") is True or not (local or precomputed):
        return
    inputs = [one for name in local for one in reader.read("data", name)]
    for name in names:
        if name not in local:
            inputs.append(Input(role="data", name=name, digest=hashlib.sha256(name.encode()).hexdigest()))
    model, revision = reader.text("model_name_or_path"), reader.text("model_revision")
    inputs += reader.read("tokenizer", model, revision)
    inputs += reader.read("template", reader.text("chat_template_path"))
    inputs += reader.versions()
    if precomputed:
        inputs += reader.arguments(_PRECOMPUTED_VALUES)
        inputs += reader.read("model", model, revision)
    key = {name: values[name] for name in (*_TRL_KEY, *_MIXTURE_KEY) if name in values}
    made = reader.cache("dataset", os.environ.get(DATASETS_VARIABLE), inputs, key)
    yield replace(made, env={DATASETS_VARIABLE: str(made.path)})


def findings(plan: Plan, caches: Sequence[Cache]) -> Iterator[Finding]:
    """What the folders of a run that is about to start cannot prevent."""
    for one in (one for cache in caches if cache.kind == "reference" for one in cache.inputs):
        if one.role == "model" and isinstance(one.shown, dict) and one.shown["kind"] == "name":
            message = (
                f"{one.name} is not in the hub's cache: the next start, which has it, computes the reference again"
            )
            key, help = "args.model_name_or_path", f"hf download {one.name}"
            yield plan.stage.config.placed(
                Finding(severity="note", layer="run", code="model-not-here", key=key, message=message, help=help)
            )
