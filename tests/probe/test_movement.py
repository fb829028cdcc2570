"""Which share of the weights moved: each element of the sample counts for a part of its tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_training import needs_packages

from launcher.probe.watching.model import PeakMemory
from launcher.probe.watching.optimizer import Movement, Optimizer
from launcher.probe.watching.process import Process, Settings

pytestmark = needs_packages

VOCABULARY = 2_000
USED = 40


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Train a small embedding and a layer; returns the record of what moved."""
    torch = pytest.importorskip("torch")

    def trained(*, dtype: str = "float32", rate: float = 1e-3) -> dict[str, Any]:
        torch.manual_seed(0)
        parts = {"embedding": torch.nn.Embedding(VOCABULARY, 32), "layer": torch.nn.Linear(32, 32)}
        model = torch.nn.ModuleDict(parts).to(getattr(torch, dtype))
        adam = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        process = Process(Settings("sft.py", str(tmp_path)))
        optimizer = Optimizer(process, PeakMemory(process))
        optimizer.saw(adam)
        movement = Movement(process, optimizer)
        for step in range(1, 5):
            ids = torch.randint(0, USED, (256,))
            model["layer"](model["embedding"](ids)).square().mean().backward()
            movement.begin()
            adam.step()
            adam.zero_grad()
            process.step = step
        movement.report()
        lines = (tmp_path / "rank-0.jsonl").read_text().splitlines()
        event: dict[str, Any] = json.loads(lines[-1])
        return event

    return trained


def test_rows_of_tokens_that_the_data_do_not_have_do_not_count(
    train: Callable[..., dict[str, Any]],
) -> None:
    event = train()
    assert event["unused"] == (VOCABULARY - USED) * 32
    assert event["moved"] + event["unused"] == event["sampled"]
    assert event["share"] == 1.0
    assert event["elements"] == USED * 32 + 32 * 32 + 32


def test_where_nothing_can_move_all_of_it_is_still(train: Callable[..., dict[str, Any]]) -> None:
    event = train(rate=0.0)
    assert (event["share"], event["moved"]) == (0.0, 0)


def test_a_bias_counts_for_no_more_than_it_has(
    train: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # of each tensor 32 elements: the bias is a third of the sample, and 0.05 % of the weights
    monkeypatch.setattr("launcher.probe.watching.optimizer.ELEMENTS", 96)
    event = train(dtype="bfloat16", rate=1e-7)
    assert event["sampled"] == 96
    assert event["share"] < 0.1
