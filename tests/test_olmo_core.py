"""The second DPO script, dpo.py: chosen, checked, started by torchrun, and planned under FSDP."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saved
from plans import PYTHON, built, from_text, planned, settled, trainer
from typer.testing import CliRunner

from launcher.artifacts import architecture, lengths, model_config
from launcher.artifacts.lengths import fuller, pack, parse
from launcher.cache import hub
from launcher.cli.commands import app
from launcher.config import load
from launcher.errors import Finding, InvalidConfig
from launcher.plan import footprint, plan
from launcher.plan.memory import peak as memory
from launcher.plan.memory.phases import GIB, Memory
from launcher.plan.memory.setup import Setup, Sharding
from launcher.planning.doctor import disk
from launcher.planning.resume import epochs
from launcher.planning.resume.epochs import EpochLayout
from launcher.probe.watching import Probe
from launcher.probe.watching.packing import TokenBatch
from launcher.rules.context import Context, Machine
from launcher.rules.open_instruct import olmo_core
from launcher.runs import rendezvous
from launcher.stage import stage
from launcher.upstream.locate import Locator
from launcher.upstream.schema import Values

BASE = """
stage: dpo
script: {script}
{top}
args:
  model_name_or_path: allenai/OLMo-2-1124-7B
  mixer_list: [set, "100000"]
  max_seq_length: 16384
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
  {args}
