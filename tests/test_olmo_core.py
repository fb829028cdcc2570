"""The second DPO script, dpo.py: chosen, checked, started by torchrun, and planned under FSDP."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saved
from plans import PYTHON, build_command, check_plan, from_text, judge_text, make_plan, trainer
from typer.testing import CliRunner

from launcher.artifacts import architecture, lengths, model_config
from launcher.artifacts.lengths import fill_rows, pack, parse
from launcher.cache import hub
from launcher.cli.commands import app
from launcher.config import load
from launcher.errors import Finding, InvalidConfig
from launcher.plan import footprint, plan
from launcher.plan.footprint import Footprint
from launcher.plan.memory import peak as memory
from launcher.plan.memory.phases import GIB, Memory
from launcher.plan.memory.setup import Setup, Sharding
from launcher.plan.plan import Plan
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
from launcher.upstream.schema import Schema, Values

MODEL = "allenai/OLMo-2-1124-7B"
QWEN = "Qwen/Qwen3-0.6B"
STAGE_FILE = """
stage: dpo
script: {script}
{top}
args:
  model_name_or_path: {model}
  mixer_list: [set, "100000"]
  max_seq_length: 16384
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
  {args}
"""
MODEL_LINE = 6
ARGS_LINE = 11
"""Where the further arguments of `write_stage` begin."""


def write_stage(
    *args: str, script: str = "dpo_olmo_core", top: str = "", model: str = MODEL
) -> str:
    lines = "\n  ".join(args)
    return STAGE_FILE.format(script=script, top=top, model=model, args=lines)


def packed_stage(budget: float, per_device: int) -> str:
    return write_stage(
        "packing: true",
        f"activation_memory_budget: {budget}",
        f"per_device_train_batch_size: {per_device}",
    )


def plan_text(folder: Path, text: str, gpus: int = 8, nodes: int = 1) -> Plan:
    return make_plan(from_text(folder, text), gpus=gpus, nodes=nodes)


def footprint_of(plan: Plan, rows: str) -> Footprint:
    shape = footprint.find_model_shape(plan)
    return Footprint(plan=plan, shape=shape, rows=parse(rows), attention="flash_2")


def launch(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def plan_on_command_line(folder: Path, text: str, *words: str) -> list[Any]:
    """What `launch plan` answers for each number of GPUs, with rows of 900 tokens on average."""
    path = folder / "stage.yaml"
    path.write_text(text, encoding="utf-8")
    run = launch("plan", str(path), "--row-tokens", "900:4096", *words, "--format", "json")
    answer: list[Any] = json.loads(run.stdout)["data"]["gpus"]
    return answer


def dpo_schema() -> Schema:
    return Locator(search=()).schema("open_instruct", "dpo_olmo_core")


@pytest.mark.parametrize("script", ["dpo_olmo_core", "open_instruct/dpo.py"])
def test_a_stage_file_names_the_script(tmp_path: Path, script: str) -> None:
    stage = from_text(tmp_path, write_stage(script=script))
    assert stage.schema.script == "open_instruct/dpo.py"
    assert stage.schema.stage == "dpo"
    assert stage.options.script == "dpo_olmo_core"


@pytest.mark.parametrize(
    ("script", "help"), [("dpo_olmo", "mean `dpo_olmo_core`"), ("[1]", "one of dpo, dpo_olmo_core")]
)
def test_other_scripts_are_refused(tmp_path: Path, script: str, help: str) -> None:
    finding = judge_text(tmp_path, write_stage(script=script))["bad-script", "script"]
    assert (finding.severity, finding.line) == ("error", 3)
    assert help in str(finding.help)


REFUSED_OR_IGNORED = [
    ("context_parallel_degree: 2", "refused-by-source", "error"),
    ("use_qlora: true", "not-with-olmo-core", "error"),
    ("use_8bit_optimizer: true", "refused-by-source", "error"),
    ("activation_memory_budget: 0", "out-of-range", "warning"),
    ("activation_memory_budget: -0.5", "out-of-range", "error"),
    ("activation_memory_budget: 0.5\n  compile_model: false", "budget-without-compile", "warning"),
    ("attn_implementation: torch\n  packing: true", "packing-refused", "error"),
    ("lr_scheduler_type: polynomial", "scheduler-type", "error"),
    ("max_grad_norm: -1", "reversed-gradient", "error"),
    ("config_name: ngpt_1B", "unsupported-model", "error"),
    ("with_tracking: true", "no-wandb-key", "warning"),
    ("zero_stage: 2", "unread-key", "warning"),
    # utils.py::setup_experiment_paths[push_to_hub] asks by name whether anything is pushed
    ("hf_repo_id: a", "conditional-key", "warning"),
    ("gradient_accumulation_steps: 2\n  packing: true", "accumulation-packed", "warning"),
    ("config_name: olmo2_1B", "other-shape", "error"),
    ("config_name: Qwen/Qwen3-8B", "other-shape", "error"),
    ("config_name: olmo3_7B", "other-shape", "warning"),
    ("beta: 0", "zero-beta", "warning"),
    ("beta: -0.1", "out-of-range", "warning"),
    ("label_smoothing: 0.7", "out-of-range", "warning"),
]


@pytest.mark.parametrize(("lines", "code", "severity"), REFUSED_OR_IGNORED)
def test_an_argument_that_is_refused_or_ignored_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, code: str, severity: str
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    key = lines.partition(":")[0]
    finding = judge_text(tmp_path, write_stage(lines))[code, f"args.{key}"]
    assert (finding.severity, finding.line) == (severity, ARGS_LINE)


@pytest.mark.parametrize("shape", ["", "config_name: olmo2_7B", f"config_name: {MODEL}"])
def test_a_correct_file_has_no_findings(tmp_path: Path, shape: str) -> None:
    assert judge_text(tmp_path, write_stage(shape)) == {}


@pytest.mark.parametrize("line", ["compile_model: true", "fsdp_shard_degree: 8"])
def test_the_other_script_names_the_one_that_reads_an_argument(tmp_path: Path, line: str) -> None:
    findings = judge_text(tmp_path, write_stage(line, script="dpo"))
    finding = findings["unread-key", f"args.{line.partition(':')[0]}"]
    assert "only open_instruct/dpo.py reads it" in str(finding.help)


def test_options_of_accelerate_do_not_apply(tmp_path: Path) -> None:
    findings = judge_text(tmp_path, write_stage(top="deepspeed: zero3\nmixed_precision: fp16"))
    deepspeed = findings["deepspeed-with-torchrun", "deepspeed"]
    assert (deepspeed.severity, deepspeed.line) == ("error", 4)
    assert findings["mixed-precision-unread", "mixed_precision"].line == 5


def test_an_unsupported_model_names_those_that_are(tmp_path: Path) -> None:
    key = "args.model_name_or_path"
    findings = judge_text(tmp_path, write_stage(model="meta-llama/Llama-3.1-8B"))
    for word in (MODEL, QWEN, "olmo2_7B", "dpo_tune_cache.py"):
        assert word in str(findings["unsupported-model", key].help)

    findings = judge_text(tmp_path, write_stage(model="olmo2_7B"))
    assert "`config_name: olmo2_7B`" in str(findings["unsupported-model", key].help)

    # it is saved in transformers' form since #1671
    assert judge_text(tmp_path, write_stage(model="Qwen/Qwen3-8B")) == {}


@pytest.mark.parametrize(
    ("packages", "messages"),
    [
        (
            {},
            [
                "qwen3_5_0_8B has recurrent layers: building it crashes without "
                "flash-linear-attention"
            ],
        ),
        ({"flash-linear-attention": "0.5"}, []),
    ],
    ids=["missing", "installed"],
)
def test_recurrent_layers_need_a_package(packages: dict[str, str], messages: list[str]) -> None:
    args = {"model_name_or_path": MODEL, "config_name": "qwen3_5_0_8B"}
    context = Context(values=Values(dpo_schema(), args), packages=packages)
    findings = olmo_core.unbuildable(context)
    assert [finding.message for finding in findings] == messages


def test_a_folder_named_like_a_shape_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config_name` is one of OLMo-core's names, whatever folder is called so."""
    monkeypatch.chdir(tmp_path)
    for name, positions in (("olmo2_7B", 8), ("trained", 4096)):
        config = Path(name, "config.json")
        config.parent.mkdir()
        config.write_text(json.dumps({"max_position_embeddings": positions}))
    args = {"model_name_or_path": "trained", "config_name": "olmo2_7B"}
    config = model_config.build_config(Values(dpo_schema(), args), {})
    assert config == {"max_position_embeddings": 4096}


