"""The isolation test of the probe on a model of OLMo-core's, as its train module calls it."""

import math
from typing import Any

import pytest

from launcher.probe.watching import packing
from launcher.probe.watching.hooks import Call

VOCABULARY = 50
TOKENS_OF_BATCH = 10_000


def small_model() -> Any:
    torch = pytest.importorskip("torch")
    transformer = pytest.importorskip("olmo_core.nn.transformer")
    torch.manual_seed(0)
    config = transformer.TransformerConfig.llama_like(
        d_model=16, vocab_size=VOCABULARY, n_layers=1, n_heads=2
    )
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"))
    return model


@pytest.mark.slow
def test_the_loss_of_the_pair_is_a_mean_over_its_own_tokens() -> None:
    torch = pytest.importorskip("torch")
    model = small_model()
    ids = torch.randint(0, VOCABULARY, (1, 12))
    arguments = {
        "labels": torch.roll(ids, -1, dims=1),
        "ignore_index": -100,
        "loss_reduction": "sum",
        "loss_div_factor": torch.tensor(float(TOKENS_OF_BATCH)),
        "return_logits": False,
    }
    # two documents; the model itself gets them as one row, since attention here knows no documents
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]])
    batch = packing.TokenBatch(ids, positions=positions)

    pair = packing.cut_two_samples(Call((model,), arguments), batch)
    assert pair is not None
    loss, changed_loss = packing.measure_leak(model, pair)

    # random weights know nothing: a token costs about the logarithm of the vocabulary's size
    assert loss == pytest.approx(math.log(VOCABULARY), rel=0.2)
    # without documents the second sample sees the first
    assert changed_loss != loss
