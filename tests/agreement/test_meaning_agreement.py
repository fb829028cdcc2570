"""Rules about what open-instruct does, against the functions that do it, at the known commits.

Whoever moves the pin learns here which rules upstream has made false: launch is asked what it says
of a value, upstream's own function what becomes of it.
"""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import checkouts
import pytest
from conftest import NO_PACKAGES, PATIENCE_S, SUPPORT

from launcher.artifacts import checkpoints
from launcher.errors import Finding
from launcher.rules import output, registry
from launcher.rules.context import Context
from launcher.upstream import behaviour, locate
from launcher.upstream.schema import Schema, Values

pytestmark = pytest.mark.slow

OLMO_CORE = "dpo_olmo_core"

Request = dict[str, Any]
Answer = dict[str, Any]
Arguments = dict[str, Any]


class Upstream:
    """The real functions of one checkout, in a process that answers one request a line."""

    def __init__(self, root: Path, home: Path) -> None:
        path = [str(SUPPORT / "stand_ins"), str(root)]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(home),
            "PYTHONWARNINGS": "ignore",
        }
        self.log = home / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(SUPPORT / "real_open_instruct_functions.py"), str(root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                text=True,
            )

    def ask(self, kind: str, **values: Any) -> Answer:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"kind": kind, **values}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fail()
        line = self.process.stdout.readline()
        if not line:
            self.fail()
        answer: Answer = json.loads(line)
        return answer

    def refuses(self, kind: str, **values: Any) -> bool:
        return "refused" in self.ask(kind, **values)

    def fail(self) -> NoReturn:
        code = self.process.wait(PATIENCE_S)
        text = self.log.read_text()
        if code == 3:
            pytest.skip(f"{NO_PACKAGES}: {text.strip().splitlines()[-1]}")
        pytest.fail(text[-3000:])

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


@cache
def schema_of(root: Path, script: str) -> Schema:
    source = locate.locate("open_instruct", checkout=root)
    return locate.load_schema(source, script, allow_unpinned=True)


@dataclass(frozen=True)
class Launch:
    """What launch says of arguments at the commit of one checkout."""

    root: Path

    def schema(self, script: str) -> Schema:
        return schema_of(self.root, script)

    def findings(self, script: str, args: Arguments, **context: Any) -> list[Finding]:
        schema = self.schema(script)
        args = {
            "model_name_or_path": "Qwen/Qwen3-0.6B",
            "max_seq_length": 1024,
            "push_to_hub": False,
            **args,
        }
        values = Values(schema, {key: args[key] for key in args if key in schema.fields})
        in_context = registry.apply_in(Context(values=values, **context))
        return [*registry.apply(values), *in_context]

    def codes(self, script: str, args: Arguments, **context: Any) -> dict[str, str]:
        """The severity of each code that is found; the highest where a code is found twice."""
        codes: dict[str, str] = {}
        for finding in self.findings(script, args, **context):
            if codes.get(finding.code) != "error":
                codes[finding.code] = finding.severity
        return codes


@pytest.fixture(scope="module", params=checkouts.COMMITS, ids=lambda commit: commit[:8])
def root(request: pytest.FixtureRequest) -> Path:
    return checkouts.require(request.param)


