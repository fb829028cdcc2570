"""Which checkpoints of an output folder can be resumed from, and which only look so."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import saved

from launcher.artifacts import checkpoints


def found(backend: str, output: Path, ranks: int | None = None) -> dict[str, str | None]:
    listed = checkpoints.find(backend, output, ranks=ranks)
    assert all(one.complete == (one.why_incomplete is None) for one in listed)
    return {one.name: one.why_incomplete for one in listed}


def test_the_newest_stands_last_and_other_names_are_left_alone(tmp_path: Path) -> None:
    for name in ("step_9", "step_10", "epoch_0"):
        saved.pinned(tmp_path, name)
    (tmp_path / "step_11").write_text("a file")
    (tmp_path / "checkpoint-3").mkdir()
    assert found("open_instruct", tmp_path) == {"epoch_0": None, "step_9": None, "step_10": None}
    assert list(found("trl", tmp_path)) == ["checkpoint-3"]
    assert checkpoints.find("trl", None) == []
    assert checkpoints.find("open_instruct", tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("model.safetensors", saved.cut), ("optimizer.bin", saved.cut),
        ("random_states_0.pkl", saved.cut), ("model.safetensors", Path.unlink),
        ("scheduler.bin", Path.unlink), ("random_states_1.pkl", Path.unlink),
        ("optimizer.bin", lambda path: path.write_bytes(bytes(500))),
        ("model.safetensors", lambda path: path.write_bytes(b"\xff" * 30)),
    ],
)  # fmt: skip
def test_a_mark_beside_a_half_written_file_is_not_believed(
    tmp_path: Path, file: str, spoil: Callable[[Path], object]
) -> None:
    folder = saved.pinned(tmp_path, "step_2", ranks=2)
    spoil(folder / file)
    assert found("open_instruct", tmp_path, ranks=2)["step_2"] is not None
    # upstream goes by its mark all the same
    assert checkpoints.taken_by_upstream("open_instruct", tmp_path) == folder


def test_a_step_is_complete_with_what_is_written_last(tmp_path: Path) -> None:
    whole, lacking, cut = (saved.engine(tmp_path, f"step_{n}", ranks=3) for n in (1, 2, 3))
    part = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    (lacking / "pytorch_model" / part.format(1)).unlink()
    saved.cut(cut / "pytorch_model" / part.format(2))
    told = found("open_instruct", tmp_path)
    assert told[whole.name] is None
    assert "rank 1" in str(told["step_2"]) and "cut off" in str(told["step_3"])


def test_transformers_writes_its_state_last(tmp_path: Path) -> None:
    saved.trl(tmp_path, 10)
    for step, file in ((20, "trainer_state.json"), (30, "optimizer.pt"), (40, "model.safetensors")):
        (saved.trl(tmp_path, step) / file).unlink()
    (saved.trl(tmp_path, 50) / "trainer_state.json").write_text('{"global_step": 5')
    saved.trl(tmp_path, 60, state={"global_step": 50})
    saved.cut(saved.trl(tmp_path, 70) / "rng_state.pth")
    told = found("trl", tmp_path)
    assert [name for name, why in told.items() if why is None] == ["checkpoint-10"]
    assert "optimizer.pt" in str(told["checkpoint-30"])


def test_sharded_weights_need_their_index_and_all_parts(tmp_path: Path) -> None:
    folder = saved.trl(tmp_path, 4)
    (folder / "model.safetensors").unlink()
    parts = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for part in parts:
        saved.tensors(folder / part)
    assert parts[0] in str(found("trl", tmp_path)["checkpoint-4"])
    index = {"metadata": {}, "weight_map": dict(zip("ab", parts, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert found("trl", tmp_path) == {"checkpoint-4": None}
    saved.cut(folder / parts[1], 0.9)
    assert "00002" in str(found("trl", tmp_path)["checkpoint-4"])


def test_fsdp_writes_its_metadata_last(tmp_path: Path) -> None:
    folder = saved.trl(tmp_path, 4, ranks=2)
    for file in ("model.safetensors", "optimizer.pt"):
        (folder / file).unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_bytes(b"x")
    assert "not finished" in str(found("trl", tmp_path)["checkpoint-4"])
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / name / ".metadata").write_bytes(b"x")
    assert found("trl", tmp_path) == {"checkpoint-4": None}


def test_a_first_half_written_step_hides_every_epoch_from_upstream(tmp_path: Path) -> None:
    epoch = saved.pinned(tmp_path, "epoch_1")
    assert checkpoints.taken_by_upstream("open_instruct", tmp_path) == epoch
    saved.pinned(tmp_path, "step_5", completed=False)
    assert checkpoints.taken_by_upstream("open_instruct", tmp_path) is None


def test_names_on_which_upstream_would_crash(tmp_path: Path) -> None:
    saved.pinned(tmp_path, "step_2")
    (tmp_path / "step_2_old").mkdir()
    assert checkpoints.strange_names("open_instruct", tmp_path) == ["step_2_old"]
    (tmp_path / "step_2_old" / "COMPLETED").write_text("")
    with pytest.raises(ValueError, match="old"):
        checkpoints.taken_by_upstream("open_instruct", tmp_path)
    assert checkpoints.strange_names("trl", tmp_path) == []


def test_what_makes_a_finished_model(tmp_path: Path) -> None:
    output = tmp_path / "model"
    assert checkpoints.model_fault(output) is not None
    saved.model(output)
    assert checkpoints.model_fault(output) is None
    saved.cut(output / "model.safetensors", 0.9)
    assert checkpoints.model_fault(output) == "model.safetensors is cut off"
    assert checkpoints.model_fault(None) is not None


def test_weights_without_values_are_none(tmp_path: Path) -> None:
    """As ZeRO-3 saves what it has not gathered."""
    header = {
        "__metadata__": {"format": "pt"},
        "norm": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "g_idx": {"dtype": "I32", "shape": [0], "data_offsets": [4, 4]},
    }
    assert saved_with(tmp_path / "quantised", header) is None
    header["proj"] = {"dtype": "BF16", "shape": [0], "data_offsets": [4, 4]}
    assert saved_with(tmp_path / "in parts", header) == (
        "1 of the 3 tensors in model.safetensors have no values, such as proj"
    )


def saved_with(folder: Path, header: dict[str, object]) -> str | None:
    folder.mkdir()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    (folder / "config.json").write_text("{}")
    assert checkpoints.damage(folder) == checkpoints.model_fault(folder)
    return checkpoints.damage(folder)