SELECTED_MODULES = "activation_checkpointing_mode: selected_modules"


@pytest.mark.parametrize(
    ("script", "line", "recomputes"),
    [
        ("dpo_olmo_core", SELECTED_MODULES, True),
        ("dpo_olmo_core", "activation_memory_budget: 0.5", False),
        # the other script has the argument and does not read it
        ("dpo", SELECTED_MODULES, False),
    ],
)
def test_modules_that_are_recomputed_by_name_need_no_budget(
    tmp_path: Path, script: str, line: str, recomputes: bool
) -> None:
    stage = from_text(tmp_path, write_stage("compile_model: false", line, script=script))
    assert stage.entry.recomputes(stage.values) is recomputes


def test_the_models_come_from_the_source() -> None:
    schema = dpo_schema()
    assert schema.models["Qwen/Qwen3-14B"] == "qwen3_14B"
    assert set(schema.models.values()) <= schema.configs
    assert not any(name.endswith("_like") for name in schema.configs)


def test_a_model_in_a_folder_needs_its_config_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Path("trained", "config.json")
    config.parent.mkdir()
    shape = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28}
    config.write_text(json.dumps(shape))

    findings = judge_text(tmp_path, write_stage(model="trained"))
    help = str(findings["unsupported-model", "args.model_name_or_path"].help)
    assert "add `config_name: <its shape>`" in help
    assert "qwen3_0_6B" in help

    findings = judge_text(tmp_path, write_stage("config_name: qwen3_8B", model="trained"))
    assert "qwen3_0_6B" in str(findings["other-shape", "args.config_name"].help)

    assert judge_text(tmp_path, write_stage("config_name: qwen3_0_6B", model="trained")) == {}