@pytest.fixture(scope="module")
def upstream(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    process = Upstream(root, tmp_path_factory.mktemp("hub"))
    yield process
    process.close()


@pytest.fixture(scope="module")
def facts_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("facts")


@pytest.fixture(autouse=True)
def _read_sources_once(facts_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(facts_cache))


@pytest.fixture
def launch(root: Path) -> Launch:
    return Launch(root)


AMOUNTS = ("1.0", "0.5", "200", "1")
ODD_AMOUNTS = ("q", "", "1.5.2", "-3", "0", "0.0", "1e3", "1.e2")


@dataclass(frozen=True)
class Mixture:
    """A mixer list, and the splits for it."""

    words: list[str]
    splits: list[str]


def draw_mixture(chance: random.Random) -> Mixture:
    """A right or a wrong mixture; three of five amounts are usual ones."""
    count = chance.randint(1, 3)
    words = []
    for _ in range(count):
        words.append(chance.choice(("a", "some/set")))
        words.append(chance.choice(AMOUNTS * 4 + ODD_AMOUNTS))
    length = chance.choice([1, count, 2 * count, chance.randint(1, 6)])
    splits = []
    for _ in range(length):
        splits.append(chance.choice(("train", "test", "validation[:5]")))
    return Mixture(words, splits)


def refuses_mixture(answer: Answer) -> bool:
    """An amount that leaves nothing is refused when the rows are drawn."""
    if "refused" in answer:
        return True
    return not all(amount > 0 for _, _, amount in answer["sets"])


@pytest.fixture(scope="module")
def mixtures() -> list[Mixture]:
    chance = random.Random(20260820)
    return [draw_mixture(chance) for _ in range(150)]


def test_mixtures_are_refused_where_upstream_refuses_them_and_unread_splits_are_named(
    mixtures: list[Mixture], upstream: Upstream, launch: Launch
) -> None:
    for mixture in mixtures:
        answer = upstream.ask("splits", sets=mixture.words, splits=mixture.splits)
        args = {"dataset_mixer_list": mixture.words, "dataset_mixer_list_splits": mixture.splits}
        errors = []
        warnings = []
        for finding in launch.findings("sft", args):
            if finding.code in {"mixer-splits", "mixer-amount"}:
                if finding.severity == "error":
                    errors.append(finding)
                else:
                    warnings.append(finding)

        assert bool(errors) == refuses_mixture(answer), (mixture, answer)
        if errors:
            continue
        read = {split for _, split, _ in answer["sets"]}
        if warnings:
            assert len(mixture.splits) != len(answer["sets"]), (mixture, answer)
        else:
            assert set(mixture.splits) <= read, (mixture, answer)


SCHEDULES = (
    "linear cosine constant constant_with_warmup polynomial cosine_with_restarts inverse_sqrt"
)


@pytest.mark.parametrize("name", SCHEDULES.split())
def test_schedules(name: str, upstream: Upstream, launch: Launch) -> None:
    answer = upstream.ask("schedule", name=name)
    codes = launch.codes(OLMO_CORE, {"lr_scheduler_type": name})

    is_refused = codes.get("scheduler-type") == "error"
    assert is_refused == ("refused" in answer)

    is_constant = answer.get("class") == "ConstantWithWarmup"
    is_replaced = is_constant and not name.startswith("constant")
    has_warning = codes.get("scheduler-replaced") == "warning"
    assert has_warning == is_replaced


@pytest.mark.parametrize("limit", [-1, -1.0, -0.25, 0, 0.0, 0.5, 1, 1.0, 100.0])
@pytest.mark.parametrize(
    ("script", "key"),
    [("sft", "clip_grad_norm"), ("dpo", "max_grad_norm"), (OLMO_CORE, "max_grad_norm")],
)
def test_limits_of_the_gradient_norm(
    script: str, key: str, limit: float, upstream: Upstream, launch: Launch
) -> None:
    """An error where the gradient is reversed or made nothing; a warning only where none is cut."""
    factor = upstream.ask("clipping", script=script, limit=limit)["factor"]
    codes = launch.codes(script, {key: limit})
    assert (codes.get("reversed-gradient") == "error") == (factor <= 0)
    if codes.get("out-of-range") == "warning":
        assert factor == 1.0


def copy_model(model: Path, folder: Path, model_type: str) -> str:
    shutil.copytree(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["model_type"] = model_type
    path.write_text(json.dumps(config))
    return str(folder)


TEMPLATES = (None, "tulu", "olmo", "no_such_template", "simple_chat")


@pytest.mark.parametrize("model_type", ["qwen2", "olmo2"])
@pytest.mark.parametrize("name", ["plain", "my-OLMo"])
def test_templates_and_tokenizers(
    name: str,
    model_type: str,
    upstream: Upstream,
    launch: Launch,
    demo_assets: Path,
    tmp_path: Path,
) -> None:
    """The template that is chosen, and which tokenizers of OLMo are refused."""
    folder = copy_model(demo_assets / "model", tmp_path / name, model_type)
    for template, bos, fast in itertools.product(TEMPLATES, (False, True), (True, False)):
        args = {"tokenizer_name_or_path": folder, "add_bos": bos, "use_fast": fast}
        answer = upstream.ask("tokenizer", values={**args, "chat_template_name": template})
        if template is not None:
            args["chat_template_name"] = template

        codes = launch.codes("sft", args)

        reason = answer.get("refused", "")
        is_of_olmo = reason.startswith("AssertionError: For") and "GPTNeoX" not in reason
        assert ("olmo-tokenizer" in codes) == is_of_olmo, (args, reason)
        if template is not None and not reason:
            is_unknown = template not in answer["template"]
            assert ("unknown-template" in codes) == is_unknown, args


@pytest.mark.parametrize(
    ("complete", "incomplete"),
    [
        ("", ""),
        ("step_5 step_10", ""),
        ("step_5", "step_10"),
        ("step_9 step_10", "step_100"),
        ("epoch_0 epoch_1", ""),
        ("epoch_0", "epoch_1"),
        ("epoch_1", "step_5"),
        ("step_5 epoch_7", ""),
        ("step_7", "final runs"),
    ],
)
def test_the_checkpoint_that_a_run_continues_from(
    complete: str, incomplete: str, upstream: Upstream, launch: Launch, tmp_path: Path
) -> None:
    for name in [*complete.split(), *incomplete.split()]:
        (tmp_path / "run" / name).mkdir(parents=True)
    for name in complete.split():
        (tmp_path / "run" / name / "COMPLETED").touch()
    folder = tmp_path / "run"
    expected = upstream.ask("checkpoint", folder=str(folder))["name"]

    context = Context(values=Values(launch.schema("sft"), {}), output=folder)
    checkpoint = output._find_resumed(context)

    if expected is None:
        assert checkpoint is None
        return
    assert checkpoint is not None
    assert checkpoint.name == expected
    names = {found.name for found in checkpoints.find("open_instruct", folder)}
    assert expected in names


def test_intervals_and_numbers_of_checkpoints(upstream: Upstream, launch: Launch) -> None:
    all_steps = (-1, 0, 1, 100)
    ephemeral_steps = (None, -1, 0, 50, 100, 200)
    numbers = (-1, 0, 1, 3)
    for steps, ephemeral, keep in itertools.product(all_steps, ephemeral_steps, numbers):
        args = {"checkpointing_steps": steps, "keep_last_n_checkpoints": keep}
        if ephemeral is not None:
            args["ephemeral_save_interval"] = ephemeral
        codes = launch.codes(OLMO_CORE, args)
        is_refused = "error" in (codes.get("checkpoint-steps"), codes.get("out-of-range"))
        by_upstream = upstream.refuses("intervals", steps=steps, ephemeral=ephemeral, keep=keep)
        assert is_refused == by_upstream, args


@pytest.mark.parametrize("budget", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("mode", ["budget", "selected_modules"])
def test_an_idle_budget_of_activation_memory(
    budget: float, compiled: bool, mode: str, upstream: Upstream, launch: Launch
) -> None:
    args: Arguments = {"activation_memory_budget": budget, "compile_model": compiled}
    if "activation_checkpointing_mode" in launch.schema(OLMO_CORE).fields:
        args["activation_checkpointing_mode"] = mode
    answer = upstream.ask("recomputing", budget=budget, compile=compiled, mode=mode)
    is_idle = budget < 1 and not answer["recomputes"]
    codes = launch.codes(OLMO_CORE, args)
    assert (codes.get("budget-without-compile") == "warning") == is_idle


def test_packed_samples_see_each_other_where_the_model_is_not_given_their_lengths(
    upstream: Upstream, launch: Launch
) -> None:
    answer = upstream.ask("packed")
    codes = launch.codes(OLMO_CORE, {"packing": True, "attn_implementation": "flash_2"})
    leaks = "doc_lens" not in answer["told"]
    assert (codes.get("packing-leaks") == "warning") == leaks


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_frozen_biases_make_an_empty_group(
    script: str, biases: bool, upstream: Upstream, launch: Launch, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "attention_bias": biases}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = {"model_name_or_path": str(tmp_path), "use_lora": True}
    zero_2 = {"zero_optimization": {"stage": 2}}
    is_empty = upstream.ask("groups", script=script, biases=biases)["empty"]
    codes = launch.codes(script, args, deepspeed=zero_2, gpus=2)
    assert (codes.get("lora-biases") == "error") == is_empty


def keys_differ(answer: Answer) -> bool:
    return len(set(answer["keys"])) == 2


def is_not_a_number(answer: Answer) -> bool:
    return not answer["number"]


def shows_tools(answer: Answer) -> bool:
    return bool(answer["shown"])


@pytest.mark.parametrize(
    ("script", "name", "request_", "shows"),
    [
        pytest.param(
            "sft",
            behaviour.SEES_TEMPLATE,
            {"kind": "cache_key", "templates": ["a", "b"]},
            keys_differ,
            id="the key of a data set depends on the chat template",
        ),
        pytest.param(
            "dpo",
            behaviour.DIVIDES_BY_NO_TOKENS,
            {"kind": "masked"},
            is_not_a_number,
            id="an answer without a trained token is not a number",
        ),
        pytest.param(
            "sft",
            behaviour.GIVES_TOOLS,
            {"kind": "tools", "tools": [{"name": "lookup"}]},
            shows_tools,
            id="tools are given to the chat template",
        ),
    ],
)
def test_a_behaviour_is_what_the_function_does(
    script: str,
    name: str,
    request_: Request,
    shows: Callable[[Answer], bool],
    upstream: Upstream,
    launch: Launch,
    demo_assets: Path,
) -> None:
    answer = upstream.ask(**request_, model=str(demo_assets / "model"))
    assert launch.schema(script).does(name) is shows(answer)


SIZES = (
    "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads "
    "vocab_size head_dim"
).split()
"""What transformers calls the sizes of a model."""


@pytest.mark.parametrize(
    ("shape", "model_type", "sizes"),
    [
        ("olmo2_1B_v2", "olmo2", (16, 2048, 8192, 16, 16, 100352)),
        ("olmo3_7B", "olmo3", (32, 4096, 11008, 32, 32, 100278)),
        ("qwen3_0_6B", "qwen3", (28, 1024, 3072, 16, 8, 151936, 128)),
        ("llama3_8B", "llama", (32, 4096, 14336, 32, 8, 128256)),
        ("olmoe_1B_7B", "olmoe", ()),
    ],
)
def test_shapes_that_cannot_be_written_for_transformers(
    shape: str,
    model_type: str,
    sizes: tuple[int, ...],
    upstream: Upstream,
    launch: Launch,
    tmp_path: Path,
) -> None:
    config = dict(zip(SIZES, sizes, strict=False))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    codes = launch.codes(OLMO_CORE, {"model_name_or_path": str(tmp_path), "config_name": shape})
    is_refused = upstream.refuses("export", shape=shape, folder=str(tmp_path))
    assert ("no-hf-export" in codes) == is_refused