"""
STORY = "packing: true\n  activation_memory_budget: {}\n  per_device_train_batch_size: {}"


MODEL = "allenai/OLMo-2-1124-7B"


def text(*args: str, script: str = "dpo_olmo_core", top: str = "", model: str = MODEL) -> str:
    return BASE.format(script=script, top=top, args="\n  ".join(args)).replace(MODEL, model)


def judged(folder: Path, written: str) -> stage.Judged:
    path = folder / "stage.yaml"
    path.write_text(written, encoding="utf-8")
    return stage.judge(load.load(path), locator=Locator(search=()))


def found(folder: Path, written: str) -> dict[tuple[str, str], Finding]:
    return {(f.code, f.key or ""): f for f in judged(folder, written).findings}


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


@pytest.mark.parametrize("script", ["dpo_olmo_core", "open_instruct/dpo.py"])
def test_a_stage_file_names_the_script(tmp_path: Path, script: str) -> None:
    stage = from_text(tmp_path, text(script=script))
    assert (stage.schema.script, stage.schema.stage) == ("open_instruct/dpo.py", "dpo")
    assert (stage.options.stage, stage.options.script) == ("dpo", "dpo_olmo_core")


def test_other_scripts_are_refused(tmp_path: Path) -> None:
    for script, words in (
        ("dpo_olmo", "mean `dpo_olmo_core`"),
        ("[1]", "one of dpo, dpo_olmo_core"),
    ):
        fault = found(tmp_path, text(script=script))["bad-script", "script"]
        assert (fault.severity, fault.line) == ("error", 3)
        assert words in (fault.help or "")


SPEAKS = [
    # read out of the script
    ("context_parallel_degree: 2", "refused-by-source", "context_parallel_degree", "error"),
    ("optimizer_type: adam", "refused-by-source", "optimizer_type", "error"),
    ("use_lora: true", "refused-by-source", "use_lora", "error"),
    ("use_qlora: true", "not-with-olmo-core", "use_qlora", "error"),
    ("use_8bit_optimizer: true", "refused-by-source", "use_8bit_optimizer", "error"),
    ("dpo_use_paged_optimizer: true", "refused-by-source", "dpo_use_paged_optimizer", "error"),
    ("activation_memory_budget: 1.5", "out-of-range", "activation_memory_budget", "warning"),
    ("activation_memory_budget: 0", "out-of-range", "activation_memory_budget", "warning"),
    ("activation_memory_budget: -0.5", "out-of-range", "activation_memory_budget", "error"),
    ("attn_implementation: torch\n  packing: true", "packing-refused", "attn_implementation", "error"),
    ("lr_scheduler_type: polynomial", "scheduler-type", "lr_scheduler_type", "error"),
    ("max_grad_norm: -1", "reversed-gradient", "max_grad_norm", "error"),
    ("config_name: ngpt_1B", "unsupported-model", "config_name", "error"),
    ("with_tracking: true", "no-wandb-key", "with_tracking", "warning"),
    ("use_liger_kernel: true", "unread-key", "use_liger_kernel", "warning"),
    ("zero_stage: 2", "unread-key", "zero_stage", "warning"),
    ("model_revision: main", "unread-key", "model_revision", "warning"),
    ("max_train_samples: 5", "unread-key", "max_train_samples", "warning"),
    ("timeout: 60", "unread-key", "timeout", "warning"),
    # utils.py::setup_experiment_paths[push_to_hub] asks by name whether anything is pushed
    ("hf_repo_id: a", "conditional-key", "hf_repo_id", "warning"),
    ("gradient_accumulation_steps: 2\n  packing: true", "accumulation-packed",
     "gradient_accumulation_steps", "warning"),
    ("config_name: olmo2_1B", "other-shape", "config_name", "error"),
    ("config_name: Qwen/Qwen3-8B", "other-shape", "config_name", "error"),
    ("config_name: olmo3_7B", "other-shape", "config_name", "warning"),
    ("beta: 0", "zero-beta", "beta", "warning"),
    ("beta: -0.1", "out-of-range", "beta", "warning"),
    ("label_smoothing: 0.7", "out-of-range", "label_smoothing", "warning"),
]  # fmt: skip


def test_what_it_refuses_or_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for line, code, key, severity in SPEAKS:
        fault = found(tmp_path, text(line)).get((code, f"args.{key}"))
        assert fault is not None and (fault.severity, fault.line) == (severity, 11), line
        assert fault.file == str(tmp_path / "stage.yaml")
    # two keys together
    said = found(tmp_path, text("activation_memory_budget: 0.5", "compile_model: false"))
    assert said["budget-without-compile", "args.activation_memory_budget"].line == 11
    # a clean file is clean
    for lines in ((), ("config_name: olmo2_7B",), ("config_name: allenai/OLMo-2-1124-7B",)):
        assert found(tmp_path, text(*lines)) == {}
    # keys of this script are told to the other one
    said = found(tmp_path, text("compile_model: true", "fsdp_shard_degree: 8", script="dpo"))
    for key in ("compile_model", "fsdp_shard_degree"):
        assert "only open_instruct/dpo.py reads it" in str(said["unread-key", f"args.{key}"].help)
    # deepspeed is an error and precision is not read
    said = found(tmp_path, text(top="deepspeed: zero3\nmixed_precision: fp16"))
    assert (said["deepspeed-with-torchrun", "deepspeed"].severity) == "error"
    assert said["deepspeed-with-torchrun", "deepspeed"].line == 4
    assert said["mixed-precision-unread", "mixed_precision"].line == 5


def test_models_that_it_does_not_know(tmp_path: Path) -> None:
    key = "args.model_name_or_path"
    fault = found(tmp_path, text(model="meta-llama/Llama-3.1-8B"))["unsupported-model", key]
    for word in (MODEL, "Qwen/Qwen3-0.6B", "olmo2_7B", "dpo_tune_cache.py"):
        assert word in (fault.help or "")
    # a name of a shape is no model
    fault = found(tmp_path, text(model="olmo2_7B"))["unsupported-model", key]
    assert "`config_name: olmo2_7B`" in (fault.help or "")
    # it is saved in transformers' form since #1671
    assert found(tmp_path, text(model="Qwen/Qwen3-8B")) == {}


@pytest.mark.parametrize(
    ("packages", "is_said"), [({}, True), ({"flash-linear-attention": "0.5"}, False)]
)
def test_recurrent_layers_need_a_package(packages: dict[str, str], is_said: bool) -> None:
    schema = Locator(search=()).schema("open_instruct", "dpo_olmo_core")
    given = {"model_name_or_path": MODEL, "config_name": "qwen3_5_0_8B"}
    context = Context(values=Values(schema, given), packages=packages)
    messages = [one.message for one in olmo_core.unbuildable(context)]
    assert (
        messages
        == ["qwen3_5_0_8B has recurrent layers: building it crashes without flash-linear-attention"]
        * is_said
    )


def test_a_shape_of_olmo_cores_is_no_model_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config_name` is one of OLMo-core's names, whatever folder is called so."""
    monkeypatch.chdir(tmp_path)
    for name, positions in (("olmo2_7B", 8), ("trained", 4096)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"max_position_embeddings": positions})
        )
    schema = Locator(search=()).schema("open_instruct", "dpo_olmo_core")
    values = Values(schema, {"model_name_or_path": "trained", "config_name": "olmo2_7B"})
    assert model_config.built_from(values, {}) == {"max_position_embeddings": 4096}


