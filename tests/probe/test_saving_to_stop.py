"""All ranks save after the same step, whichever of them hears of the request, and whenever."""

import importlib.util
import json
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

SCRIPT = REPOSITORY / "launcher" / "probe" / "run.py"


@pytest.fixture(scope="module")
def watching() -> Any:
    """The probe's pieces, as the script in every training process loads them."""
    spec = importlib.util.spec_from_file_location("probe_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_package()


class Store:
    """A key-value store as torch.distributed has one."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def probe_of(watching: Any, out: Path, rank: int = 0, world: int = 1) -> Any:
    probe = watching.Probe({"target": "train.py", "out": str(out)})
    probe.process.rank = rank
    probe.process.world = world
    return probe


def ranks_of(watching: Any, patch: pytest.MonkeyPatch, *outs: Path) -> list[Any]:
    """The pieces of ranks that meet at one store, each with its folder."""
    ranks = []
    for rank, out in enumerate(outs):
        ranks.append(probe_of(watching, out, rank, len(outs)).preemption)
    store = Store()
    module = sys.modules[type(ranks[0]).__module__]
    patch.setattr(module, "find_store", lambda: store)
    return ranks


def request_save(out: Path) -> None:
    out.mkdir(exist_ok=True)
    (out / "save.json").write_text(json.dumps({"attempt": 1}))


def test_ranks_that_are_not_at_the_same_step_agree_on_one_that_none_has_passed(
    watching: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = [tmp_path / f"rank{rank}" for rank in range(3)]
    ranks = ranks_of(watching, monkeypatch, *outs)
    for rank, step in zip(ranks, (5, 6, 0), strict=True):
        assert not rank.has_reached(step)
    # one machine alone has the request
    request_save(outs[2])
    for rank in reversed(ranks):
        rank.look()
    for rank in ranks:
        assert rank.look()
        assert rank.agreed == 7
        assert not rank.has_reached(6)
        assert rank.has_reached(7)


def test_a_rank_waits_at_the_step_that_it_named_until_all_have(
    watching: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_save(tmp_path)
    first, second = ranks_of(watching, monkeypatch, tmp_path, tmp_path)
    first.has_reached(3)
    assert not first.look(), "nobody else has named a step"
    second.has_reached(4)

    passed: list[bool] = []
    waiting = threading.Thread(target=lambda: passed.append(first.has_reached(4)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "it may not go on alone"

    assert second.look()
    assert first.look()
    waiting.join(10)
    assert passed == [False]
    assert first.has_reached(5)
    assert second.has_reached(5)


@pytest.mark.parametrize("content", ['{"attempt": 2}', "{", "[]", "null", '{"attempt": "1"}'])
def test_a_request_of_another_attempt_or_a_torn_one_is_none(
    watching: Any, tmp_path: Path, content: str
) -> None:
    (tmp_path / "save.json").write_text(content)
    rank = probe_of(watching, tmp_path).preemption
    assert not rank.look()
    assert not rank.has_reached(1)


def test_olmo_core_cancels_its_run_and_saves_before_it_ends(watching: Any, tmp_path: Path) -> None:
    """Its trainer saves when a run is cancelled (callbacks/checkpointer.py: post_train)."""

    class Trainer:
        save_folder = "out"
        checkpointer = types.SimpleNamespace(checkpoint_dirname=lambda step: f"step{step}")
        global_step = 0
        cancelled = False
        saved: int | None = None

        @property
        def training_complete(self) -> bool:
            return self.cancelled or self.global_step >= 9

        def cancel_run(self, reason: str, no_sync: bool = False) -> None:
            assert no_sync, "all ranks do it"
            self.cancelled = True

        def fit(self) -> None:
            while not self.training_complete:
                probe.process.step += 1
                self.global_step += 1
                if self.global_step == 4:
                    request_save(tmp_path)
                    probe.preemption.look()
            self.saved = self.global_step

    probe = probe_of(watching, tmp_path)
    trainers = sys.modules[f"{watching.__name__}.trainers"]
    trainers.watch_olmo_trainer(probe, types.SimpleNamespace(Trainer=Trainer))
    trainer = Trainer()
    with pytest.raises(SystemExit) as end:
        trainer.fit()
    assert (end.value.code, trainer.saved) == (0, 4)
    answer = json.loads((tmp_path / "saved.json").read_text())
    assert (answer["step"], Path(answer["path"]).name) == (4, "step4")
