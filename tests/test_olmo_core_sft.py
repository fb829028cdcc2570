"""open-instruct's SFT on OLMo-core (olmo_core_finetune.py): checked, planned, started, judged."""

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
from plans import build_command, from_text, judge_text, make_plan

from launcher.artifacts import lengths
from launcher.dataset import packed
from launcher.dataset.packed import PackedRows
from launcher.plan import footprint
from launcher.plan.memory import peak as memory
from launcher.plan.memory.phases import Memory
from launcher.plan.plan import Plan
from launcher.probe.watching import packing as probe_packing
from launcher.rules import registry
from launcher.rules.context import Context, Split
from launcher.upstream import facts, locate
from launcher.upstream.scripts import olmo_core_finetune
from launcher.upstream.source.packages import Folder
from launcher.upstream.trainers import BACKENDS
from launcher.verdict import judge

FLASH = {"flash-attn": "2.8"}
STAGE_FILE = """
stage: sft
script: {script}
batch: {{global: 64, per_device: 1}}
args:
  model_name_or_path: allenai/OLMo-2-1124-7B
  mixer_list: [set, "100000"]
  {args}
"""


@pytest.fixture(autouse=True)
def _committed_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use the committed snapshot, whatever checkout is on this machine."""
    monkeypatch.delenv("LAUNCH_OPEN_INSTRUCT", raising=False)
    monkeypatch.setattr(locate, "FOUND_IN", ())
    # torch sets it as it is imported
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def write_stage(*args: str, script: str = "sft_olmo_core") -> str:
    lines = "\n  ".join(args)
    if "max_seq_length" not in lines:
        lines += "\n  max_seq_length: 4096"
    return STAGE_FILE.format(script=script, args=lines)


def plan_text(folder: Path, text: str, gpus: int = 8) -> Plan:
    return make_plan(from_text(folder, text), gpus=gpus)


def probe_settings(plan: Plan) -> Any:
    return json.loads(build_command(plan).env["LAUNCH_PROBE"])


def memory_of(plan: Plan, rows: str) -> Memory:
    shape = footprint.find_model_shape(plan)
    packed_rows = footprint.measure_trained_rows(plan, lengths.parse(rows))
    of_plan = footprint.Footprint(plan=plan, shape=shape, rows=packed_rows, attention="flash_2")
    return memory.estimate(of_plan.setup())


@pytest.mark.parametrize(
    "script", ["sft_olmo_core", "olmo_core_finetune.py", "open_instruct/sft.py"]
)
def test_a_stage_file_names_the_script_by_its_present_or_announced_name(
    tmp_path: Path, script: str
) -> None:
    stage = from_text(tmp_path, write_stage(script=script))
    assert stage.schema.script == "open_instruct/olmo_core_finetune.py"
    assert stage.options.script == "sft_olmo_core"


@pytest.mark.parametrize("key", ["sft", "sft_olmo_core"])
def test_a_checkout_decides_what_a_script_is_called(tmp_path: Path, key: str) -> None:
    """The announced name counts where a checkout has it: the old one then only points there."""
    entry = BACKENDS["open_instruct"].STAGES[key]
    trees = {"open_instruct": Folder(tmp_path / "open_instruct")}
    for name in (entry.script, entry.renamed):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        assert facts.find_script(trees, entry) == name
    (tmp_path / "open_instruct/finetune.py").unlink(missing_ok=True)
    state = "checkout" if key == "sft" else "other"
    assert locate.examine_place(tmp_path) == state


@pytest.mark.parametrize(
    ("lines", "code", "severity"),
    [
        ("lr_scheduler_type: polynomial", "scheduler-type", "error"),
        ("max_train_steps: 0", "out-of-range", "error"),
        ("max_seq_length: 3000", "out-of-range", "error"),
        ("keep_last_n_checkpoints: 0", "out-of-range", "error"),
        ("ephemeral_save_interval: 600", "checkpoint-steps", "error"),
        ("config_name: olmo2_1B", "other-shape", "error"),
        ("config_name: no_shape", "unsupported-model", "error"),
        ("fused_optimizer: false", "unread-key", "warning"),
        ("target_columns: [input_ids]", "unread-key", "warning"),
        ("cp_strategy: ulysses", "conditional-key", "warning"),
        (
            "activation_memory_budget: 0.5\n  compile_model: false",
            "budget-without-compile",
            "warning",
        ),
        (
            "activation_memory_budget: 0.5\n  activation_checkpointing_mode: selected_modules",
            "conditional-key",
            "warning",
        ),
        ("rope_scaling_factor: 2.0", "rope-scaling", "warning"),
    ],
)
def test_what_would_crash_is_an_error_and_what_does_nothing_a_warning(
    tmp_path: Path, lines: str, code: str, severity: str
) -> None:
    key = lines.partition(":")[0]
    finding = judge_text(tmp_path, write_stage(lines))[code, f"args.{key}"]
    assert finding.severity == severity


def test_a_correct_file_has_no_findings(tmp_path: Path) -> None:
    assert judge_text(tmp_path, write_stage()) == {}


def test_an_argument_of_finetune_is_named_by_its_new_name(tmp_path: Path) -> None:
    findings = judge_text(tmp_path, write_stage("clip_grad_norm: 1.0"))
    finding = findings["renamed-key", "args.clip_grad_norm"]
    assert "max_grad_norm" in f"{finding.message} {finding.help}"


def context_codes(folder: Path, text: str, **known: Any) -> set[str]:
    stage = from_text(folder, text)
    context = Context(values=stage.values, environ={}, gpus=8, **known)
    return {finding.code for finding in registry.apply_in(context)}


@pytest.mark.parametrize(
    ("args", "packages", "is_refused"),
    [((), {}, True), ((), FLASH, False), (("attn_implementation: torch",), FLASH, True)],
    ids=["not installed", "installed", "another one"],
)
def test_packed_rows_need_flash_attention_on_gpus(
    tmp_path: Path, args: tuple[str, ...], packages: dict[str, str], is_refused: bool
) -> None:
    codes = context_codes(tmp_path, write_stage(*args), packages=packages)
    assert ("packing-refused" in codes) is is_refused


@pytest.mark.parametrize(
    ("args", "per_device", "split", "is_refused"),
    [
        (("cp_degree: 2", "cp_strategy: ulysses"), 1, None, False),
        (("cp_degree: 2", "cp_strategy: ulysses"), 2, None, True),
        (("cp_degree: 2",), 1, None, True),
        (("cp_degree: 3", "cp_strategy: ulysses"), 1, Split(processes=8, devices=2), True),
    ],
    ids=["one row", "two rows", "ring", "3 of 8 GPUs"],
)
def test_gpus_share_one_row(
    tmp_path: Path, args: tuple[str, ...], per_device: int, split: Split | None, is_refused: bool
) -> None:
    codes = context_codes(
        tmp_path, write_stage(*args), packages=FLASH, per_device=per_device, split=split
    )
    assert ("context-parallel" in codes) is is_refused


def test_temporary_checkpoints_fit_the_others(tmp_path: Path) -> None:
    """The script refuses its own default of 250 beside shorter intervals."""
    short = plan_text(tmp_path, write_stage("checkpointing_steps: 100"))
    assert short.arguments()["ephemeral_save_interval"] == ["0"]
    assert "ephemeral_save_interval" not in plan_text(tmp_path, write_stage()).arguments()


def test_torchrun_starts_it_and_the_probe_knows_what_to_expect(tmp_path: Path) -> None:
    plan = plan_text(tmp_path, write_stage("max_train_steps: 12", "rope_scaling_factor: 2.0"))
    argv = build_command(plan).argv
    assert argv[1:6] == ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node")
    settings = probe_settings(plan)
    assert settings["expect"]["packing"] == "isolated"
    assert settings["packed"]
    assert settings["divides_loss"]
    export = settings["export"]
    assert (export["function"], export["into"]) == ("export_olmo_core", "/run/model/hf_model")
    assert export["rope_scaling"]["factor"] == 2.0


def test_nothing_is_exported_where_only_data_are_tokenised(tmp_path: Path) -> None:
    plan = plan_text(tmp_path, write_stage("cache_dataset_only: true"))
    assert "export" not in probe_settings(plan)


def test_a_checkpoint_of_olmo_core_is_not_exported(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step100"
    checkpoint.mkdir()
    text = write_stage("config_name: olmo2_7B").replace("allenai/OLMo-2-1124-7B", str(checkpoint))
    finding = judge_text(tmp_path, text)["no-hf-export", "args.model_name_or_path"]
    assert finding.severity == "warning"
    assert "export" not in probe_settings(plan_text(tmp_path, text))


# -- the rows that samples are packed into


def test_rows_are_packed_as_olmo_core_packs_them() -> None:
    utils = pytest.importorskip("olmo_core.data.utils")
    numpy = pytest.importorskip("numpy")
    for seed in range(10):
        chance = random.Random(seed)
        limit = chance.choice([16, 128, 1024])
        documents = []
        for _ in range(900):
            length = int(chance.lognormvariate(chance.uniform(1, 5), 1))
            documents.append(min(limit, max(1, length)))
        ends = numpy.cumsum([0, *documents])
        places = numpy.stack([ends[:-1], ends[1:]], 1).astype(numpy.uint64)
        instances, _, _ = utils.InstancePacker(limit).pack_documents(places)
        assert packed.count_packed_rows(Counter(documents), limit) == len(instances), seed


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
def test_rows_of_8_are_filled_by_the_best_fit(documents: list[int], rows: int) -> None:
    assert packed.count_packed_rows(Counter(documents), 8) == rows


def write_tokens(folder: Path, samples: list[list[int]], **special: str) -> Path:
    """Tokens as upstream writes them: 16-bit numbers, a mask, the places of the samples."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True)
    added = [{"content": "</s>", "id": 2}, {"content": "<s>", "id": 1}]
    (tokenizer / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    config = {"eos_token": "</s>", **special}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))

    tokens = array.array("H")
    for sample in samples:
        tokens.extend(sample)
    (folder / "token_ids_part_0000.npy").write_bytes(tokens.tobytes())
    (folder / "labels_mask_part_0000.npy").write_bytes(bytes(len(tokens)))
    with gzip.open(folder / "token_ids_part_0000.csv.gz", "wt") as lines:
        lines.write("0,1\n" * len(samples))
    return folder