def shape_finding(folder: Path, model: str, *args: str) -> Finding | None:
    findings = judge_text(folder, write_stage(*args, model=model))
    for (code, _), finding in findings.items():
        if code == "other-shape":
            return finding
    return None


@pytest.mark.parametrize(
    ("model", "shape", "message", "help"),
    [
        (
            "Qwen/Qwen2.5-7B",
            "qwen3_8B",
            "is of the family qwen2: OLMo-core loads",
            "dpo_tune_cache.py",
        ),
        (
            "meta-llama/Llama-2-7b-hf",
            "olmo2_7B",
            "model_type is llama, not olmo2",
            "dpo_tune_cache.py",
        ),
        ("Qwen/Qwen3-4B", "qwen3_8B", "hidden_size is 2560, not 4096", "`config_name: qwen3_4B`"),
    ],
)
def test_a_model_that_does_not_fit_the_shape(
    tmp_path: Path, model: str, shape: str, message: str, help: str
) -> None:
    finding = shape_finding(tmp_path, model, f"config_name: {shape}")
    assert finding is not None
    assert (finding.severity, finding.layer) == ("error", "run")
    assert (finding.key, finding.line) == ("args.config_name", ARGS_LINE)
    assert message in finding.message
    assert help in str(finding.help)


def test_a_shape_of_olmo_core_that_is_not_the_model_s(tmp_path: Path) -> None:
    """OLMo-core's shape of this name has more layers than Qwen's model."""
    finding = shape_finding(tmp_path, "Qwen/Qwen3-14B")
    assert finding is not None
    assert (finding.key, finding.line) == ("args.model_name_or_path", MODEL_LINE)
    assert "num_hidden_layers is 40, not 48: loading fails once the data" in finding.message


@pytest.mark.parametrize("shape", ["llama3_8B", "small_hybrid_moe"])
def test_a_model_that_fits_or_cannot_be_compared(tmp_path: Path, shape: str) -> None:
    assert shape_finding(tmp_path, "meta-llama/Llama-3.1-8B", f"config_name: {shape}") is None


OLMO_CONFIG = {
    "model_type": "olmo2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 100352,
}
TOO_FEW_LAYERS = {**OLMO_CONFIG, "num_hidden_layers": 16}


