"""Which checkpoints of an output folder can be resumed from, and which only look so."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import saved

from launcher.artifacts import checkpoints


def find_faults(backend: str, output: Path, ranks: int | None = None) -> dict[str, str | None]:
    """Why each checkpoint is incomplete, by its name; None if it is whole."""
    faults = {}
    for checkpoint in checkpoints.find(backend, output, ranks=ranks):
        assert checkpoint.complete == (checkpoint.why_incomplete is None)
        faults[checkpoint.name] = checkpoint.why_incomplete
    return faults


def test_the_newest_stands_last_and_other_names_are_left_alone(tmp_path: Path) -> None:
    for name in ("step_9", "step_10", "epoch_0"):
        saved.pinned(tmp_path, name)
    (tmp_path / "step_11").write_text("a file")
    (tmp_path / "checkpoint-3").mkdir()
    assert list(find_faults("open_instruct", tmp_path)) == ["epoch_0", "step_9", "step_10"]
    assert list(find_faults("trl", tmp_path)) == ["checkpoint-3"]
    assert checkpoints.find("trl", None) == []
    assert checkpoints.find("open_instruct", tmp_path / "nothing") == []


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(500))


def fill_with_ones(path: Path) -> None:
    path.write_bytes(b"\xff" * 30)


@pytest.mark.parametrize(
    "file, spoil",
    [
        ("model.safetensors", saved.cut),
        ("model.safetensors", Path.unlink),
        ("model.safetensors", fill_with_ones),
        ("optimizer.bin", saved.cut),
        ("optimizer.bin", fill_with_zeros),
        ("scheduler.bin", Path.unlink),
        ("random_states_0.pkl", saved.cut),
        ("random_states_1.pkl", Path.unlink),
    ],
)
def test_a_mark_beside_a_half_written_file_is_not_believed(
    tmp_path: Path, file: str, spoil: Callable[[Path], object]
) -> None:
    folder = saved.pinned(tmp_path, "step_2", ranks=2)
    assert find_faults("open_instruct", tmp_path, ranks=2) == {"step_2": None}
    spoil(folder / file)
    assert find_faults("open_instruct", tmp_path, ranks=2)["step_2"] is not None
    # upstream goes by its mark all the same
    assert checkpoints.find_upstream_resume("open_instruct", tmp_path) == folder


def test_an_engine_needs_the_states_of_every_rank(tmp_path: Path) -> None:
    states = "pytorch_model/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    saved.engine(tmp_path, "step_1", ranks=3)
    lacking = saved.engine(tmp_path, "step_2", ranks=3)
    (lacking / states.format(1)).unlink()
    cut = saved.engine(tmp_path, "step_3", ranks=3)
    saved.cut(cut / states.format(2))
    faults = find_faults("open_instruct", tmp_path)
    assert faults["step_1"] is None
    assert "rank 1" in str(faults["step_2"])
    assert "cut off" in str(faults["step_3"])


def test_transformers_writes_its_state_last(tmp_path: Path) -> None:
    saved.trl(tmp_path, 10)
    for step, file in ((20, "trainer_state.json"), (30, "optimizer.pt"), (40, "model.safetensors")):
        checkpoint = saved.trl(tmp_path, step)
        (checkpoint / file).unlink()
    half_written = saved.trl(tmp_path, 50)
    (half_written / "trainer_state.json").write_text('{"global_step": 5')
    saved.trl(tmp_path, 60, state={"global_step": 50})
    cut = saved.trl(tmp_path, 70)
    saved.cut(cut / "rng_state.pth")

    faults = find_faults("trl", tmp_path)

    assert faults.pop("checkpoint-10") is None
    assert len(faults) == 6
    assert None not in faults.values()
    assert "optimizer.pt" in str(faults["checkpoint-30"])


def find_fault(output: Path) -> str | None:
    """The fault of the one checkpoint of TRL."""
    (fault,) = find_faults("trl", output).values()
    return fault


def test_sharded_weights_need_their_index_and_all_parts(tmp_path: Path) -> None:
    folder = saved.trl(tmp_path, 4)
    (folder / "model.safetensors").unlink()
    first = "model-00001-of-00002.safetensors"
    second = "model-00002-of-00002.safetensors"
    saved.tensors(folder / first)
    saved.tensors(folder / second)
    assert first in str(find_fault(tmp_path))
    index = {"metadata": {}, "weight_map": {"a": first, "b": second}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_fault(tmp_path) is None
    saved.cut(folder / second, 0.9)
    assert "00002" in str(find_fault(tmp_path))


def test_fsdp_writes_its_metadata_last(tmp_path: Path) -> None:
    folder = saved.trl(tmp_path, 4, ranks=2)
    (folder / "model.safetensors").unlink()
    (folder / "optimizer.pt").unlink()
    parts = (folder / "pytorch_model_fsdp_0", folder / "optimizer_0")
    for part in parts:
        part.mkdir()
        (part / "__0_0.distcp").write_bytes(b"x")
    assert "not finished" in str(find_fault(tmp_path))
    for part in parts:
        (part / ".metadata").write_bytes(b"x")
    assert find_fault(tmp_path) is None


def test_a_first_half_written_step_hides_every_epoch_from_upstream(tmp_path: Path) -> None:
    epoch = saved.pinned(tmp_path, "epoch_1")
    assert checkpoints.find_upstream_resume("open_instruct", tmp_path) == epoch
    saved.pinned(tmp_path, "step_5", completed=False)
    assert checkpoints.find_upstream_resume("open_instruct", tmp_path) is None


def test_names_on_which_upstream_would_crash(tmp_path: Path) -> None:
    saved.pinned(tmp_path, "step_2")
    (tmp_path / "step_2_old").mkdir()
    assert checkpoints.list_strange_names("open_instruct", tmp_path) == ["step_2_old"]
    assert checkpoints.list_strange_names("trl", tmp_path) == []
    (tmp_path / "step_2_old" / "COMPLETED").touch()
    with pytest.raises(ValueError, match="old"):
        checkpoints.find_upstream_resume("open_instruct", tmp_path)


def test_what_makes_a_finished_model(tmp_path: Path) -> None:
    output = tmp_path / "model"
    assert checkpoints.find_model_fault(output) is not None
    assert checkpoints.find_model_fault(None) is not None
    saved.model(output)
    assert checkpoints.find_model_fault(output) is None
    saved.cut(output / "model.safetensors", 0.9)
    assert checkpoints.find_model_fault(output) == "model.safetensors is cut off"


def write_header(folder: Path, header: dict[str, object]) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))


def test_weights_without_values_are_none(tmp_path: Path) -> None:
    """As ZeRO-3 saves what it has not gathered."""
    (tmp_path / "config.json").write_text("{}")
    header: dict[str, object] = {
        "__metadata__": {"format": "pt"},
        "norm": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        # quantised weights have this
        "g_idx": {"dtype": "I32", "shape": [0], "data_offsets": [4, 4]},
    }
    write_header(tmp_path, header)
    assert checkpoints.find_damage(tmp_path) is None
    header["proj"] = {"dtype": "BF16", "shape": [0], "data_offsets": [4, 4]}
    write_header(tmp_path, header)
    damage = "1 of the 3 tensors in model.safetensors have no values, such as proj"
    assert checkpoints.find_damage(tmp_path) == damage
    assert checkpoints.find_model_fault(tmp_path) == damage