@pytest.mark.parametrize(
    ("samples", "special", "documents"),
    [
        pytest.param([[5, 6, 7, 2], [5, 6, 2]], {}, 2, id="whole"),
        pytest.param([[5, 2, 7, 2], [5, 6, 2]], {}, 3, id="cut inside of a conversation"),
        # a text has to begin with a token of its own
        pytest.param([[1, 5, 2, 7, 2], [1, 6, 2]], {"bos_token": "<s>"}, 2, id="first token"),
    ],
)
def test_a_document_ends_at_the_token_that_ends_a_text(
    tmp_path: Path, samples: list[list[int]], special: dict[str, str], documents: int
) -> None:
    folder = write_tokens(tmp_path / "numpy", samples, **special)
    rows = packed.read_packed_rows(folder, limit=8, tokenizer="org/model")
    assert rows == PackedRows(samples=2, documents=documents, rows=1)


def test_a_cache_without_the_mask_is_not_complete(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "numpy", [[5, 2]])
    phase = olmo_core_finetune.SCRIPT.tokenising
    assert phase is not None
    assert phase.is_complete(folder)
    (folder / "labels_mask_part_0000.npy").unlink()
    assert not phase.is_complete(folder)
    assert not phase.is_complete(tmp_path / "missing")


def test_steps_are_counted_in_packed_rows(tmp_path: Path) -> None:
    """A row fits about six samples of 700 tokens. Each epoch leaves out rows that fill no step."""
    plan = plan_text(tmp_path, write_stage("num_epochs: 2"))
    assert plan.steps is None
    samples = lengths.make_uniform(700, "test", 100_000)
    # 100,000 x 700 / 4,096 rows, 64 a step
    rows = footprint.count_rows_per_epoch(plan, samples, 100_000)
    assert rows == 17_090
    assert footprint.count_optimizer_steps(plan, rows, samples) == 2 * (17_090 // 64)


@pytest.mark.parametrize(
    ("args", "share"),
    [
        (("activation_memory_budget: 0.5",), 0.75),
        (("activation_checkpointing_mode: selected_modules",), 0.5),
        (("cp_degree: 2", "cp_strategy: ulysses"), 0.6),
    ],
)
def test_what_lowers_activations_is_planned(
    tmp_path: Path, args: tuple[str, ...], share: float
) -> None:
    whole = memory_of(plan_text(tmp_path, write_stage()), "700:4096")
    less = memory_of(plan_text(tmp_path, write_stage(*args)), "700:4096")
    assert less.of("activations") <= share * whole.of("activations")


def test_the_optimizer_s_step_is_the_fullest_moment_of_a_large_share(tmp_path: Path) -> None:
    """Two H200 held OLMo-2-7B at 95.37 GiB (docs/evidence/h200x4.md)."""
    text = write_stage("activation_checkpointing_mode: selected_modules", "compile_model: true")
    estimate = memory_of(plan_text(tmp_path, text, gpus=2), "290:1100")
    assert estimate.fullest.name == "optimizer's step"
    assert estimate.peak == pytest.approx(95.37, rel=0.02)


# -- inside the training


def test_a_batch_with_document_lengths_is_read_like_any_other() -> None:
    torch = pytest.importorskip("torch")
    # OLMo-core's labels are those of the token behind; its padding is a document
    ids = [5, 6, 2, 7, 8, 2, 9, 9]
    labels_behind = [-100, 2, -100, 8, 2, -100, -100, -100]
    labels = [-100, -100, 2, -100, 8, 2, -100, -100]
    positions = [0, 1, 2, 0, 1, 2, 0, 0]
    kwargs = {
        "labels": torch.tensor([labels_behind]),
        "doc_lens": torch.tensor([[3, 3, 2]]),
        "max_doc_lens": [3],
    }

    batch = probe_packing.read_batch(torch.tensor([ids]), kwargs)
    assert batch.labels.tolist() == [labels]
    assert batch.positions.tolist() == [positions]
    del kwargs["doc_lens"], kwargs["max_doc_lens"]
    assert probe_packing.read_batch(torch.tensor([ids]), kwargs).positions is None


class SupplyLog:
    """Stands for the probe: what was supplied in place of something missing."""

    def __init__(self) -> None:
        self.supplied: list[str] = []

    def supply(self, what: str, _why: str) -> None:
        self.supplied.append(what)


def test_documents_are_kept_apart_on_a_cpu() -> None:
    """The stand-in for flash-attn computes each document as if it stood alone."""
    torch = pytest.importorskip("torch")
    backend = pytest.importorskip("olmo_core.nn.attention.backend")
    from launcher.probe.watching import supplies

    class Backend(backend.TorchAttentionBackend):  # type: ignore[misc, name-defined]
        forward = backend.TorchAttentionBackend.forward

    module: Any = ModuleType("backend")
    module.TorchAttentionBackend = Backend
    log: Any = SupplyLog()
    supplies.supply_documents(log, module)

    attention = Backend(head_dim=4, n_heads=4, n_kv_heads=2)
    torch.manual_seed(0)
    query = torch.randn(2, 6, 4, 4)
    key = torch.randn(2, 6, 2, 4)
    value = torch.randn(2, 6, 2, 4)
    ends = torch.tensor([0, 2, 6, 9, 12])
    together = attention.forward((query, key, value), cu_doc_lens=ends, max_doc_len=4)
    for row, begin, end in ((0, 0, 2), (0, 2, 6), (1, 0, 3), (1, 3, 6)):
        document = slice(row, row + 1), slice(begin, end)
        alone = attention.forward((query[document], key[document], value[document]))
        torch.testing.assert_close(together[document], alone)
    assert log.supplied[0] == "documents"


def load_exporting() -> ModuleType:
    path = REPOSITORY / "launcher/probe/models/exporting.py"
    spec = importlib.util.spec_from_file_location("exporting", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wrong_weights_are_known_by_their_logits() -> None:
    torch = pytest.importorskip("torch")
    exporting = load_exporting()

    class Saved(torch.nn.Embedding):  # type: ignore[misc, name-defined]
        def forward(self, tokens: Any) -> Any:
            return type("Output", (), {"logits": super().forward(tokens)})

    torch.manual_seed(0)
    trained = torch.nn.Embedding(16, 16)
    exported = Saved(16, 16)
    exported.load_state_dict(trained.state_dict())
    assert exporting.measure_difference(trained, exported, 16) == 0.0
    with torch.no_grad():
        # as where two of its rows were exchanged
        exported.weight[[3, 4]] = exported.weight[[4, 3]]
    assert exporting.measure_difference(trained, exported, 16) > exporting.WITHIN


def test_the_newest_checkpoint_is_exported(tmp_path: Path) -> None:
    exporting = load_exporting()
    for name in ("step0", "step9", "step12", "step12-tmp", "hf_model"):
        (tmp_path / name).mkdir()
    assert exporting.find_newest_checkpoint(str(tmp_path)) == str(tmp_path / "step12")
    assert exporting.find_newest_checkpoint(str(tmp_path / "step0")) is None


@pytest.mark.parametrize(("final_save", "calls"), [(True, ["save", "remove"]), (False, [])])
def test_a_trial_neither_saves_nor_removes_a_checkpoint(
    tmp_path: Path, final_save: bool, calls: list[str]
) -> None:
    from launcher.probe.watching import Probe, trainers

    seen: list[str] = []

    class CheckpointerCallback:
        step = 3

        def _save_checkpoint(self, save_async: bool = False) -> str:
            seen.append("save")
            return "step3"

        def _remove_checkpoint(self, path: str) -> None:
            seen.append("remove")

    module: Any = ModuleType("callbacks")
    module.CheckpointerCallback = CheckpointerCallback
    probe = Probe({"target": "train.py", "out": str(tmp_path), "final_save": final_save})
    trainers.watch_olmo_checkpoints(probe, module)
    callback = CheckpointerCallback()
    callback._save_checkpoint()
    callback._remove_checkpoint("step3")
    assert seen == calls


# -- the verdict


def test_a_recorded_run_passes_and_names_its_stand_in(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(DATA / "run_sft_olmo_core", run)
    verdict = judge.judge_run(judge.RunFolder(run)).verdict
    assert verdict.status == "pass"
    packing = verdict.point("packing")
    assert packing.state == "isolated"
    assert "flash-attn needs a GPU" in str(packing.detail["stand_in"])
    assert verdict.point("batch").state == "planned"
    assert verdict.point("dataset_cache").state == "miss"
    assert verdict.point("finish").state == "completed"
