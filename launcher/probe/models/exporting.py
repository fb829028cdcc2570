"""Convert a checkpoint of OLMo-core's to a model for transformers, load it again, and compare.

Runs in the first rank after the training. Upstream's own scripts/train/convert_olmo_core_to_hf.py
takes a model on the hub and no folder: its functions are called here with the trained
configuration. Standard library alone until it is called.
"""

import os
from collections.abc import Callable
from typing import Any

ROWS = 2
POSITIONS = 64
WITHIN = 2e-3
"""How far logits may lie apart, as a share of their root mean square: rounding of 32 bits."""


class ExportFailed(Exception):
    """The model that was written is not the one that was trained."""


def export_olmo_core(settings: dict[str, Any], tell: Callable[..., None]) -> None:
    """Write the newest checkpoint below `output` to `into`, and compare the two.

    `model` and `tokenizer` of the settings have the config and tokenizer, `config_name` and
    `rope_scaling` the shape. `tell` gets the event `export`. Raises ExportFailed if the saved model
    gives other logits.
    """
    import torch
    import transformers
    from olmo_core.distributed import checkpoint as checkpoints
    from open_instruct import olmo_core_utils

    output = settings["output"]
    into = settings["into"]
    name = settings["model"]
    checkpoint = find_newest_checkpoint(output)
    if checkpoint is None:
        raise ExportFailed(f"there is no checkpoint in {output}")
    trusts_code = bool(settings.get("trusts_code"))
    vocabulary = transformers.AutoConfig.from_pretrained(
        name, trust_remote_code=trusts_code
    ).vocab_size
    shape = settings["config_name"] or name
    config = olmo_core_utils.get_transformer_config(shape, vocabulary, "torch")
    scaling = settings.get("rope_scaling")
    if scaling:
        config = config.with_rope_scaling(olmo_core_utils.YaRNRoPEScalingConfig(**scaling))
    trained = config.build(init_device="cpu")
    checkpoints.load_model_and_optim_state(find_weights(checkpoint), trained)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["tokenizer"] or name)
    olmo_core_utils.save_state_dict_as_hf(trained.state_dict(), into, name, tokenizer)
    saved = transformers.AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32)
    error = measure_difference(trained, saved, vocabulary)
    agrees = error <= WITHIN
    tell(
        "export",
        state="agrees" if agrees else "differs",
        path=into,
        checkpoint=checkpoint,
        error=error,
    )
    if not agrees:
        message = f"the weights in {into} give other logits than {checkpoint}: "
        raise ExportFailed(f"{message}{error:.2%} of their size apart, {WITHIN:.2%} is rounding")


def find_newest_checkpoint(output: str) -> str | None:
    """The checkpoint of the highest step."""
    newest_step = 0
    for name in os.listdir(output) if os.path.isdir(output) else ():
        number = name.removeprefix("step")
        if name.startswith("step") and number.isdecimal():
            newest_step = max(newest_step, int(number))
    return os.path.join(output, f"step{newest_step}") if newest_step else None


def find_weights(checkpoint: str) -> str:
    """The folder of a checkpoint of OLMo-core's trainer with its weights and moments."""
    inner = os.path.join(checkpoint, "model_and_optim")
    return inner if os.path.isdir(inner) else checkpoint


def measure_difference(trained: Any, saved: Any, vocabulary: int) -> float:
    """How far the logits lie apart, as a share of their size."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (ROWS, POSITIONS), generator=generator)
    with torch.no_grad():
        expected = trained.eval()(tokens).float()
        logits = saved.eval()(tokens).logits.float()
    size = _compute_root_mean_square(expected).clamp_min(1e-12)
    return float(_compute_root_mean_square(logits - expected) / size)


def _compute_root_mean_square(tensor: Any) -> Any:
    return tensor.square().mean().sqrt()
