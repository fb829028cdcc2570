"""What upstream does with arguments, where that has changed between commits that launch knows.

Rules and facts are written by hand, and upstream moves: a rule that was right at one commit can be
wrong at another, though the line that it cites still stands. What such a rule depends on has a name
here, and the commits between which it holds. The source itself comes first, by the text of one
function; history decides only where that text is neither of the known ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from launcher.lazy_dataclass import dataclass

if TYPE_CHECKING:
    # what reads sources is imported only where there is something to read
    from launcher.machine.git import Repository
    from launcher.upstream.source.packages import Sources

SFT = "sft"
DPO = "dpo"
DPO_OLMO_CORE = "dpo_olmo_core"
_TRANSFORMATION = "open_instruct/dataset_transformation.py"
_OLMO_CORE_UTILS = "open_instruct/olmo_core_utils.py"
_DPO_UTILS = "open_instruct/dpo_utils.py"
_MODEL_UTILS = "open_instruct/model_utils.py"
_EXPERIMENT = "DPOExperimentConfig.__post_init__"

Answers = Mapping[str, bool | None]
"""Whether each behaviour holds, by its name; None where neither source nor history tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A text in one function of upstream's that tells whether a behaviour holds.

    `symbol` is a file and a function, or `Class.method`, as in a citation; `{script}` is the entry
    script. `text` stands there as `source.functions.normalise` writes it. `scripts` are the keys
    of the entry scripts that the sign is about; without any it is about all.
    """

    symbol: str
    text: str
    holds: bool
    scripts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Something that upstream does at some commits and not at others, or in other words at each.

    `says` is a sentence for people. Of `signs` the first whose text is found decides. `since` is
    the commit that brought the behaviour (None: older than what launch knows), `until` the one that
    took it away.
    """

    name: str
    says: str
    signs: tuple[Sign, ...]
    scripts: tuple[str, ...] = (SFT, DPO, DPO_OLMO_CORE)
    since: str | None = None
    until: str | None = None


ONE_SPLIT_A_SET = "one-split-a-set"
GUARDS_NEGATIVE_CLIPPING = "guards-negative-clipping"
MIXES_PACKED_SAMPLES = "mixes-packed-samples"
PACKS_WITH_FLASH_ALONE = "packs-with-flash-alone"
EXPORTS_OLMO_ALONE = "exports-olmo-alone"
VERIFIES_EXPORT = "verifies-export"
REPLACES_SCHEDULES = "replaces-schedules"
KEEPS_EMPTY_GROUPS = "keeps-empty-groups"
SEES_TEMPLATE = "caches-by-template"
LIMITS_CHECKPOINTS = "limits-checkpoints"
ASKS_FOR_MODEL = "asks-for-model"
RECOMPUTES_MODULES = "recomputes-modules"
OLMO_BY_NAME = "olmo-by-name"
GIVES_TOOLS = "gives-tools"
SCALES_ROPE = "scales-rope"
CHOOSES_LOSS = "chooses-loss"
DETECTS_WITHOUT_FLASH = "detects-without-flash"
SKIPS_NO_INTERVAL = "skips-no-interval"
DIVIDES_BY_NO_TOKENS = "divides-by-no-tokens"
REFUSES_TWO_SOURCES = "refuses-two-sources"
CUTS_ROWS = "cuts-rows"
READS_MESSAGES = "reads-messages"
LOADS_HF_WEIGHTS = "loads-hf-weights"

