"""Rules about what open-instruct does, against the functions that do it, on generated values, at known commits.

Whoever moves the pin learns here which rules upstream has made false: launch is asked what it says of a value,
upstream's own function what becomes of it.
"""

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
SEED = 20260820
OLMO_CORE = "dpo_olmo_core"
MODEL: Mapping[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "max_seq_length": 1024,
    "push_to_hub": False,
}
NAMES = ("a", "some/set", "b.jsonl")
AMOUNTS = ("1.0", "0.5", "200", "1", "q", "", "1.5.2", "-3", "0", "0.0", "1e3", "1.e2")
SPLITS = ("train", "test", "validation[:5]")
SCHEDULES = "linear cosine constant constant_with_warmup polynomial cosine_with_restarts inverse_sqrt".split()
LIMITS = (None, -1, -1.0, -0.25, 0, 0.0, 0.5, 1, 1.0, 100.0)
TEMPLATES = (None, "tulu", "olmo", "no_such_template", "simple_chat")
Request = dict[str, Any]


class Upstream:
    """The real functions of one checkout, by a process that answers one request a line."""

    def __init__(self, root: Path, home: Path) -> None:
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SUPPORT / "stand_ins"), str(root)]),
        }
        environ |= {
            "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        self.log = home / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(SUPPORT / "real_open_instruct_functions.py"), str(root)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ, text=True,
            )  # fmt: skip

    def ask(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        answers = []
        for request in requests:
            try:
                self.process.stdin.write(f"{json.dumps(request)}\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                self.ended()
            line = self.process.stdout.readline()
            if not line:
                self.ended()
            answers.append(json.loads(line))
        return answers

    def ended(self) -> NoReturn:
        code = self.process.wait(PATIENCE_S)
        written = self.log.read_text()
        if code == 3:
            pytest.skip(f"{NO_PACKAGES}: {written.strip().splitlines()[-1]}")
        pytest.fail(written[-3000:])

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
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

    def findings(self, script: str, given: Mapping[str, Any], **context: Any) -> list[Finding]:
        schema = self.schema(script)
        known = {name: value for name, value in {**MODEL, **given}.items() if name in schema.fields}
        values = Values(schema, known)
        return [*registry.apply(values), *registry.apply_in(Context(values=values, **context))]

    def codes(
        self, script: str, given: Mapping[str, Any], severity: str = "error", **context: Any
    ) -> set[str]:
        return {
            found.code
            for found in self.findings(script, given, **context)
            if found.severity == severity
        }


@pytest.fixture(
    scope="module", params=checkouts.COMMITS, ids=[commit[:8] for commit in checkouts.COMMITS]
)
def root(request: pytest.FixtureRequest) -> Path:
    return checkouts.require(request.param)


@pytest.fixture(scope="module")
def upstream(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    process = Upstream(root, tmp_path_factory.mktemp("hub"))
    yield process
    process.close()


@pytest.fixture(scope="module")
def read_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("facts")


@pytest.fixture(autouse=True)
def _read_once(read_once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of a source is kept for the tests that come after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(read_once))


@pytest.fixture
def launch(root: Path) -> Launch:
    return Launch(root)


def mixtures(count: int) -> list[tuple[list[str], list[str]]]:
    """Mixer lists and splits for them, right and wrong ones."""
    draw = random.Random(SEED)
    made = []
    for _ in range(count):
        sets = draw.randint(1, 3)
        mixture = [
            word
            for _ in range(sets)
            for word in (draw.choice(NAMES[:2]), draw.choice(AMOUNTS[:4] * 3 + AMOUNTS))
        ]
        length = draw.choice([1, sets, 2 * sets, draw.randint(1, 6)])
        made.append((mixture, [draw.choice(SPLITS) for _ in range(length)]))
    return made


def test_mixtures_and_their_splits(upstream: Upstream, launch: Launch) -> None:
    """A list is refused where upstream refuses it, and a split called unread where upstream reads another."""
    drawn = mixtures(150)
    answers = upstream.ask(
        [{"kind": "splits", "sets": sets, "splits": splits} for sets, splits in drawn]
    )
    wrong = []
    for (sets, splits), answer in zip(drawn, answers, strict=True):
        given = {"dataset_mixer_list": sets, "dataset_mixer_list_splits": splits}
        found = [
            one
            for one in launch.findings("sft", given)
            if one.code in {"mixer-splits", "mixer-amount"}
        ]
        errors = [one for one in found if one.severity == "error"]
        # an amount that leaves nothing is refused when the rows are drawn
        refused = "refused" in answer or any(
            not amount > 0 for _, _, amount in answer.get("sets", ())
        )
        if bool(errors) != refused:
            wrong.append((sets, splits, answer, [one.message for one in errors]))
        unread = {str(one.key) for one in found if one.severity == "warning"}
        if not refused:
            # what launch says that a set gets is what upstream gives it
            read = {split for _, split, _ in answer["sets"]}
            wrong += [
                (sets, splits, answer, key) for key in unread if len(splits) == len(answer["sets"])
            ]
            wrong += [
                (sets, splits, answer, "not said") for split in set(splits) - read if not unread
            ]
    assert not wrong


def test_schedules(upstream: Upstream, launch: Launch) -> None:
    answers = upstream.ask([{"kind": "schedule", "name": name} for name in SCHEDULES])
    for name, answer in zip(SCHEDULES, answers, strict=True):
        given = {"lr_scheduler_type": name}
        refused = "scheduler-type" in launch.codes(OLMO_CORE, given)
        replaced = "scheduler-replaced" in launch.codes(OLMO_CORE, given, "warning")
        constant = answer.get("class") == "ConstantWithWarmup"
        assert refused == ("refused" in answer), name
        assert replaced == (constant and not name.startswith("constant")), name


@pytest.mark.parametrize(
    ("script", "key"),
    [("sft", "clip_grad_norm"), ("dpo", "max_grad_norm"), (OLMO_CORE, "max_grad_norm")],
)
def test_limits_of_the_gradient_norm(
    upstream: Upstream, launch: Launch, script: str, key: str
) -> None:
    """An error where the gradient is reversed or made nothing, a word where a limit clips nothing."""
    limits = [limit for limit in LIMITS if limit is not None]
    answers = upstream.ask(
        [{"kind": "clipping", "script": script, "limit": limit} for limit in limits]
    )
    for limit, answer in zip(limits, answers, strict=True):
        factor = answer["factor"]
        codes = launch.codes(script, {key: limit})
        warned = "out-of-range" in launch.codes(script, {key: limit}, "warning")
        assert ("reversed-gradient" in codes) == (factor <= 0), (limit, factor)
        assert not warned or factor == 1.0, (limit, factor)


def test_templates_and_tokenizers(
    upstream: Upstream, launch: Launch, demo_assets: Path, tmp_path: Path
) -> None:
    """The template that is chosen, and which tokenizers are refused, by their names and by their configs."""
    folders = []
    for name, kind in itertools.product(("plain", "my-OLMo"), ("qwen2", "olmo2")):
        folder = tmp_path / kind / name
        folder.mkdir(parents=True)
        for file in (demo_assets / "model").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
        folders.append(str(folder))
    drawn = [
        {
            "tokenizer_name_or_path": folder,
            "chat_template_name": template,
            "add_bos": bos,
            "use_fast": fast,
        }
        for folder, template, bos, fast in itertools.product(
            folders, TEMPLATES, (False, True), (True, False)
        )
    ]
    answers = upstream.ask([{"kind": "tokenizer", "values": values} for values in drawn])
    wrong = []
    for values, answer in zip(drawn, answers, strict=True):
        given = {name: value for name, value in values.items() if value is not None}
        by_launch = launch.findings("sft", given)
        refused = any(found.code == "olmo-tokenizer" for found in by_launch)
        asserted = answer.get("refused", "").startswith("AssertionError: For")
        asserted = asserted and "GPTNeoX" not in answer["refused"]
        if refused != asserted:
            wrong.append((values, answer, [found.code for found in by_launch]))
        template = values["chat_template_name"]
        if template is not None and "refused" not in answer:
            unknown = any(found.code == "unknown-template" for found in by_launch)
            if unknown != (template not in answer["template"]):
                wrong.append((values, answer, "template"))
    assert not wrong


LAYOUTS = (
    [],
    ["step_5*", "step_10*"],
    ["step_5*", "step_10"],
    ["step_9*", "step_10*", "step_100"],
    ["epoch_0*", "epoch_1*"],
    ["epoch_0*", "epoch_1"],
    ["step_5", "epoch_1*"],
    ["step_5*", "epoch_7*"],
    ["step_7*", "final", "runs"],
)


def test_the_checkpoint_that_a_run_continues_from(
    upstream: Upstream, launch: Launch, tmp_path: Path
) -> None:
    """Folders with a star are marked as complete."""
    folders = []
    for number, names in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names:
            place = folder / name.rstrip("*")
            place.mkdir()
            if name.endswith("*"):
                (place / "COMPLETED").touch()
        folders.append(folder)
    answers = upstream.ask([{"kind": "checkpoint", "folder": str(folder)} for folder in folders])
    values = Values(launch.schema("sft"), {})
    for folder, names, answer in zip(folders, LAYOUTS, answers, strict=True):
        taken = output._taken(Context(values=values, output=folder))
        assert (None if taken is None else taken.name) == answer["name"], names
        assert {one.name for one in checkpoints.find("open_instruct", folder)} >= (
            {answer["name"]} - {None}
        )


def test_intervals_and_numbers_of_checkpoints(upstream: Upstream, launch: Launch) -> None:
    drawn = [*itertools.product((-1, 0, 1, 100), (None, -1, 0, 50, 100, 200), (-1, 0, 1, 3))]
    requests = [
        {"kind": "intervals", "steps": steps, "ephemeral": ephemeral, "keep": keep}
        for steps, ephemeral, keep in drawn
    ]
    wrong = []
    for (steps, ephemeral, keep), answer in zip(drawn, upstream.ask(requests), strict=True):
        given = {"checkpointing_steps": steps, "keep_last_n_checkpoints": keep}
        given |= {} if ephemeral is None else {"ephemeral_save_interval": ephemeral}
        codes = launch.codes(OLMO_CORE, given) & {"checkpoint-steps", "out-of-range"}
        if bool(codes) != ("refused" in answer):
            wrong.append((steps, ephemeral, keep, answer, codes))
    assert not wrong


def test_what_recomputes_activations(upstream: Upstream, launch: Launch) -> None:
    modes = ("budget", "selected_modules")
    if "activation_checkpointing_mode" not in launch.schema(OLMO_CORE).fields:
        modes = ("budget",)
    drawn = [*itertools.product((0.3, 0.9, 1.0), (True, False), modes)]
    requests = [{"kind": "recomputing", "budget": b, "compile": c, "mode": m} for b, c, m in drawn]
    for (budget, compiled, mode), answer in zip(drawn, upstream.ask(requests), strict=True):
        given = {
            "activation_memory_budget": budget,
            "compile_model": compiled,
            "activation_checkpointing_mode": mode,
        }
        idle = "budget-without-compile" in launch.codes(OLMO_CORE, given, "warning")
        assert idle == (budget < 1 and not answer["recomputes"]), (budget, compiled, mode)


def test_packed_samples(upstream: Upstream, launch: Launch) -> None:
    """That samples see each other is said where the model is not told where one ends."""
    (answer,) = upstream.ask([{"kind": "packed"}])
    given = {"packing": True, "attn_implementation": "flash_2"}
    assert ("packing-leaks" in launch.codes(OLMO_CORE, given, "warning")) == (
        "doc_lens" not in answer["told"]
    )


@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_frozen_biases(upstream: Upstream, launch: Launch, script: str, tmp_path: Path) -> None:
    requests = [{"kind": "groups", "script": script, "biases": biases} for biases in (True, False)]
    for biases, answer in zip((True, False), upstream.ask(requests), strict=True):
        folder = tmp_path / str(biases)
        folder.mkdir()
        config = {"model_type": "llama", "attention_bias": biases}
        (folder / "config.json").write_text(json.dumps(config))
        given = {"model_name_or_path": str(folder), "use_lora": True}
        codes = launch.codes(script, given, deepspeed={"zero_optimization": {"stage": 2}}, gpus=2)
        assert ("lora-biases" in codes) == answer["empty"], biases


def behaves(name: str) -> Callable[[Launch, str], bool | None]:
    return lambda launch, script: launch.schema(script).does(name)


FACTS: Mapping[str, tuple[Request, str, str, Callable[[dict[str, Any]], bool]]] = {
    "the key of a data set sees the chat template": (
        {"kind": "cache_key", "templates": ["a", "b"]}, "sft", behaviour.SEES_TEMPLATE,
        lambda answer: len(set(answer["keys"])) == 2,
    ),
    "an answer without a trained token is not a number": (
        {"kind": "masked"}, "dpo", behaviour.DIVIDES_BY_NO_TOKENS, lambda answer: not answer["number"],
    ),
    "tools are given to the chat template": (
        {"kind": "tools", "tools": [{"name": "lookup"}]}, "sft", behaviour.GIVES_TOOLS, lambda answer: answer["shown"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("request_", "script", "name", "shows"), FACTS.values(), ids=FACTS)
def test_facts(
    upstream: Upstream, launch: Launch, demo_assets: Path,
    request_: Request, script: str, name: str, shows: Callable[[dict[str, Any]], bool],
) -> None:  # fmt: skip
    (answer,) = upstream.ask([{**request_, "model": str(demo_assets / "model")}])
    assert launch.schema(script).does(name) is shows(answer)


# as transformers writes them, of the sizes that OLMo-core's shapes have: layers, hidden, inner, heads, keys, words
SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "head_dim",
)  # fmt: skip
SHAPES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "olmo2_1B_v2": ("olmo2", (16, 2048, 8192, 16, 16, 100352)),
    "olmo3_7B": ("olmo3", (32, 4096, 11008, 32, 32, 100278)),
    "qwen3_0_6B": ("qwen3", (28, 1024, 3072, 16, 8, 151936, 128)),
    "llama3_8B": ("llama", (32, 4096, 14336, 32, 8, 128256)),
    "olmoe_1B_7B": ("olmoe", ()),
}


def test_shapes_that_cannot_be_written_for_transformers(
    upstream: Upstream, launch: Launch, tmp_path: Path
) -> None:
    requests = []
    for shape, (kind, sizes) in SHAPES.items():
        folder = tmp_path / shape
        folder.mkdir()
        config = dict(zip(SIZES, sizes, strict=False))
        (folder / "config.json").write_text(json.dumps({"model_type": kind, **config}))
        requests.append({"kind": "export", "shape": shape, "folder": str(folder)})
    for request, answer in zip(requests, upstream.ask(requests), strict=True):
        given = {"model_name_or_path": request["folder"], "config_name": request["shape"]}
        said = {one.code for one in launch.findings(OLMO_CORE, given)}
        assert ("no-hf-export" in said) == ("refused" in answer), (request["shape"], answer)
