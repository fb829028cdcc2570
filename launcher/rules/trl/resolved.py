"""What TRL's arguments come to once its scripts have read them: mappings, precision, attention."""

import json
from typing import Any

from launcher.upstream.schema import Values, find_json_fault


def inline(value: Any) -> dict[str, Any] | None:
    """The mapping that a JSON text holds, None for other texts and for broken JSON."""
    if (
        not isinstance(value, str)
        or not value.startswith("{")
        or find_json_fault(value) is not None
    ):
        return None
    mapping: dict[str, Any] = json.loads(value)
    return mapping


def words(value: Any) -> list[str]:
    """The words of an argument that takes one or several; `None` where it has none."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return [str(value)]


def target_modules(values: Values) -> list[str]:
    """What `lora_target_modules` names; a single word is a pattern
    (trl/trainer/model_config.py::ModelConfig.__post_init__[if hasattr(self.lora_target_modules]).
    """
    names = words(values["lora_target_modules"] or [])
    return [name for name in names if name]


def prepared(values: Values) -> bool:
    """Whether the rows are taken as they are, tokenised
    (trl/trainer/sft_trainer.py::SFTTrainer.__init__[and args.dataset_kwargs.get]).
    """
    return bool((inline(values.get("dataset_kwargs")) or {}).get("skip_prepare_dataset"))


def precision(values: Values) -> str | None:
    """`bf16` or `fp16`, None for neither; bfloat16 by default
    (trl/trainer/base_config.py::_BaseConfig.__post_init__[self.bf16 = not]).
    """
    if values["fp16"]:
        return "fp16"
    if values["bf16"] or values["bf16"] is None:
        return "bf16"
    return None


def weights_type(values: Values) -> tuple[str, str]:
    """The format that the weights are loaded in, and the key that says so.

    A name of torch's; `auto` for the model's own, empty if unknown. The mapping wins
    (trl/scripts/sft.py::main[model_init_kwargs.update]), and none at all is `auto`
    (transformers/modeling_utils.py::PreTrainedModel.from_pretrained[if dtype is None]).
    """
    kwargs = inline(values["model_init_kwargs"]) or {}
    key = "dtype"
    dtype = values["dtype"]
    if "dtype" in kwargs:
        key = "model_init_kwargs"
        dtype = kwargs["dtype"]
    if dtype is not None:
        return str(dtype).removeprefix("torch."), key
    if values.schema.tested:
        return "auto", key
    # other releases load float32
    return "", key


def attention(values: Values) -> tuple[str | None, str]:
    """The attention implementation asked for, and the key that says so
    (trl/scripts/sft.py::main[model_init_kwargs.update]).
    """
    kwargs = inline(values["model_init_kwargs"]) or {}
    key = "attn_implementation"
    name = values[key]
    if key in kwargs:
        name = kwargs[key]
        key = "model_init_kwargs"
    if not isinstance(name, str):
        return None, key
    return name.removeprefix("paged|"), key


def compiled(values: Values) -> bool:
    """Whether the model is compiled: a mode or a backend asks too
    (transformers/training_args.py::TrainingArguments.__post_init__[if (self.torch_compile_mode]).
    """
    named = values["torch_compile_backend"] is not None or values["torch_compile_mode"] is not None
    return bool(values["torch_compile"] or named)
