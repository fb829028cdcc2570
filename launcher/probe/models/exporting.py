"""A checkpoint of OLMo-core's -> the same model for transformers, saved, loaded again, and compared.

Runs in the first rank of a training that is over, after upstream's script. Upstream's own
scripts/train/convert_olmo_core_to_hf.py takes the name of a model on the hub and no folder: its functions are called
here with the configuration that was trained. Standard library alone until it is called.
"""

import os
from collections.abc import Callable
from typing import Any

ROWS = 2
POSITIONS = 64
WITHIN = 2e-3
"""How far logits may lie apart, as a share of the root mean square of all: rounding of 32 bits, layer by layer."""


class ExportFailed(Exception):
    """The model that was written is not the one that was trained."""


def export_olmo_core(settings: dict[str, Any], tell: Callable[..., None]) -> None:
    """Write the newest checkpoint below `output` to `into`, and compare the two.

    `settings` names the model whose config and tokenizer hold (`model`, `tokenizer`), its shape (`config_name`), and
    the scaling of its rotary embedding (`rope_scaling`). `tell` gets the event `export`. Raises ExportFailed where
    the logits of the saved model are other ones.
    """
    import torch
    import transformers
    from olmo_core.distributed import checkpoint as checkpoints
    from open_instruct import olmo_core_utils

    checkpoint = newest(settings["output"])
    if checkpoint is None:
        raise ExportFailed(f"there is no checkpoint in {settings['output']}")
    name = settings["model"]
    described = transformers.AutoConfig.from_pretrained(name, trust_remote_code=bool(settings.get("trusts_code")))
    config = olmo_core_utils.get_transformer_config(settings["config_name"] or name, described.vocab_size, "torch")
    if settings.get("rope_scaling"):
        config = config.with_rope_scaling(olmo_core_utils.YaRNRoPEScalingConfig(**settings["rope_scaling"]))
    trained = config.build(init_device="cpu")
    checkpoints.load_model_and_optim_state(weights_of(checkpoint), trained)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["tokenizer"] or name)
    olmo_core_utils.save_state_dict_as_hf(trained.state_dict(), settings["into"], name, tokenizer)
    saved = transformers.AutoModelForCausalLM.from_pretrained(settings["into"], dtype=torch.float32)
    error, same = compare(trained, saved, described.vocab_size)
    state = "agrees" if error <= WITHIN else "differs"
    tell("export", state=state, path=settings["into"], checkpoint=checkpoint, error=error, same_choice=same)
    if state == "differs":
        message = f"the weights in {settings['into']} give other logits than {checkpoint}: "
        raise ExportFailed(f"{message}{error:.2%} of their size apart, {WITHIN:.2%} is rounding")


def newest(output: str) -> str | None:
    """The checkpoint of the highest step."""
    steps = []
    for name in os.listdir(output) if os.path.isdir(output) else []:
        number = name.removeprefix("step")
        if name.startswith("step") and number.isdecimal() and int(number):
            steps.append(int(number))
    return os.path.join(output, f"step{max(steps)}") if steps else None


def weights_of(checkpoint: str) -> str:
    """Where a checkpoint of OLMo-core's trainer keeps weights and moments."""
    below = os.path.join(checkpoint, "model_and_optim")
    return below if os.path.isdir(below) else checkpoint


def compare(trained: Any, saved: Any, vocabulary: int) -> tuple[float, float]:
    """How far the logits lie apart over the same tokens, as a share of their size, and how often both choose alike."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (ROWS, POSITIONS), generator=generator)
    with torch.no_grad():
        expected = trained.eval()(tokens).float()
        found = saved.eval()(tokens).logits.float()
    size = expected.square().mean().sqrt().clamp_min(1e-12)
    error = ((found - expected).square().mean().sqrt() / size).item()
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    return error, same