@pytest.mark.parametrize(
    ("config", "args", "message"),
    [
        # the model is built with the vocabulary of its own config
        ({**OLMO_CONFIG, "vocab_size": 64000}, (), None),
        (TOO_FEW_LAYERS, (), "num_hidden_layers is 16, not 32"),
        # what the file leaves out is not guessed
        ({"vocab_size": 64000}, (), None),
        (TOO_FEW_LAYERS, ("cache_dataset_only: true",), None),
    ],
    ids=["vocabulary", "layers", "nothing known", "only data"],
)
def test_the_config_of_a_folder_is_compared_with_the_shape(
    tmp_path: Path, config: dict[str, Any], args: tuple[str, ...], message: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    finding = shape_finding(tmp_path, str(tmp_path), "config_name: olmo2_7B", *args)
    if message is None:
        assert finding is None
    else:
        assert finding is not None
        assert message in finding.message


@pytest.mark.slow
def test_the_shapes_are_those_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # importing torch's compiler sets it
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config_class = pytest.importorskip("olmo_core.nn.transformer").TransformerConfig
    tied = set()
    for name, (_, hidden, layers, inner, heads, kv_heads) in olmo_core._SHAPES.items():
        make_config = getattr(config_class, name)
        config = make_config(vocab_size=64, attn_backend="torch")
        assert config.n_layers == layers, name
        if getattr(config, "tie_word_embeddings", False):
            tied.add(name)
        config.n_layers = 1
        model = config.build(init_device="meta")
        weights = model.state_dict()
        query = weights["blocks.0.attention.w_q.weight"].shape
        key = weights["blocks.0.attention.w_k.weight"].shape
        assert query[1] == hidden, name
        assert query[0] * kv_heads == key[0] * heads, name
        assert weights["blocks.0.feed_forward.w1.weight"].shape == (inner, hidden), name
        assert model.blocks["0"].attention.n_heads == heads, name
    assert tied == set(olmo_core._TIED)


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
    (repository / "refs" / "main").write_text("c1899de2")
    config = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    saved.tensors(folder / "model.safetensors")
    return folder


def read_text(folder: Path, text: str) -> stage.Judged:
    path = folder / "stage.yaml"
    path.write_text(text, encoding="utf-8")
    return stage.read_stage_file(load.load(path), locator=Locator(search=()))


def model_findings(folder: Path, *args: str, model: str = QWEN) -> dict[str, Finding]:
    """What is said of the model when the run is to start, by code."""
    read = read_text(folder, write_stage(*args, model=model))
    by_code = {}
    for finding in stage.check_unplanned(read, Machine()):
        if finding.key == "args.model_name_or_path":
            by_code[finding.code] = finding
    return by_code


@pytest.mark.parametrize(
    ("hub_offline", "transformers_offline", "variable"),
    [("1", "", "HF_HUB_OFFLINE"), ("", "true", "TRANSFORMERS_OFFLINE")],
)
def test_a_hub_name_is_not_loaded_offline(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Path,
    hub_offline: str,
    transformers_offline: str,
    variable: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", hub_offline)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", transformers_offline)
    finding = model_findings(tmp_path)["offline-hub-model"]
    assert (finding.severity, finding.layer, finding.line) == ("error", "run", MODEL_LINE)
    assert finding.message.startswith(f"{variable} is set and {QWEN} is a hub name")
    local = f"`model_name_or_path: {snapshot}` and `config_name: qwen3_0_6B`"
    assert finding.help == f"write {local}; or unset {variable}"


def test_the_first_offline_variable_that_is_set_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    """As huggingface_hub reads them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert "offline-hub-model" not in model_findings(tmp_path)


def test_a_missing_folder_is_no_offline_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = str(snapshot.parent / "other")
    findings = model_findings(tmp_path, "config_name: qwen3_0_6B", model=missing)
    assert findings.keys() == {"missing-model"}


def test_a_shape_is_no_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = write_stage("config_name: qwen3_0_6B", model=str(snapshot))
    read = read_text(tmp_path, text)
    codes = {finding.code for finding in stage.check_unplanned(read, Machine())}
    assert "missing-model" not in codes
    parts = hub.list_required_parts(plan.make(stage.validate(read), gpus=8))
    assert "qwen3_0_6B" not in {part.name for part in parts}


def test_torchrun_starts_it_on_one_machine(tmp_path: Path) -> None:
    argv = build_command(plan_text(tmp_path, write_stage())).argv
    assert argv[:3] == (str(PYTHON), "-m", "torch.distributed.run")
    assert argv[argv.index("--nproc-per-node") + 1] == "8"
    absent = {"accelerate.commands.launch", "--main_process_port", "--do_not_randomize_output_dir"}
    assert absent.isdisjoint(argv)


def test_torchrun_starts_it_on_several_machines(tmp_path: Path) -> None:
    argv = build_command(plan_text(tmp_path, write_stage(), nodes=2)).argv
    machine = rendezvous.Rendezvous(nodes=2, rank=1, address="10.0.0.4", port=29501)
    filled = rendezvous.fill_placeholders(argv, machine)
    options = dict(itertools.pairwise(filled))
    assert options["--nnodes"] == "2"
    assert options["--node-rank"] == "1"
    assert options["--master-addr"] == "10.0.0.4"
    assert options["--master-port"] == "29501"
    assert "NODE_RANK" not in filled


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("fsdp_shard_degree: 3", "fsdp_shard_degree"),
        ("fsdp_num_replicas: -1", "fsdp_num_replicas"),
        ("tensor_parallel_degree: 3", "tensor_parallel_degree"),
        ("fsdp_shard_degree: 4\n  fsdp_num_replicas: 4", "fsdp_num_replicas"),
        ("tensor_parallel_degree: 4\n  fsdp_shard_degree: 4", "fsdp_shard_degree"),
    ],
)
def test_degrees_must_divide_the_gpus(tmp_path: Path, lines: str, key: str) -> None:
    (finding,) = settled_findings(tmp_path, write_stage(lines), "shard-degree")
    assert (finding.severity, finding.key) == ("error", f"args.{key}")


def settled_findings(folder: Path, text: str, code: str, gpus: int = 8) -> list[Finding]:
    """The findings of this code once the file is planned on GPUs."""
    findings = check_plan(folder, text, gpus=gpus).stage.findings
    return [finding for finding in findings if finding.code == code]


def test_steps_follow_from_rows_gpus_and_epochs(tmp_path: Path) -> None:
    text = write_stage("per_device_train_batch_size: 5", "num_epochs: 2")
    assert plan_text(tmp_path, text, gpus=4).steps == 100_000 // 20 * 2


def test_wandb_is_not_asked_where_nothing_is_tracked(tmp_path: Path) -> None:
    derived = plan_text(tmp_path, write_stage()).derived
    assert derived["wandb_entity"].value == "none"
    derived = plan_text(tmp_path, write_stage("wandb_entity: mine")).derived
    assert "wandb_entity" not in derived


def test_a_global_batch_that_packed_steps_do_not_reach(tmp_path: Path) -> None:
    text = write_stage("packing: true", top="batch: {global: 64, per_device: 8}")
    (finding,) = settled_findings(tmp_path, text, "accumulation-packed", gpus=2)
    assert (finding.key, finding.line, finding.severity) == ("batch.global", 4, "warning")
    assert settled_findings(tmp_path, text, "accumulation-packed", gpus=8) == []


@pytest.mark.parametrize(
    ("rows", "lines", "message"),
    [
        # 8 GPUs x 4 pairs x 2: a step of 64; the reference takes 4 x 4 x 8 = 128, its rows at most
        # twice
        (
            63,
            "per_device_train_batch_size: 4\n  gradient_accumulation_steps: 2",
            "less than one step",
        ),
        (63, "per_device_train_batch_size: 4", "reference pass takes 128 pairs"),
        (7, "packing: true", "less than one step of 8"),
    ],
)
def test_rows_that_do_not_fill_a_batch(tmp_path: Path, rows: int, lines: str, message: str) -> None:
    text = write_stage(lines).replace('"100000"', f'"{rows}"')
    (finding,) = settled_findings(tmp_path, text, "too-few-rows")
    assert (finding.severity, finding.key, finding.line) == ("error", "args.mixer_list", 7)
    assert message in finding.message


def test_a_compiled_loss_takes_six_bytes_a_position_and_word() -> None:
    """56.9 GiB measured on an H200: Qwen3-0.6B, rows of 2 x 16,384 positions, budget 0.5."""
    run = launch(
        "plan",
        "configs/olmo_core/dpo_qwen3_0_6b.yaml",
        *("--gpus", "1", "--row-tokens", "300:16384", "--gpu-memory", "141", "--format", "json"),
    )
    (answer,) = json.loads(run.stdout)["data"]["gpus"]
    assert answer["memory_gib"]["peak"] == pytest.approx(56.9, rel=0.02)


def packed_memory(folder: Path, budget: float) -> Memory:
    """The memory of OLMo-2-7B on 2 x 8 GPUs, as it was measured.

    That was before upstream's PR 1467 put the loss into what is compiled.
    """
    plan = plan_text(folder, packed_stage(budget, 2), nodes=2)
    setup = footprint_of(plan, "900:4096").setup()
    assert setup.sharding is not None
    sharding = replace(setup.sharding, loss=False)
    return memory.estimate(replace(setup, sharding=sharding))


def test_only_a_small_activation_budget_fits(tmp_path: Path) -> None:
    assert packed_memory(tmp_path, 0.1).spare(80) >= 0
    for budget in (0.2, 0.5, 1.0):
        assert packed_memory(tmp_path, budget).spare(80) < 0, budget


def test_more_shards_hold_less(tmp_path: Path) -> None:
    def peak(line: str) -> float:
        plan = plan_text(tmp_path, write_stage(line), nodes=2)
        return memory.estimate(footprint_of(plan, "100:200").setup()).peak

    default = peak("seed: 1")
    assert peak("fsdp_shard_degree: 16") < default < peak("fsdp_shard_degree: 2")
    # by default one replica a machine
    assert default == peak("fsdp_shard_degree: 8") == peak("fsdp_num_replicas: 2")


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped")
@pytest.mark.parametrize(
    ("rows", "length", "ranks", "replicas"),
    [
        pytest.param(2, 256, 8, 1, id="a layer's backward pass"),
        pytest.param(1, 2048, 16, 2, id="the loss"),
        pytest.param(1, 128, 1, 1, id="the end, where the outer gradients wait"),
    ],
)
def test_memory_under_fsdp_is_as_traced(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rows: int,
    length: int,
    ranks: int,
    replicas: int,
) -> None:
    """Each case has its fullest moment elsewhere."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pytest.importorskip("torch")
    pytest.importorskip("olmo_core")
    import allocation

    layers = 8
    shape = architecture.find("allenai/OLMo-2-0425-1B", {}, replaced={"num_hidden_layers": layers})
    setup = Setup(
        shape=shape,
        batch=lengths.MicroBatch(rows=rows, width=length, real=rows * length),
        processes=ranks,
        accumulation=1,
        loss="logprobs",
        reference="cache",
        sharding=Sharding(shards=ranks // replicas),
    )
    untraced = {"weights (fp32), this rank's", "Adam's two states (fp32)", "cuBLAS workspaces"}
    phases = []
    for phase in memory.estimate(setup).phases:
        parts = [part.gib for part in phase.allocations if part.name not in untraced]
        phases.append(sum(parts))
    traced = allocation.measure_fsdp(
        "olmo2_1B_v2",
        shape.vocab,
        layers=layers,
        rows=rows,
        length=length,
        ranks=ranks,
        replicas=replicas,
    )
    assert max(phases) == pytest.approx(traced / GIB, rel=0.01)


def test_a_larger_batch_fills_packed_rows_at_a_constant_time(tmp_path: Path) -> None:
    """Measured: 57,664 tokens at 2 pairs and 453,184 at 16, of 524,288 positions."""
    tokens = []
    seconds = []
    for batch in (2, 16, 32):
        (answer,) = plan_on_command_line(
            tmp_path,
            packed_stage(0.1, batch),
            *("--gpus", "8", "--nodes", "2", "--rows", "300000"),
            *("--gpu", "H100", "--gpu-memory", "80"),
        )
        tokens.append(answer["tokens_per_step"])
        seconds.append(answer["tokens_per_step"] / answer["tokens_per_second"])
    assert tokens[0] == pytest.approx(57_664, rel=0.03)
    assert tokens[1] == pytest.approx(453_184, rel=0.05)
    assert tokens[1] < tokens[2] <= 524_288
    assert max(seconds) == pytest.approx(min(seconds), rel=1e-3)


def test_steps_follow_from_rows_of_the_command_line(tmp_path: Path) -> None:
    text = write_stage("per_device_train_batch_size: 2").replace('"100000"', "1.0")
    answers = plan_on_command_line(tmp_path, text, "--gpus", "1,3,8", "--rows", "1000")
    assert [answer["steps"] for answer in answers] == [1000 // 2, 1000 // 6, 1000 // 16]


@pytest.mark.parametrize(("steps", "checkpoints"), [(150, 3), (200, 3), (50, 2)])
def test_there_is_room_for_every_checkpoint(tmp_path: Path, steps: int, checkpoints: int) -> None:
    shape = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    text = write_stage(
        "config_name: qwen3_0_6B",
        "checkpointing_steps: 100",
        f"max_train_steps: {steps}",
        model=str(tmp_path),
    )
    needs = disk.estimate_needs(plan_text(tmp_path, text), None, {})
    assert needs is not None
    assert needs.saved.times == checkpoints
    assert needs.saved.checkpoint == 12 * needs.parameters
    assert needs.least == (12 * checkpoints + 4) * needs.parameters


@pytest.mark.parametrize(
    ("script", "top", "codes"),
    [("dpo_olmo_core", "", set()), ("dpo", "deepspeed: zero2", {"resume-inexact"})],
)
def test_its_resume_is_not_judged_by_the_other_script_s_arithmetic(
    tmp_path: Path, script: str, top: str, codes: set[str]
) -> None:
    uneven = EpochLayout(rows=44, per_device=4, devices=1, accumulation=2, epochs=2)
    args = ("gradient_accumulation_steps: 2", "checkpointing_steps: 3", "num_epochs: 2")
    plan = plan_text(tmp_path, write_stage(*args, script=script, top=top), gpus=1)
    findings = epochs.check_first_start(plan, uneven, trainer())
    assert {finding.code for finding in findings} == codes


def test_attention_goes_over_the_whole_packed_row(tmp_path: Path) -> None:
    def seconds_per_position(length: int) -> float:
        text = packed_stage(0.1, 64).replace("16384", str(length))
        words = ("--gpus", "8", "--nodes", "2", "--gpu", "H100")
        (answer,) = plan_on_command_line(tmp_path, text, *words)
        return float(answer["tokens_per_step"] / answer["tokens_per_second"] / length)

    # OLMo-2-7B: 6 x 6.9e9 parameters, and 6 x 32 layers x 4,096 for each position of a row
    long = 6 * 6.89e9 + 6 * 32 * 4096 * 32_768
    short = 6 * 6.89e9 + 6 * 32 * 4096 * 8_192
    ratio = seconds_per_position(16_384) / seconds_per_position(4_096)
    assert ratio == pytest.approx(long / short, rel=0.02)


@pytest.mark.parametrize(
    ("release", "model", "tied"),
    [
        ("2.6.0", QWEN, True),
        ("", "Qwen/Qwen3-1.7B", True),
        # the pin's commit calls itself so
        ("2.4.0", QWEN, False),
        ("2.6.0", "Qwen/Qwen3-8B", False),
    ],
)
def test_embeddings_are_tied_as_the_installed_release_ties_them(
    tmp_path: Path, release: str, model: str, tied: bool
) -> None:
    packages = {"ai2-olmo-core": release} if release else {}
    plan = plan_text(tmp_path, write_stage(model=model))
    assert footprint.find_model_shape(plan, None, packages).tied is tied


def test_muon_is_not_planned_as_adam(tmp_path: Path) -> None:
    plan = plan_text(tmp_path, write_stage("optimizer_type: muon"))
    with pytest.raises(InvalidConfig, match="Muon"):
        footprint_of(plan, "100:200").setup()


@pytest.mark.parametrize(("per_device", "is_warned"), [(2, True), (16, False)])
def test_half_empty_rows_are_named_before_anything_runs(
    tmp_path: Path, per_device: int, is_warned: bool
) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(packed_stage(0.1, per_device), encoding="utf-8")
    words = ("--gpus", "8", "--nodes", "2", "--row-tokens", "900:4096")
    stderr = launch("plan", str(path), *words).stderr
    assert ("half-wasted" in stderr) is is_warned
    assert ("batch 2 uses 11% of each step; 16 fills" in stderr) is is_warned


def test_rows_are_packed_as_upstream_packs_them() -> None:
    hundreds = lengths.make_uniform(100, "made")
    row = pack(hundreds, pairs=8, limit=250)
    assert row.pairs == 2.0
    assert row.real == 400.0
    assert row.positions == 500
    assert pack(hundreds, pairs=1, limit=250).filled == pytest.approx(0.4)
    pairs, _ = fill_rows(hundreds, pairs=1, limit=250)
    assert pairs == 2


def test_a_row_that_is_too_long_by_itself_is_cut_and_stands_alone() -> None:
    assert pack(parse("900:900"), pairs=4, limit=500).pairs == 1.0


# -- inside the training


def make_probe(folder: Path) -> Probe:
    return Probe(
        {
            "target": "dpo.py",
            "out": str(folder),
            "cpu": True,
            "packed": True,
            "expect": {"packing": "on"},
            "on_violation": "warn",
            "on_hang": "report",
            "within": 3,
            "isolation": False,
            "hang_factor": 20,
            "hang_seconds": 300,
            "final_save": True,
        }
    )


def events_of(probe: Probe, *names: str) -> list[Any]:
    """What the probe has written of these events."""
    record = Path(probe.settings.out, f"rank-{probe.process.rank}.jsonl")
    events = [json.loads(line) for line in record.read_text().splitlines()]
    return [event for event in events if event["event"] in names]


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        # 2 x 2,048 positions: 11 % of them, and the fuller half would hold 18 such pairs
        ([100, 130], [120, 100], "batch 2 uses 11% of each step; 16 fills 88%"),
        ([230], [220], "batch 1 uses 11% of each step; 8 fills 88%"),
        # one half is nearly full, the other empty: no batch helps
        ([900, 900], [10, 10], "batch 2 uses 44% of each step"),
    ],
)
def test_the_probe_names_what_a_packed_row_wastes(
    tmp_path: Path, chosen: list[int], rejected: list[int], message: str
) -> None:
    torch = pytest.importorskip("torch")
    probe = make_probe(tmp_path)
    ids = torch.zeros((1, 2048), dtype=torch.int64)
    batch = {"chosen_input_ids": ids, "rejected_input_ids": ids}
    for branch, sizes in (("chosen", chosen), ("rejected", rejected)):
        ends = [0, *itertools.accumulate(sizes)]
        batch[f"{branch}_cu_seq_lens_k"] = torch.tensor(ends, dtype=torch.int32)

    for _ in range(3):
        probe.begin_micro_batch(batch)
        probe.packing.look(None, probe.pairs.complete(TokenBatch(ids)))
        probe.begin_backward(torch.tensor(0.5))
        probe.begin_step()
        probe.close_step()

    tokens = sum(chosen) + sum(rejected)
    for step in events_of(probe, "step"):
        assert (step["tokens"], step["wasted"]) == (tokens, 4096 - tokens)
    packing, wasted = events_of(probe, "packing", "half_wasted")
    assert packing["state"] == "on"
    assert wasted["message"] == message


def test_a_row_without_room_for_the_next_pair_needs_no_larger_batch(tmp_path: Path) -> None:
    probe = make_probe(tmp_path)
    probe.packing.on = True
    probe.pairs.most = 4
    probe.pairs.tell_waste(900, 4096, 3, 700)
    (wasted,) = events_of(probe, "half_wasted")
    assert wasted["message"] == "batch 3 uses 22% of each step"


@pytest.mark.parametrize(("rank", "tokens", "positions"), [(0, 32, 80), (1, 0, 0), (2, 32, 80)])
def test_ranks_of_one_model_count_their_batch_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, tokens: int, positions: int
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("RANK", str(rank))
    probe = make_probe(tmp_path)
    probe.pairs.alike = 2
    mask = torch.zeros((2, 20), dtype=torch.int64)
    mask[:, :8] = 1
    batch = {}
    for branch in ("chosen", "rejected"):
        batch[f"{branch}_input_ids"] = mask
        batch[f"{branch}_attention_mask"] = mask
    probe.begin_micro_batch(batch)
    probe.begin_step()
    probe.close_step()
    (step,) = events_of(probe, "step")
    assert (step["tokens"], step["positions"]) == (tokens, positions)


@pytest.mark.parametrize(
    ("folders", "is_warned"),
    [
        ([], False),
        # what is written before the first step is no progress
        (["step0"], False),
        (["step0", "step40"], True),
    ],
)
def test_that_upstream_continues_by_itself_is_named(
    tmp_path: Path, folders: list[str], is_warned: bool
) -> None:
    for name in folders:
        (tmp_path / "out" / "x__7" / name).mkdir(parents=True)
    read = read_text(tmp_path, write_stage(f"output_dir: {tmp_path}/out", "exp_name: x", "seed: 7"))
    codes = {finding.code for finding in stage.check_unplanned(read, Machine())}
    assert ("resume-unjudged" in codes) is is_warned
