"""open-instruct's SFT on OLMo-core (olmo_core_finetune.py): checked, planned, started by torchrun, judged."""

import array
import gzip
import importlib.util
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import DATA, REPOSITORY
from plans import built, from_text, planned

from launcher.artifacts import lengths
from launcher.config import load
from launcher.dataset import packed
from launcher.errors import Finding
from launcher.plan import footprint
from launcher.plan.memory import peak as memory
from launcher.probe.watching import packing as probe_packing
from launcher.rules import registry
from launcher.rules.context import Context, Split
from launcher.stage import stage as stages
from launcher.upstream import facts, locate
from launcher.upstream.locate import Locator
from launcher.upstream.scripts import olmo_core_finetune
from launcher.upstream.source.packages import Folder
from launcher.upstream.trainers import BACKENDS
from launcher.verdict import judge


@pytest.fixture(autouse=True)
def _of_the_pin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the committed snapshot, whatever checkout lies here."""
    monkeypatch.delenv("LAUNCH_OPEN_INSTRUCT", raising=False)
    monkeypatch.setattr(locate, "FOUND_IN", ())
    # torch sets it as it is imported
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


BASE = """
stage: sft
script: {script}
batch: {{global: 64, per_device: {per_device}}}
args:
  model_name_or_path: allenai/OLMo-2-1124-7B
  mixer_list: [set, "100000"]
  max_seq_length: 4096
  {args}