SELECTED = ("compile_model: false", "activation_checkpointing_mode: selected_modules")


def test_modules_that_are_recomputed_by_name_need_no_budget(tmp_path: Path) -> None:
    named = from_text(tmp_path, text(*SELECTED))
    assert named.entry.recomputes(named.values)
    kept = from_text(tmp_path, text("compile_model: false", "activation_memory_budget: 0.5"))
    assert not kept.entry.recomputes(kept.values)
    # the other script has the argument and does not read it
    other = from_text(tmp_path, text(SELECTED[1], script="dpo"))
    assert not other.entry.recomputes(other.values)


def test_the_models_come_from_the_source() -> None:
    schema = Locator(search=()).schema("open_instruct", "dpo_olmo_core")
    assert schema.models["Qwen/Qwen3-14B"] == "qwen3_14B"
    assert set(schema.models.values()) <= schema.configs
    assert not any(name.endswith("_like") for name in schema.configs)


def test_a_folder_needs_its_config_name_and_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trained").mkdir()
    shape = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28}
    (tmp_path / "trained" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    written = text(model="trained")
    fault = found(tmp_path, written)["unsupported-model", "args.model_name_or_path"]
    assert "add `config_name: <its shape>`" in (fault.help or "") and "qwen3_0_6B" in (
        fault.help or ""
    )
    other = text("config_name: qwen3_8B", model="trained")
    assert "qwen3_0_6B" in str(found(tmp_path, other)["other-shape", "args.config_name"].help)
    right = text("config_name: qwen3_0_6B", model="trained")
    assert found(tmp_path, right) == {}


OLMO = {
    "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
}  # fmt: skip


def unfit(folder: Path, model: str, *args: str) -> Finding | None:
    said = found(folder, text(*args, model=model))
    return next((one for (code, _), one in said.items() if code == "other-shape"), None)


MISFITS: list[tuple[str, str | None, str, str]] = [
    ("Qwen/Qwen2.5-7B", "qwen3_8B", "is of the family qwen2: OLMo-core loads", "dpo_tune_cache.py"),
    ("meta-llama/Llama-2-7b-hf", "olmo2_7B", "model_type is llama, not olmo2", "dpo_tune_cache.py"),
    ("Qwen/Qwen3-4B", "qwen3_8B", "hidden_size is 2560, not 4096", "`config_name: qwen3_4B`"),
    # OLMo-core's shapes of these names are not Qwen's
    ("Qwen/Qwen3-14B", None, "num_hidden_layers is 40, not 48: loading fails once the "
     "data are tokenised", "dpo_tune_cache.py"),
]  # fmt: skip


def test_a_model_that_does_not_fit_the_shape(tmp_path: Path) -> None:
    for model, shape, words, help in MISFITS:
        fault = unfit(tmp_path, model, *((f"config_name: {shape}",) if shape else ()))
        assert fault is not None, model
        key, line = ("config_name", 11) if shape else ("model_name_or_path", 6)
        told = (fault.severity, fault.layer, fault.key, fault.line)
        assert told == ("error", "run", f"args.{key}", line)
        assert words in fault.message and help in (fault.help or "")
    for shape in ("llama3_8B", "small_hybrid_moe"):
        assert unfit(tmp_path, "meta-llama/Llama-3.1-8B", f"config_name: {shape}") is None


def test_the_config_of_a_folder_is_compared_with_the_shape(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str | None]] = [
        # the model is built with the vocabulary of its own config
        ({**OLMO, "vocab_size": 64000}, None),
        ({**OLMO, "num_hidden_layers": 16}, "num_hidden_layers is 16, not 32"),
        # what the file leaves out is not guessed
        ({"vocab_size": 64000}, None),
    ]
    for config_json, words in cases:
        (tmp_path / "config.json").write_text(json.dumps(config_json), encoding="utf-8")
        fault = unfit(tmp_path, str(tmp_path), "config_name: olmo2_7B")
        assert (fault is None) is (words is None)
        assert fault is None or (words or "") in fault.message
    ends = ("config_name: olmo2_7B", "cache_dataset_only: true")
    assert unfit(tmp_path, str(tmp_path), *ends) is None