BEHAVIOURS: tuple[Behaviour, ...] = (
    Behaviour(
        name=ONE_SPLIT_A_SET,
        says="several splits are one for each set, not one for each entry of the mixer list",
        since="1cd303a5b",
        signs=(
            Sign(
                symbol=f"{_TRANSFORMATION}::load_dataset_configs",
                text="dataset_split=dataset_mixer_list_splits[i // 2]",
                holds=True,
            ),
            Sign(
                symbol=f"{_TRANSFORMATION}::load_dataset_configs",
                text="dataset_split=dataset_mixer_list_splits[i]",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=GUARDS_NEGATIVE_CLIPPING,
        says="a limit of the gradient norm that is not above 0 means that nothing is clipped",
        scripts=(DPO, DPO_OLMO_CORE),
        until="03667ea98",
        signs=(
            Sign(symbol="{script}::main", text="args.max_grad_norm > 0", holds=True),
            Sign(
                symbol="{script}::main",
                text="if accelerator.sync_gradients and args.max_grad_norm:",
                holds=False,
                scripts=(DPO,),
            ),
            Sign(
                symbol="{script}::main",
                text="max_grad_norm=args.max_grad_norm",
                holds=False,
                scripts=(DPO_OLMO_CORE,),
            ),
        ),
    ),
    # the same, of the script in which it has not changed
    Behaviour(
        name=GUARDS_NEGATIVE_CLIPPING,
        says="a limit of the gradient norm that is not above 0 means that nothing is clipped",
        scripts=(SFT,),
        signs=(Sign(symbol="{script}::main", text="args.clip_grad_norm > 0", holds=True),),
    ),
    Behaviour(
        name=MIXES_PACKED_SAMPLES,
        says="OLMo-core's model does not learn where a packed sample ends",
        scripts=(DPO_OLMO_CORE,),
        until="7aa1712f7",
        signs=(
            Sign(symbol=f"{_DPO_UTILS}::concatenated_forward_olmo", text="doc_lens=", holds=False),
            Sign(
                symbol=f"{_DPO_UTILS}::concatenated_forward_olmo",
                text="model(concatenated_batch['concatenated_input_ids'], "
                "labels=concatenated_labels)",
                holds=True,
            ),
        ),
    ),
    Behaviour(
        name=PACKS_WITH_FLASH_ALONE,
        says="packing is refused where attention is not one of flash-attn's",
        scripts=(DPO_OLMO_CORE,),
        since="7aa1712f7",
        signs=(
            Sign(
                symbol="open_instruct/olmo_core_train_modules.py::DPOTrainModule.__init__",
                text="assert attn_implementation in _DOC_LENS_ATTN_BACKENDS",
                holds=True,
            ),
            Sign(
                symbol="open_instruct/olmo_core_train_modules.py::DPOTrainModule.__init__",
                text="model.lm_head.__class__ = DPOLMHead",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=EXPORTS_OLMO_ALONE,
        says="models of other families than OLMo's are saved as a plain state dict",
        scripts=(DPO_OLMO_CORE,),
        until="1bc3178a7",
        signs=(
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::save_state_dict_as_hf",
                text="save_hf_model(",
                holds=True,
            ),
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::save_state_dict_as_hf",
                text="state_to_hf(",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=VERIFIES_EXPORT,
        says="a model that could not be exported is refused before training",
        scripts=(DPO_OLMO_CORE,),
        since="1bc3178a7",
        signs=(
            Sign(symbol="{script}::main", text="verify_can_save_as_hf(", holds=True),
            Sign(symbol="{script}::main", text="setup_model(", holds=False),
        ),
    ),
    Behaviour(
        name=REPLACES_SCHEDULES,
        says="a schedule that is not known becomes a constant rate",
        scripts=(DPO_OLMO_CORE,),
        until="b6901f008",
        signs=(
            Sign(
                symbol="{script}::_setup_scheduler",
                text="olmo_optim.ConstantWithWarmup",
                holds=True,
            ),
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::build_scheduler",
                text="raise ValueError(f'Unknown lr_scheduler_type",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=KEEPS_EMPTY_GROUPS,
        says="the optimizer gets a group of biases though none is trained",
        scripts=(SFT, DPO),
        until="0895af14c",
        signs=(
            Sign(
                symbol="{script}::main", text="no_decay = ['bias', 'layer_norm.weight']", holds=True
            ),
            Sign(
                symbol="open_instruct/utils.py::get_optimizer_grouped_parameters",
                text="if group['params']",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=SEES_TEMPLATE,
        says="the key of a cached data set holds the chat template",
        since="00ffbfc32",
        signs=(
            Sign(
                symbol=f"{_TRANSFORMATION}::compute_config_hash",
                text="chat_template_hash",
                holds=True,
            ),
            Sign(
                symbol=f"{_TRANSFORMATION}::compute_config_hash",
                text="'tokenizer_config': tc_dict",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=LIMITS_CHECKPOINTS,
        says="`keep_last_n_checkpoints` is what OLMo-core keeps",
        scripts=(DPO_OLMO_CORE,),
        since="b08d6dc8e",
        signs=(
            Sign(
                symbol="{script}::_setup_callbacks",
                text="max_checkpoints=args.keep_last_n_checkpoints",
                holds=True,
            ),
            Sign(
                symbol="{script}::_setup_callbacks",
                text="args.ephemeral_save_interval",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=SKIPS_NO_INTERVAL,
        says="an `ephemeral_save_interval` that is not above 0 means none",
        scripts=(DPO_OLMO_CORE,),
        since="17a617dfe",
        signs=(
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::build_checkpointer_callback",
                text="if (ephemeral_save_interval or 0) > 0 else None",
                holds=True,
            ),
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::build_checkpointer_callback",
                text="ephemeral_save_interval=ephemeral_save_interval,",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=ASKS_FOR_MODEL,
        says="the script itself refuses to start without a model; otherwise the parser does",
        scripts=(DPO_OLMO_CORE,),
        until="1bc3178a7",
        signs=(
            Sign(symbol="{script}::main", text="args.model_name_or_path is None", holds=True),
            Sign(symbol="{script}::main", text="setup_model(args)", holds=False),
        ),
    ),
    Behaviour(
        name=RECOMPUTES_MODULES,
        says="`activation_checkpointing_mode: selected_modules` recomputes without a budget or"
        " torch.compile",
        scripts=(DPO_OLMO_CORE,),
        since="18f6520b5",
        signs=(
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::build_ac_config",
                text="mode == 'selected_modules'",
                holds=True,
            ),
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::build_ac_config",
                text="activation_memory_budget < 1.0",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=OLMO_BY_NAME,
        says="a tokenizer counts as OLMo's by its name or path, not by its config",
        since="ef4ffe4e6",
        signs=(
            Sign(
                symbol=f"{_TRANSFORMATION}::get_tokenizer_tulu_v2_2",
                text="if 'olmo' in str(tc.tokenizer_name_or_path).lower():",
                holds=True,
            ),
            Sign(
                symbol=f"{_TRANSFORMATION}::get_tokenizer_tulu_v2_2",
                text="if 'olmo' in config.model_type:",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=GIVES_TOOLS,
        says="the column `tools` of SFT's rows is given to the chat template",
        scripts=(SFT,),
        since="a99c8eb02",
        signs=(
            Sign(
                symbol=f"{_TRANSFORMATION}::_tokenize_tulu_sft_with_assistant_labels",
                text="conversation=messages, tools=tools",
                holds=True,
            ),
            Sign(
                symbol=f"{_TRANSFORMATION}::sft_tulu_tokenize_and_truncate_v1",
                text="apply_chat_template(conversation=messages, tokenize=True",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=SCALES_ROPE,
        says="`rope_scaling_factor` scales the rotary embedding that a model is built with",
        scripts=(DPO_OLMO_CORE,),
        since="b6901f008",
        signs=(
            Sign(symbol=f"{_OLMO_CORE_UTILS}::setup_model", text="with_rope_scaling(", holds=True),
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::setup_model", text="model_config.build(", holds=False
            ),
        ),
    ),
    Behaviour(
        name=CHOOSES_LOSS,
        says="`loss_implementation` is the loss of OLMo-core's own output layer",
        scripts=(DPO_OLMO_CORE,),
        since="49226584b",
        signs=(
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::setup_model",
                text="model_config_args.loss_implementation",
                holds=True,
            ),
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::setup_model", text="model_config.build(", holds=False
            ),
        ),
    ),
    Behaviour(
        name=DETECTS_WITHOUT_FLASH,
        says="without flash-attn attention is torch's; until then looking for it failed on a GPU",
        since="eb9c5ff24",
        signs=(
            Sign(
                symbol=f"{_MODEL_UTILS}::detect_attn_implementation",
                text="transformers.utils.is_flash_attn_4_available()",
                holds=True,
            ),
            Sign(
                symbol=f"{_MODEL_UTILS}::detect_attn_implementation",
                text="_is_flash_attn_4_available()",
                holds=False,
            ),
        ),
    ),
    Behaviour(
        name=DIVIDES_BY_NO_TOKENS,
        says="a mean log-probability of an answer without a trained token is not a number",
        scripts=(DPO, DPO_OLMO_CORE),
        until="94a17b99a",
        signs=(
            Sign(
                symbol=f"{_DPO_UTILS}::_get_batch_logps",
                text="loss_mask.sum(-1).clamp(min=1)",
                holds=False,
            ),
            Sign(symbol=f"{_DPO_UTILS}::_get_batch_logps", text="/ loss_mask.sum(-1)", holds=True),
        ),
    ),
    Behaviour(
        name=REFUSES_TWO_SOURCES,
        says="a data set by name, or a mixture, beside the mixer list is refused",
        signs=(
            Sign(
                symbol="open_instruct/finetune.py::FlatArguments.__post_init__",
                text="self.dataset_mixer is not None and self.dataset_mixer_list is not None",
                holds=True,
                scripts=(SFT,),
            ),
            Sign(
                symbol=f"{_DPO_UTILS}::{_EXPERIMENT}",
                text="self.dataset_mixer is not None and self.mixer_list is not None",
                holds=True,
                scripts=(DPO, DPO_OLMO_CORE),
            ),
        ),
    ),
    Behaviour(
        name=CUTS_ROWS,
        says="rows are cut at `max_seq_length`, whatever the model was made for",
        signs=(
            Sign(
                symbol=f"{_TRANSFORMATION}::_tokenize_tulu_sft_with_assistant_labels",
                text="truncation=max_seq_length is not None, max_length=max_seq_length",
                holds=True,
            ),
            Sign(
                symbol=f"{_TRANSFORMATION}::sft_tulu_tokenize_and_truncate_v1",
                text="truncation=True, max_length=max_seq_length",
                holds=True,
            ),
        ),
    ),
    Behaviour(
        name=READS_MESSAGES,
        says="rows are read by `messages`, or by `chosen` and `rejected`",
        signs=(
            Sign(
                symbol=f"{_TRANSFORMATION}::sft_tulu_tokenize_and_truncate_v1",
                text="messages = row['messages']",
                holds=True,
                scripts=(SFT,),
            ),
            Sign(
                symbol=f"{_TRANSFORMATION}::_tokenize_row_or_mask_out",
                text="messages = row['messages']",
                holds=True,
                scripts=(SFT,),
            ),
            Sign(
                symbol=f"{_TRANSFORMATION}::preference_tulu_tokenize_and_truncate_v1_2",
                text="row[rejected_key]",
                holds=True,
                scripts=(DPO, DPO_OLMO_CORE),
            ),
        ),
    ),
    Behaviour(
        name=LOADS_HF_WEIGHTS,
        says="OLMo-core loads the weights of a hub name or folder into the shape that it built",
        scripts=(DPO_OLMO_CORE,),
        signs=(
            Sign(symbol="{script}::main", text="load_hf_model(args.model_name_or_path", holds=True),
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::load_hf_weights_into_olmo_core",
                text="load_hf_model(model_name_or_path",
                holds=True,
            ),
            Sign(
                symbol=f"{_OLMO_CORE_UTILS}::reload_hf_checkpoint_after_parallelization",
                text="load_hf_model(model_name_or_path",
                holds=True,
            ),
        ),
    ),
)


def list_behaviours(key: str) -> Iterable[Behaviour]:
    """The behaviours that rules and facts about an entry script, by its key, depend on."""
    return (behaviour for behaviour in BEHAVIOURS if key in behaviour.scripts)


def observe_behaviours(sources: Sources, key: str, script: str) -> dict[str, bool | None]:
    """What the source of an entry script shows of each behaviour; None if it shows neither form."""
    answers: dict[str, bool | None] = {}
    for behaviour in list_behaviours(key):
        answers[behaviour.name] = _read_signs(behaviour, sources, key, script)
    return answers


def _read_signs(behaviour: Behaviour, sources: Sources, key: str, script: str) -> bool | None:
    """Whether the source has a behaviour; None if it shows no sign of either form."""
    for sign in behaviour.signs:
        if sign.scripts and key not in sign.scripts:
            continue
        file, _, function = sign.symbol.replace("{script}", script).partition("::")
        text = _find_function_text(sources, file, function)
        if text is not None and sign.text in text:
            return sign.holds
    return None


def _find_function_text(sources: Sources, file: str, function: str) -> str | None:
    """The normalised text of a function or method; None where the source has none of that name."""
    from launcher.upstream.source import functions

    module = sources.module_at(file)
    if module is None:
        return None
    for name, node in module.definitions():
        if name == function:
            return functions.normalise(node)
    return None


def complete_answers(
    answers: Answers, key: str, repository: Repository, commit: str
) -> dict[str, bool | None]:
    """The answers; those that the source does not give come from the history of a repository."""
    complete = dict(answers)
    for behaviour in list_behaviours(key):
        if complete.get(behaviour.name) is None:
            complete[behaviour.name] = _ask_history(behaviour, repository, commit)
    return complete


def _ask_history(behaviour: Behaviour, repository: Repository, commit: str) -> bool | None:
    """Whether a commit stands between those that began and ended a behaviour; None if unknown."""
    if behaviour.since is None and behaviour.until is None:
        return None
    begun: bool | None = True
    if behaviour.since is not None:
        begun = _contains(repository, commit, behaviour.since)
    ended: bool | None = False
    if behaviour.until is not None:
        ended = _contains(repository, commit, behaviour.until)
    if begun is None or ended is None:
        return None
    return begun and not ended


def _contains(repository: Repository, commit: str, change: str) -> bool | None:
    """Whether a commit has a change among its ancestors; None if the history is cut off later."""
    if repository.commit(change) is None:
        # a whole history that lacks the change ends before it, or is that of a fork
        return None if repository.is_shallow() else False
    return repository.ask("merge-base", "--is-ancestor", change, commit) is not None