"""


def text(*args: str, script: str = "sft_olmo_core", per_device: int = 1) -> str:
    lines = "\n  ".join(args)
    written = BASE.format(script=script, args=lines, per_device=per_device)
    if "max_seq_length" in lines:
        written = written.replace("  max_seq_length: 4096\n", "", 1)
    return written


def findings(folder: Path, written: str) -> dict[tuple[str, str], Finding]:
    path = folder / "stage.yaml"
    path.write_text(written, encoding="utf-8")
    judged = stages.judge(load.load(path), locator=Locator(search=()))
    return {(one.code, one.key or ""): one for one in judged.findings}


@pytest.mark.parametrize(
    "script", ["sft_olmo_core", "olmo_core_finetune.py", "open_instruct/sft.py"]
)
def test_a_stage_file_names_the_script_as_it_is_called_or_will_be(
    tmp_path: Path, script: str
) -> None:
    stage = from_text(tmp_path, text(script=script))
    assert (stage.schema.script, stage.options.script) == (
        "open_instruct/olmo_core_finetune.py",
        "sft_olmo_core",
    )


@pytest.mark.parametrize("key", ["sft", "dpo", "sft_olmo_core"])
def test_the_file_decides_what_a_script_is_called(tmp_path: Path, key: str) -> None:
    """The announced name counts where a checkout has it: the old one then only points there."""
    entry = BACKENDS["open_instruct"].STAGES[key]
    trees = {"open_instruct": Folder(tmp_path / "open_instruct")}
    for name in (entry.script, entry.renamed):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
        assert facts.script_in(trees, entry) == name
    (tmp_path / "open_instruct/finetune.py").unlink(missing_ok=True)
    assert locate.state_of(tmp_path) == ("checkout" if key == "sft" else "other")


REFUSED = [
    ("lr_scheduler_type: polynomial", "scheduler-type", "lr_scheduler_type"),
    ("max_train_steps: 0", "out-of-range", "max_train_steps"),
    ("max_seq_length: 3000", "out-of-range", "max_seq_length"),
    ("keep_last_n_checkpoints: 0", "out-of-range", "keep_last_n_checkpoints"),
    ("ephemeral_save_interval: 600", "checkpoint-steps", "ephemeral_save_interval"),
    ("config_name: olmo2_1B", "other-shape", "config_name"),
    ("config_name: no_shape", "unsupported-model", "config_name"),
]
IGNORED = [
    ("fused_optimizer: false", "unread-key", "fused_optimizer"),
    ("target_columns: [input_ids]", "unread-key", "target_columns"),
    ("cp_strategy: ulysses", "conditional-key", "cp_strategy"),
    (
        "activation_memory_budget: 0.5\n  compile_model: false",
        "budget-without-compile",
        "activation_memory_budget",
    ),
    (
        "activation_memory_budget: 0.5\n  activation_checkpointing_mode: selected_modules",
        "conditional-key",
        "activation_memory_budget",
    ),
    ("rope_scaling_factor: 2.0", "rope-scaling", "rope_scaling_factor"),
]


@pytest.mark.parametrize(("line", "code", "key"), REFUSED)
def test_what_would_crash_is_an_error(tmp_path: Path, line: str, code: str, key: str) -> None:
    fault = findings(tmp_path, text(line)).get((code, f"args.{key}"))
    assert fault is not None and fault.severity == "error"


@pytest.mark.parametrize(("line", "code", "key"), IGNORED)
def test_what_does_nothing_is_a_warning(tmp_path: Path, line: str, code: str, key: str) -> None:
    fault = findings(tmp_path, text(line)).get((code, f"args.{key}"))
    assert fault is not None and fault.severity == "warning"


def test_a_clean_file_is_clean(tmp_path: Path) -> None:
    assert findings(tmp_path, text()) == {}


def test_the_arguments_of_finetune_are_named_by_their_new_names(tmp_path: Path) -> None:
    fault = findings(tmp_path, text("clip_grad_norm: 1.0"))["renamed-key", "args.clip_grad_norm"]
    assert "max_grad_norm" in fault.message + (fault.help or "")


def codes(folder: Path, written: str, **known: Any) -> set[str]:
    stage = from_text(folder, written)
    context = Context(values=stage.values, environ={}, gpus=8, **known)
    return {finding.code for finding in registry.apply_in(context)}


def test_packed_rows_need_flash_attention_on_gpus(tmp_path: Path) -> None:
    assert "packing-refused" in codes(tmp_path, text(), packages={})
    assert "packing-refused" not in codes(tmp_path, text(), packages={"flash-attn": "2.8"})
    assert "packing-refused" in codes(
        tmp_path, text("attn_implementation: torch"), packages={"flash-attn": "2.8"}
    )


def test_a_row_that_is_shared_by_gpus_is_one_row(tmp_path: Path) -> None:
    shared = text("cp_degree: 2", "cp_strategy: ulysses", per_device=1)
    packages = {"flash-attn": "2.8"}
    assert "context-parallel" not in codes(tmp_path, shared, packages=packages, per_device=1)
    assert "context-parallel" in codes(tmp_path, shared, packages=packages, per_device=2)
    ring = text("cp_degree: 2")
    assert "context-parallel" in codes(tmp_path, ring, packages=packages, per_device=1)
    three = text("cp_degree: 3", "cp_strategy: ulysses")
    split = Split(processes=8, devices=2)
    assert "context-parallel" in codes(
        tmp_path, three, packages=packages, per_device=1, split=split
    )


def test_temporary_checkpoints_fit_the_others(tmp_path: Path) -> None:
    """The script's own default of 250 is refused beside shorter intervals; one in the file is the file's."""
    short = planned(from_text(tmp_path, text("checkpointing_steps: 100")), gpus=8)
    assert short.arguments()["ephemeral_save_interval"] == ["0"]
    assert "ephemeral_save_interval" not in planned(from_text(tmp_path, text()), gpus=8).arguments()


def test_the_command_and_what_the_probe_is_told(tmp_path: Path) -> None:
    plan = planned(
        from_text(tmp_path, text("max_train_steps: 12", "rope_scaling_factor: 2.0")), gpus=2
    )
    command = built(plan)
    assert command.argv[1:6] == ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node")
    settings = json.loads(command.env["LAUNCH_PROBE"])
    assert (
        settings["expect"]["packing"] == "isolated"
        and settings["packed"]
        and settings["divides_loss"]
    )
    export = settings["export"]
    assert (export["function"], export["into"]) == ("export_olmo_core", "/run/model/hf_model")
    assert export["rope_scaling"]["factor"] == 2.0
    only_data = planned(from_text(tmp_path, text("cache_dataset_only: true")), gpus=2)
    assert "export" not in json.loads(built(only_data).env["LAUNCH_PROBE"])


def test_a_checkpoint_of_olmo_cores_own_is_not_exported(tmp_path: Path) -> None:
    own = tmp_path / "step100"
    own.mkdir()
    written = text("config_name: olmo2_7B").replace("allenai/OLMo-2-1124-7B", str(own))
    assert (
        findings(tmp_path, written)["no-hf-export", "args.model_name_or_path"].severity == "warning"
    )
    settings = json.loads(built(planned(from_text(tmp_path, written), gpus=2)).env["LAUNCH_PROBE"])
    assert "export" not in settings


# -- the rows that samples are packed into


def test_rows_are_packed_as_olmo_core_packs_them() -> None:
    utils = pytest.importorskip("olmo_core.data.utils")
    numpy = pytest.importorskip("numpy")
    for seed in range(30):
        chance = random.Random(seed)
        limit = chance.choice([16, 128, 1024])
        documents = [
            min(limit, max(1, int(chance.lognormvariate(chance.uniform(1, 5), 1))))
            for _ in range(900)
        ]
        ends = numpy.cumsum([0, *documents])
        places = numpy.stack([ends[:-1], ends[1:]], 1).astype(numpy.uint64)
        instances, _, _ = utils.InstancePacker(limit).pack_documents(places)
        assert packed.rows_of(Counter(documents), limit) == len(instances)


@pytest.mark.parametrize(
    ("documents", "rows"),
    [
        ([8], 1),
        ([4, 4], 1),
        ([5, 4, 3], 2),
        # three that fill one row are no more than one
        ([4, 2, 2], 1),
        # the longest first: 6 + 2, 5 + 3
        ([2, 3, 5, 6], 2),
        ([5, 5, 5], 3),
    ],
)
def test_best_fit_by_hand(documents: list[int], rows: int) -> None:
    assert packed.rows_of(Counter(documents), 8) == rows


def tokenised(folder: Path, samples: list[list[int]], **special: str) -> Path:
    """Tokens as upstream writes them: 16-bit numbers, a mask, the places of the samples."""
    (folder / "tokenizer").mkdir(parents=True)
    texts = {"</s>": 2, "<s>": 1}
    whole = {"added_tokens": [{"content": name, "id": number} for name, number in texts.items()]}
    (folder / "tokenizer/tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer/tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", **special})
    )
    tokens = array.array("H", [token for sample in samples for token in sample])
    (folder / "token_ids_part_0000.npy").write_bytes(tokens.tobytes())
    (folder / "labels_mask_part_0000.npy").write_bytes(bytes(len(tokens)))
    with gzip.open(folder / "token_ids_part_0000.csv.gz", "wt") as lines:
        lines.writelines("0,1\n" for _ in samples)
    return folder


def test_samples_that_olmo_core_cuts_are_counted(tmp_path: Path) -> None:
    """A document ends at the token that ends a text: one inside of a conversation cuts it."""
    whole = [[5, 6, 7, 2], [5, 6, 2]]
    turns = [[5, 2, 7, 2], [5, 6, 2]]
    read = {"limit": 8, "tokenizer": "org/model"}
    assert packed.read(tokenised(tmp_path / "a", whole), **read) == packed.PackedRows(
        samples=2, documents=2, rows=1
    )
    cut = packed.read(tokenised(tmp_path / "b", turns), **read)
    assert cut == packed.PackedRows(samples=2, documents=3, rows=1)
    # where a text has to begin with a token of its own, the same rows are whole
    begun = [[1, 5, 2, 7, 2], [1, 6, 2]]
    assert packed.read(
        tokenised(tmp_path / "c", begun, bos_token="<s>"), **read
    ) == packed.PackedRows(samples=2, documents=2, rows=1)


def test_what_lies_in_the_cache_is_complete_as_the_script_sees_it(tmp_path: Path) -> None:
    folder = tokenised(tmp_path / "numpy", [[5, 2]])
    phase = olmo_core_finetune.SCRIPT.tokenising
    assert phase is not None and phase.is_complete(folder)
    (folder / "labels_mask_part_0000.npy").unlink()
    assert not phase.is_complete(folder) and not phase.is_complete(tmp_path / "nowhere")


def test_steps_are_counted_in_packed_rows(tmp_path: Path) -> None:
    """One row fits about six samples of 700 tokens; what does not fill a step is left out, in each epoch."""
    plan = planned(from_text(tmp_path, text("num_epochs: 2")), gpus=8)
    assert plan.steps is None
    data = lengths.uniform(700, "test", 100_000)
    # 100,000 x 700 / 4,096 rows, 64 a step
    rows = footprint.rows_per_epoch(plan, data, 100_000)
    assert rows == 17_090 and footprint.optimizer_steps(plan, rows, data) == 2 * (17_090 // 64)


MEMORY = [
    ((), 1.0),
    (("activation_memory_budget: 0.5",), 0.75),
    (("activation_checkpointing_mode: selected_modules",), 0.5),
]


def test_checkpointing_and_context_parallel_are_planned(tmp_path: Path) -> None:
    def activations(*args: str) -> float:
        plan = planned(from_text(tmp_path, text(*args)), gpus=8)
        shape = footprint.shape_of(plan)
        rows = footprint.rows_of(plan, lengths.parse("700:4096"))
        setup = footprint.Footprint(plan=plan, shape=shape, rows=rows, attention="flash_2").setup()
        return memory.estimate(setup).of("activations")

    whole = activations()
    for args, share in MEMORY:
        assert activations(*args) <= share * whole
    assert activations("cp_degree: 2", "cp_strategy: ulysses") < 0.6 * whole


def test_the_optimizer_s_step_is_the_fullest_moment_of_a_large_share(tmp_path: Path) -> None:
    """Two H200 held OLMo-2-7B at 95.37 GiB (docs/evidence/h200x4.md)."""
    args = ("activation_checkpointing_mode: selected_modules", "compile_model: true")
    plan = planned(from_text(tmp_path, text(*args)), gpus=2)
    shape = footprint.shape_of(plan)
    rows = footprint.rows_of(plan, lengths.parse("290:1100"))
    setup = footprint.Footprint(plan=plan, shape=shape, rows=rows, attention="flash_2").setup()
    estimate = memory.estimate(setup)
    assert estimate.fullest.name == "optimizer's step"
    assert estimate.peak == pytest.approx(95.37, rel=0.02)


# -- inside the training


def test_a_batch_that_is_facts_by_lengths_is_read_like_any_other() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[5, 6, 2, 7, 8, 2, 9, 9]])
    labels = torch.tensor([[-100, 2, -100, 8, 2, -100, -100, -100]])
    kwargs = {"doc_lens": torch.tensor([[3, 3, 2]]), "max_doc_lens": [3], "labels": labels}
    known = probe_packing.facts_by_lengths(ids, kwargs)
    # OLMo-core's labels are those of the token behind; its padding is a document
    assert known["labels"].tolist() == [[-100, -100, 2, -100, 8, 2, -100, -100]]
    assert known["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert probe_packing.facts_by_lengths(ids, {"labels": labels}) == {}


def test_documents_are_kept_apart_on_a_cpu() -> None:
    """The stand-in for flash-attn: each document as if it stood alone, and the probe says that it was used."""
    torch = pytest.importorskip("torch")
    backend = pytest.importorskip("olmo_core.nn.attention.backend")
    from launcher.probe.watching import supplies

    class Log:
        def __init__(self) -> None:
            self.said: list[str] = []

        def supply(self, what: str, _why: str) -> None:
            self.said.append(what)

    log = Log()

    module = ModuleType("made")
    module.TorchAttentionBackend = type("Made", (backend.TorchAttentionBackend,), {})  # type: ignore[attr-defined]
    module.TorchAttentionBackend.forward = backend.TorchAttentionBackend.forward  # type: ignore[attr-defined]
    supplies.supply_documents(log, module)  # type: ignore[arg-type]
    attention = module.TorchAttentionBackend(head_dim=4, n_heads=4, n_kv_heads=2)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    parts = torch.randn(2, 6, 4, 4), torch.randn(2, 6, 2, 4), torch.randn(2, 6, 2, 4)
    ends = torch.tensor([0, 2, 6, 9, 12])
    together = attention.forward(parts, cu_doc_lens=ends, max_doc_len=4)
    for row, (begin, end) in ((0, (0, 2)), (0, (2, 6)), (1, (0, 3)), (1, (3, 6))):
        alone = attention.forward(tuple(part[row : row + 1, begin:end] for part in parts))
        torch.testing.assert_close(together[row : row + 1, begin:end], alone)
    assert log.said[0] == "documents"


def exporting() -> ModuleType:
    path = REPOSITORY / "launcher/probe/models/exporting.py"
    spec = importlib.util.spec_from_file_location("exporting", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_weights_that_were_written_wrongly_are_told_by_their_logits() -> None:
    torch = pytest.importorskip("torch")

    class Trained(torch.nn.Embedding):  # type: ignore[misc, name-defined]
        pass

    class Saved(torch.nn.Embedding):  # type: ignore[misc, name-defined]
        def forward(self, tokens: Any) -> Any:
            return type("Output", (), {"logits": super().forward(tokens)})

    torch.manual_seed(0)
    trained, saved = Trained(16, 16), Saved(16, 16)
    saved.load_state_dict(trained.state_dict())
    assert exporting().compare(trained, saved, 16) == 0.0
    with torch.no_grad():
        # as where two of its rows were exchanged
        saved.weight[[3, 4]] = saved.weight[[4, 3]]
    assert exporting().compare(trained, saved, 16) > exporting().WITHIN


def test_the_newest_checkpoint_is_exported(tmp_path: Path) -> None:
    for name in ("step0", "step9", "step12", "step12-tmp", "hf_model"):
        (tmp_path / name).mkdir()
    assert exporting().newest(str(tmp_path)) == str(tmp_path / "step12")
    assert exporting().newest(str(tmp_path / "step0")) is None


def test_a_trial_saves_no_state(tmp_path: Path) -> None:
    class CheckpointerCallback:
        step, saved = 3, 0

        def _save_checkpoint(self, save_async: bool = False) -> str:
            self.saved += 1
            return "step3"

        def _remove_checkpoint(self, path: str) -> None:
            raise AssertionError(path)

    from launcher.probe.watching import Probe, trainers

    for final_save, saved in ((True, 1), (False, 0)):
        made = type("Made", (CheckpointerCallback,), dict(vars(CheckpointerCallback)))
        module = ModuleType("made")
        module.CheckpointerCallback = made  # type: ignore[attr-defined]
        probe = Probe({"target": "train.py", "out": str(tmp_path), "final_save": final_save})
        trainers.watch_olmo_checkpoints(probe, module)
        callback = made()
        callback._save_checkpoint()
        assert callback.saved == saved
        if not final_save:
            # what was not saved is not removed either
            callback._remove_checkpoint("step3")


# -- the verdict


def test_a_recorded_run_passes_and_names_its_stand_in(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(DATA / "run_sft_olmo_core", run)
    verdict = judge.judge_run(judge.RunFolder(run)).verdict
    points = {point.name: point for point in verdict.points}
    assert verdict.status == "pass"
    assert points["packing"].state == "isolated"
    assert "flash-attn needs a GPU" in str(points["packing"].detail["stand_in"])
    assert (points["batch"].state, points["dataset_cache"].state) == ("planned", "miss")
    assert points["finish"].state == "completed"