@pytest.mark.slow
def test_the_shapes_are_those_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # importing torch's compiler sets it
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = pytest.importorskip("olmo_core.nn.transformer").TransformerConfig
    common = {"vocab_size": 64, "attn_backend": "torch"}
    for name, (_, hidden, layers, inner, heads, kv_heads) in olmo_core._SHAPES.items():
        shape = getattr(made, name)
        assert shape(**common).n_layers == layers, name
        model = shape(**common, n_layers=1).build(init_device="meta")
        sizes = {key: tuple(one.shape) for key, one in model.state_dict().items()}
        query, key = (sizes[f"blocks.0.attention.w_{one}.weight"] for one in "qk")
        assert query[1] == hidden and query[0] * kv_heads == key[0] * heads, name
        assert sizes["blocks.0.feed_forward.w1.weight"] == (inner, hidden), name
        assert model.blocks["0"].attention.n_heads == heads, name


QWEN = "Qwen/Qwen3-0.6B"
SNAPSHOT = {
    "config.json": '{"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28}',
    "generation_config.json": "{}",
}


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `QWEN` in a hub's cache that has no other model."""
    cache = tmp_path / "hub"
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    repository = cache / "models--Qwen--Qwen3-0.6B"
    folder = repository / "snapshots" / "c1899de2"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c1899de2", encoding="utf-8")
    for name, held in SNAPSHOT.items():
        (folder / name).write_text(held, encoding="utf-8")
    saved.tensors(folder / "model.safetensors")
    return folder


def starting(folder: Path, *args: str, model: str = QWEN) -> dict[str, Finding]:
    """What is said of the model when the run is to start."""
    path = folder / "stage.yaml"
    written = text(*args, model=model)
    path.write_text(written, encoding="utf-8")
    read = stage.read(load.load(path), locator=Locator(search=()))
    findings = stage.unplanned_findings(read, Machine())
    return {f.code: f for f in findings if f.key == "args.model_name_or_path"}


def test_a_hub_name_is_not_loaded_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    # as huggingface_hub reads them, the first that holds anything decides
    for first, second, variable in (
        ("1", "", "HF_HUB_OFFLINE"), ("", "true", "TRANSFORMERS_OFFLINE"), ("0", "1", None),
    ):  # fmt: skip
        monkeypatch.setenv("HF_HUB_OFFLINE", first)
        monkeypatch.setenv("TRANSFORMERS_OFFLINE", second)
        said = starting(tmp_path)
        assert ("offline-hub-model" in said) is (variable is not None)
        if variable is not None:
            fault = said["offline-hub-model"]
            assert (fault.severity, fault.layer, fault.line) == ("error", "run", 6)
            assert fault.message.startswith(f"{variable} is set and {QWEN} is a hub name")
            assert fault.help == (
                f"write `model_name_or_path: {snapshot}` and `config_name: qwen3_0_6B`; or unset {variable}"
            )


def test_a_folder_that_is_not_there_is_said_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = str(snapshot.parent / "other")
    said = starting(tmp_path, "config_name: qwen3_0_6B", model=missing)
    assert said.keys() == {"missing-model"}


def test_a_name_of_olmo_cores_is_no_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "stage.yaml"
    written = text("config_name: qwen3_0_6B", model=str(snapshot))
    path.write_text(written, encoding="utf-8")
    judged = stage.read(load.load(path), locator=Locator(search=()))
    findings = stage.unplanned_findings(judged, Machine())
    assert "missing-model" not in {finding.code for finding in findings}
    parts = hub.required_parts(plan.make(stage.validate(judged), gpus=8))
    assert "qwen3_0_6B" not in {part.name for part in parts}


