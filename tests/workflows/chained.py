"""A place where pipelines of up to three stages run, with a trainer that trains by hashing."""

import contextlib
import io
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SUPPORT
from fake_world import World
from parsed_answers import parse_answer
from small_stages import without_none

from launcher.cli import main
from launcher.errors import Exit

FAKE = SUPPORT / "fake_stages.py"
# Asked about itself, it answers as the tests' Python does; asked to train, it hashes.
PYTHON = f"""#!/bin/sh
if [ "$1" = -c ]; then exec {shlex.quote(sys.executable)} "$@"; fi
exec {shlex.quote(sys.executable)} -u {shlex.quote(str(FAKE))} "$@"
"""
QUESTION = {"role": "user", "content": "hi"}
CHOSEN = [QUESTION, {"role": "assistant", "content": "yes"}]
REJECTED = [QUESTION, {"role": "assistant", "content": "no"}]
# what the fake trainer logs of DPO is no loss of DPO
EXPECT = {"loss": "finite", "trend": "any", "packing": "any", "data": "any"}
OPEN_INSTRUCT_ARGS = {
    "do_not_randomize_output_dir": True,
    "push_to_hub": False,
    "try_launch_beaker_eval_jobs": False,
}


@dataclass(frozen=True)
class Answer:
    """What the command answered."""

    exit: int
    content: Any

    @property
    def stages(self) -> Any:
        return self.content.data.stages

    @property
    def statuses(self) -> str:
        return ", ".join(stage.status for stage in self.stages)

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.content.findings]

    def finding(self, code: str) -> Any:
        """The only finding of a code."""
        (finding,) = [f for f in self.content.findings if f.code == code]
        return finding


def answer_of(code: int, output: str) -> Answer:
    content = parse_answer(output)
    assert content.command == "pipeline"
    assert content.schema_version == 1
    assert content.ok is (code == Exit.OK)
    return Answer(code, content)


class Chained(World):
    """A world with a pipeline `p.yaml`; the model of each stage goes to `o/NAME`."""

    def stage(self, name: str, kind: str = "sft", **args: Any) -> Path:
        """Write a stage file; a value None leaves an argument out."""
        self.config()
        usual = {"dataset_name": "data", "output_dir": f"o/{name}", "learning_rate": 0.5}
        content = {
            "stage": kind,
            "backend": "trl",
            "deepspeed": "none",
            "expect": EXPECT,
            "batch": {"global": 2, "per_device": 2},
            "args": without_none(usual | args),
        }
        return self.write(f"{name}.yaml", content)

    def open_instruct(self, name: str, kind: str, data: str, **args: Any) -> Path:
        """Write a stage file for open-instruct, and a row that each of its stages reads."""
        row = {"messages": CHOSEN, "chosen": CHOSEN, "rejected": REJECTED}
        (self.root / "chats.jsonl").write_text(json.dumps(row) + "\n")
        args = {data: ["chats.jsonl", "8"], "output_dir": f"o/{name}", **OPEN_INSTRUCT_ARGS, **args}
        return self.write(f"{name}.yaml", {"stage": kind, "args": args})

    def pipeline(self, *stages: Any, **options: Any) -> Path:
        return self.write("p.yaml", {**options, "stages": list(stages)})

    def write(self, name: str, content: Any) -> Path:
        path = self.root / name
        path.write_text(yaml.safe_dump(content))
        return path

    def usual(self) -> Path:
        """A pipeline of three stages: first, then second and last, each on the one before."""
        self.stage("first", model_name_or_path="model")
        self.stage("second")
        self.stage("third", "dpo")
        self.write_row("a")
        return self.pipeline("first.yaml", "second.yaml", {"config": "third.yaml", "name": "last"})

    def write_row(self, text: str) -> None:
        """Write the only row that all stages train on."""
        row = {"text": text, "chosen": f"Say {text}.", "rejected": "Say no."}
        (self.root / "data" / "train.jsonl").write_text(json.dumps(row) + "\n")

    def words(self, *words: str) -> tuple[str, ...]:
        """The words of the command."""
        python = self.root / "hashing"
        python.write_text(PYTHON)
        python.chmod(0o755)
        return ("pipeline", "p.yaml", "--python", str(python), "--gpus", "0", *words)

    def run(self, *words: str) -> Answer:
        """Run the pipeline, in this process."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = main.main([*self.words("--format", "json", *words)])
        return answer_of(code, output.getvalue())

    def do(self, **steps: list[str]) -> None:
        """What the stages do before they save, by their output folders."""
        (self.root / "do.json").write_text(json.dumps(steps))

    def trained(self) -> str:  # type: ignore[override]
        """The output folders that were trained into since the last call."""
        return ", ".join(self.taken("trained"))

    @property
    def file(self) -> Path:
        return self.root / "p.yaml"

    def taken(self, name: str) -> list[str]:
        """The lines of a file that fakes write to, which begins anew."""
        path = self.root / name
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        path.unlink()
        return lines

    def weights(self, name: str) -> bytes:
        return (self.root / "o" / name / "weights.bin").read_bytes()


@contextlib.contextmanager
def entered(root: Path) -> Iterator[Chained]:
    """A new world that this process works in."""
    world = Chained(root)
    world.environ |= {"LAUNCH_REHEARSE": "0", "LAUNCH_GPU_LOCKS": str(root)}
    with pytest.MonkeyPatch.context() as patch:
        world.enter(patch)
        try:
            yield world
        finally:
            world.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Chained]:
    """A world with the usual pipeline, which has not run."""
    with entered(tmp_path / "world") as world:
        world.usual()
        yield world


@pytest.fixture(scope="module")
def finished_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of a world whose pipeline has run, beside the place where it ran."""
    folder = tmp_path_factory.mktemp("finished")
    with entered(folder / "world") as world:
        world.usual()
        answer = world.run()
        assert answer.statuses == "passed, passed, passed", answer
        assert world.trained() == "first, second, third"
        assert world.quiet()
    world.root.rename(folder / "copy")
    return folder


@pytest.fixture
def finished(finished_copy: Path) -> Iterator[Chained]:
    """A world whose pipeline has run: what it made is where it was."""
    with entered(finished_copy / "world") as world:
        shutil.copytree(finished_copy / "copy", world.root, dirs_exist_ok=True)
        yield world
    shutil.rmtree(world.root)