def test_torchrun_on_one_machine_and_on_several(tmp_path: Path) -> None:
    words = built(planned(from_text(tmp_path, text()), gpus=8)).argv
    assert words[:3] == (str(PYTHON), "-m", "torch.distributed.run")
    assert words[words.index("--nproc-per-node") + 1] == "8"
    assert "accelerate.commands.launch" not in words and "--main_process_port" not in words
    assert "--do_not_randomize_output_dir" not in words
    # torchrun on several machines
    words = built(planned(from_text(tmp_path, text()), gpus=8, nodes=2)).argv
    here = rendezvous.Rendezvous(nodes=2, rank=1, address="10.0.0.4", port=29501)
    filled = rendezvous.fill_placeholders(words, here)
    pairs = dict(itertools.pairwise(filled))
    assert (pairs["--node-rank"], pairs["--master-addr"]) == ("1", "10.0.0.4")
    assert (pairs["--master-port"], pairs["--nnodes"]) == ("29501", "2")
    assert "NODE_RANK" not in filled


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("fsdp_shard_degree: 3", "fsdp_shard_degree"),
        ("fsdp_num_replicas: -1", "fsdp_num_replicas"),
        ("tensor_parallel_degree: 3", "tensor_parallel_degree"),
        ("fsdp_shard_degree: 4\n  fsdp_num_replicas: 4", "fsdp_num_replicas"),
        ("tensor_parallel_degree: 4\n  fsdp_shard_degree: 4", "fsdp_shard_degree"),
    ],
)
def test_degrees_must_divide_the_gpus(tmp_path: Path, line: str, key: str) -> None:
    made = settled(tmp_path, text(line), gpus=8)
    (fault,) = [f for f in made.stage.findings if f.code == "shard-degree"]
    assert (fault.severity, fault.key) == ("error", f"args.{key}")
    assert fault.line in (11, 12)


def test_batches_and_what_is_tracked(tmp_path: Path) -> None:
    line = "per_device_train_batch_size: 5\n  num_epochs: 2"
    assert planned(from_text(tmp_path, text(line)), gpus=4).steps == 100_000 // 20 * 2
    # wandb is not asked where nothing is tracked
    made = planned(from_text(tmp_path, text()), gpus=1)
    assert made.derived["wandb_entity"].value == "none"
    kept = planned(from_text(tmp_path, text("wandb_entity: mine")), gpus=1)
    assert "wandb_entity" not in kept.derived
    # a global batch that packed steps do not reach
    written = text("packing: true", top="batch: {global: 64, per_device: 8}")
    (fault,) = [
        f for f in settled(tmp_path, written, gpus=2).stage.findings
        if f.code == "accumulation-packed"
    ]  # fmt: skip
    assert (fault.key, fault.line, fault.severity) == ("batch.global", 4, "warning")
    reached = settled(tmp_path, written, gpus=8).stage.findings
    assert not [f for f in reached if f.code == "accumulation-packed"]


def faults(folder: Path, rows: int, line: str, gpus: int) -> list[Finding]:
    written = text(line).replace('"100000"', f'"{rows}"')
    made = settled(folder, written, gpus=gpus)
    return [f for f in made.stage.findings if f.code == "too-few-rows"]


@pytest.mark.parametrize(
    ("rows", "line", "words"),
    [
        # 8 GPUs x 4 pairs x 2: a step of 64; the reference takes 4 x 4 x 8 = 128, its rows at most
        # twice
        (63, "per_device_train_batch_size: 4\n  gradient_accumulation_steps: 2", "less than one step"),
        (63, "per_device_train_batch_size: 4", "reference pass takes 128 pairs"),
        (7, "packing: true", "less than one step of 8"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fill_a_batch(tmp_path: Path, rows: int, line: str, words: str) -> None:
    (fault,) = faults(tmp_path, rows, line, 8)
    assert (fault.severity, fault.key, fault.line) == ("error", "args.mixer_list", 7)
    assert words in fault.message


def story(tmp_path: Path, budget: float, batch: int = 2) -> Memory:
    stage = from_text(tmp_path, text(STORY.format(budget, batch)))
    made = planned(stage, gpus=8, nodes=2)
    setup = footprint.Footprint(
        plan=made, shape=footprint.shape_of(made), rows=parse("900:4096"), attention="flash_2"
    ).setup()
    # measured before upstream's PR 1467 put the loss into what is compiled
    assert setup.sharding is not None
    return memory.estimate(replace(setup, sharding=replace(setup.sharding, loss=False)))


def test_a_compiled_loss_takes_six_bytes_a_position_and_word() -> None:
    """56.9 GiB measured on an H200: Qwen3-0.6B, rows of 2 x 16,384 positions, activation budget 0.5."""
    words = ("--gpus", "1", "--row-tokens", "300:16384", "--gpu-memory", "141", "--format", "json")
    said = invoke("plan", "configs/olmo_core/dpo_qwen3_0_6b.yaml", *words)
    (one,) = json.loads(said.stdout)["data"]["gpus"]
    assert one["memory_gib"]["peak"] == pytest.approx(56.9, rel=0.02)


def test_memory_of_budgets_and_shards(tmp_path: Path) -> None:
    assert story(tmp_path, 0.1).spare(80) >= 0
    for budget in (0.2, 0.3, 0.5, 0.8, 1.0):
        assert story(tmp_path, budget).spare(80) < 0, budget

    # more shards hold less
    def peak(line: str) -> float:
        made = planned(from_text(tmp_path, text(line)), gpus=8, nodes=2)
        shape = footprint.shape_of(made)
        one = footprint.Footprint(
            plan=made, shape=shape, rows=parse("100:200"), attention="flash_2"
        )
        return memory.estimate(one.setup()).peak

    assert peak("fsdp_shard_degree: 16") < peak("seed: 1") < peak("fsdp_shard_degree: 2")
    # by default one replica a machine
    assert peak("seed: 1") == peak("fsdp_shard_degree: 8") == peak("fsdp_num_replicas: 2")


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped")
@pytest.mark.parametrize(
    ("name", "model", "rows", "length", "ranks", "replicas"),
    [
        # the fullest is a layer's backward pass, the loss, and the end, where the outer gradients
        # wait
        ("olmo2_1B_v2", "allenai/OLMo-2-0425-1B", 2, 256, 8, 1),
        ("olmo2_1B_v2", "allenai/OLMo-2-0425-1B", 1, 2048, 16, 2),
        ("olmo2_1B_v2", "allenai/OLMo-2-0425-1B", 1, 128, 1, 1),
        ("qwen3_0_6B", "Qwen/Qwen3-0.6B", 2, 512, 2, 1),
    ],
)
def test_what_fsdp_holds_is_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, model: str, rows: int, length: int,
    ranks: int, replicas: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pytest.importorskip("torch")
    pytest.importorskip("olmo_core")
    import allocation

    layers = 8
    shape = architecture.find(model, {}, replaced={"num_hidden_layers": layers})
    setup = Setup(
        shape=shape, batch=lengths.MicroBatch(rows=rows, width=length, real=rows * length),
        processes=ranks, accumulation=1, loss="logprobs", reference="cache",
        sharding=Sharding(shards=ranks // replicas),
    )  # fmt: skip
    beside = ("weights (fp32), this rank's", "Adam's two states (fp32)", "cuBLAS workspaces")
    told = max(
        sum(part.gib for part in phase.allocations if part.name not in beside)
        for phase in memory.estimate(setup).phases
    )
    traced = allocation.measure_fsdp(
        name, shape.vocab, layers=layers, rows=rows, length=length, ranks=ranks, replicas=replicas
    )
    assert told == pytest.approx(traced / GIB, rel=0.01)


def test_the_sweep_fills_rows_at_a_constant_time(tmp_path: Path) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(text(STORY.format(0.1, 2)), encoding="utf-8")
    tokens, seconds = {}, {}
    for batch in (2, 4, 8, 16, 32):
        run = invoke(
            "plan", str(path), f"args.per_device_train_batch_size={batch}", "--gpus", "8", "--nodes",
            "2", "--row-tokens", "900:4096", "--rows", "300000", "--gpu", "H100", "--gpu-memory",
            "80", "--format", "json",
        )  # fmt: skip
        (rung,) = json.loads(run.stdout)["data"]["gpus"]
        tokens[batch] = rung["tokens_per_step"]
        seconds[batch] = rung["tokens_per_step"] / rung["tokens_per_second"]
    # of the story: 57,664 at 2 and 453,184 at 16, of 524,288 positions
    assert tokens[2] == pytest.approx(57_664, rel=0.03)
    assert tokens[16] == pytest.approx(453_184, rel=0.05)
    assert tokens[2] < tokens[4] < tokens[8] < tokens[16] < tokens[32] <= 524_288
    assert max(seconds.values()) == pytest.approx(min(seconds.values()), rel=1e-3)


def told(folder: Path, written: str, *words: str) -> Any:
    path = folder / "stage.yaml"
    path.write_text(written, encoding="utf-8")
    run = invoke("plan", str(path), "--row-tokens", "900:4096", *words, "--format", "json")
    return json.loads(run.stdout)["data"]


def test_steps_and_checkpoints_of_the_command_line(tmp_path: Path) -> None:
    written = text("per_device_train_batch_size: 2").replace('"100000"', "1.0")
    words = ("--gpus", "1,3,8", "--rows", "1000")
    steps = [rung["steps"] for rung in told(tmp_path, written, *words)["gpus"]]
    assert steps == [1000 // 2, 1000 // 6, 1000 // 16]


def test_room_for_every_checkpoint(tmp_path: Path) -> None:
    shape = {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "vocab_size": 151936,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    lines = ("config_name: qwen3_0_6B", "checkpointing_steps: 100", "max_train_steps: {}")
    written = text(*lines, model=str(tmp_path))
    for steps, times in ((150, 3), (200, 3), (50, 2)):
        made = planned(from_text(tmp_path, written.format(steps)), gpus=8)
        room = disk.needs(made, None, {})
        assert room is not None
        assert (room.saved.times, room.saved.checkpoint) == (times, 12 * room.parameters)
        assert room.least == (12 * times + 4) * room.parameters


def test_its_resume_is_not_judged_by_the_other_scripts_arithmetic(tmp_path: Path) -> None:
    uneven = EpochLayout(rows=44, per_device=4, devices=1, accumulation=2, epochs=2)
    args = ("gradient_accumulation_steps: 2", "checkpointing_steps: 3", "num_epochs: 2")
    codes = {}
    for script, more in (("dpo_olmo_core", ""), ("dpo", "deepspeed: zero2")):
        made = planned(from_text(tmp_path, text(*args, script=script, top=more)), gpus=1)
        found = epochs.findings(made, uneven, trainer())
        codes[script] = {one.code for one in found}
    assert codes == {"dpo_olmo_core": set(), "dpo": {"resume-inexact"}}


def test_attention_goes_over_the_whole_packed_row(tmp_path: Path) -> None:
    def seconds(length: int) -> float:
        written = text(STORY.format(0.1, 64)).replace("16384", str(length))
        (rung,) = told(tmp_path, written, "--gpus", "8", "--nodes", "2", "--gpu", "H100")["gpus"]
        return float(rung["tokens_per_step"] / rung["tokens_per_second"] / length)

    # OLMo-2-7B: 6 x 6.9e9 parameters, and 6 x 32 layers x 4,096 for each position of a row
    assert seconds(16_384) / seconds(4_096) == pytest.approx(
        (6 * 6.89e9 + 6 * 32 * 4096 * 32_768) / (6 * 6.89e9 + 6 * 32 * 4096 * 8_192), rel=0.02
    )


@pytest.mark.parametrize(
    ("release", "model", "tied"),
    [
        ("2.6.0", "Qwen/Qwen3-0.6B", True),
        ("", "Qwen/Qwen3-1.7B", True),
        # the pin's commit calls itself so
        ("2.4.0", "Qwen/Qwen3-0.6B", False),
        ("2.6.0", "Qwen/Qwen3-8B", False),
    ],
)
def test_embeddings_are_tied_as_the_installed_release_ties_them(
    tmp_path: Path, release: str, model: str, tied: bool
) -> None:
    made = planned(from_text(tmp_path, text(model=model)), gpus=8)
    packages = {"ai2-olmo-core": release} if release else {}
    assert footprint.shape_of(made, None, packages).tied is tied


def test_the_shapes_that_the_package_ties(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = pytest.importorskip("olmo_core.nn.transformer").TransformerConfig
    common = {"vocab_size": 64, "attn_backend": "torch"}
    tied = {
        name for name in olmo_core._SHAPES
        if getattr(getattr(made, name)(**common), "tie_word_embeddings", False)
    }  # fmt: skip
    assert tied == set(olmo_core._TIED)


def test_muon_is_not_planned_as_adam(tmp_path: Path) -> None:
    made = planned(from_text(tmp_path, text("optimizer_type: muon")), gpus=8)
    one = footprint.Footprint(
        plan=made, shape=footprint.shape_of(made), rows=parse("100:200"), attention="flash_2"
    )
    with pytest.raises(InvalidConfig, match="Muon"):
        one.setup()


def test_half_empty_rows_are_said_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(text(STORY.format(0.1, 2)), encoding="utf-8")
    words = ("--gpus", "8", "--nodes", "2", "--row-tokens", "900:4096")
    said = invoke("plan", str(path), *words).stderr
    assert "half-wasted" in said and "batch 2 uses 11% of each step; 16 fills" in said
    full = invoke("plan", str(path), "args.per_device_train_batch_size=16", *words)
    assert "half-wasted" not in full.stderr


def test_packing_as_upstream_packs() -> None:
    same = lengths.uniform(100, "made")
    row = pack(same, pairs=8, limit=250)
    assert (row.pairs, row.real, row.positions) == (2.0, 400.0, 500)
    assert pack(same, pairs=1, limit=250).filled == pytest.approx(0.4)
    assert fuller(same, pairs=1, limit=250)[0] == 2
    # a row that is too long by itself is cut, and stands alone
    assert pack(parse("900:900"), pairs=4, limit=500).pairs == 1.0


def watching(folder: Path) -> Probe:
    settings = {
        "target": "dpo.py", "out": str(folder), "cpu": True,
        "packed": True, "expect": {"packing": "on"}, "on_violation": "warn",
        "on_hang": "report", "within": 3, "isolation": False, "hang_factor": 20, "hang_seconds": 300,
        "final_save": True,
    }  # fmt: skip
    return Probe(settings)


def heard(made: Probe, *names: str) -> list[dict[str, Any]]:
    """What it has written of these events."""
    lines = Path(made.settings.out, f"rank-{made.process.rank}.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] in names]


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        # 2 x 2,048 positions: 11 % of them, and the fuller half would hold 18 such pairs
        ((100, 130), (120, 100), "batch 2 uses 11% of each step; 16 fills 88%"),
        ((230,), (220,), "batch 1 uses 11% of each step; 8 fills 88%"),
        # one half is nearly full, the other empty: no batch helps
        ((900, 900), (10, 10), "batch 2 uses 44% of each step"),
    ],
)
def test_what_a_packed_row_wastes(
    tmp_path: Path, chosen: tuple[int, ...], rejected: tuple[int, ...], message: str
) -> None:
    torch = pytest.importorskip("torch")
    made = watching(tmp_path)
    ids = torch.zeros((1, 2048), dtype=torch.int64)
    batch = {"chosen_input_ids": ids, "rejected_input_ids": ids}
    for branch, sizes in (("chosen", chosen), ("rejected", rejected)):
        ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
        batch[f"{branch}_cu_seq_lens_k"] = torch.tensor(ends, dtype=torch.int32)
    for _ in range(3):
        made.begin_micro_batch(batch)
        made.packing.look(None, made.pairs.complete(TokenBatch(ids)))
        made.begin_backward(torch.tensor(0.5))
        made.begin_step()
        made.close_step()
    steps = heard(made, "step")
    real = sum(chosen) + sum(rejected)
    assert [(one["tokens"], one["wasted"]) for one in steps] == [(real, 4096 - real)] * 3
    told = heard(made, "packing", "half_wasted")
    assert [(one["event"], one.get("state")) for one in told] == [
        ("packing", "on"),
        ("half_wasted", None),
    ]
    assert told[1]["message"] == message


@pytest.mark.parametrize(("rank", "tokens"), [(0, 32), (1, 0), (2, 32), (3, 0)])
def test_ranks_of_one_model_count_their_batch_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, tokens: int
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("RANK", str(rank))
    made = watching(tmp_path)
    made.pairs.alike = 2
    mask = torch.zeros((2, 20), dtype=torch.int64)
    mask[:, :8] = 1
    keys = ("input_ids", "attention_mask")
    made.begin_micro_batch({f"{b}_{key}": mask for b in ("chosen", "rejected") for key in keys})
    made.begin_step()
    made.close_step()
    (step,) = heard(made, "step")
    assert (step["tokens"], step["positions"]) == (tokens, 80 if tokens else 0)


def test_a_row_that_had_no_room_for_the_next_pair_needs_no_larger_batch(tmp_path: Path) -> None:
    made = watching(tmp_path)
    made.packing.on = True
    made.pairs.most = 4
    made.pairs.tell_waste(900, 4096, 3, 700)
    (told,) = heard(made, "half_wasted")
    assert told["message"] == "batch 3 uses 22% of each step"


def test_that_upstream_goes_on_by_itself_is_said(tmp_path: Path) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(text(f"output_dir: {tmp_path}/out", "exp_name: x", "seed: 7"), encoding="utf-8")

    def codes() -> set[str]:
        read = stage.read(load.load(path), locator=Locator(search=()))
        return {
            one.code
            for one in stage.unplanned_findings(read, Machine())
            if one.code == "resume-unjudged"
        }

    assert codes() == set()
    # what is written before the first step is no progress
    (tmp_path / "out" / "x__7" / "step0").mkdir(parents=True)
    assert codes() == set()
    (tmp_path / "out" / "x__7" / "step40").mkdir()
    assert codes() == {"resume-unjudged"}
