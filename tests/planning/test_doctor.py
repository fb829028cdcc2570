"""What a machine lacks for a plan, each with what mends it."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import PATIENCE_S, REPOSITORY, Write
from fake_smi import Smi
from packaging.requirements import Requirement
from plans import CONFIGS, SFT, TRL, from_text, planned, staged, trainer

from launcher.cli.main import main
from launcher.errors import Exit, Finding, NotReady, launch_finding
from launcher.machine import devices, python
from launcher.machine.devices import Devices
from launcher.machine.python import Trainer
from launcher.plan.plan import Plan
from launcher.planning.doctor import checks, install, readiness
from launcher.planning.doctor.checks import Fact, Report, Subject
from launcher.planning.doctor.install import Imports, InstallStep
from launcher.planning.request import Request
from launcher.stage.stage import Stage
from launcher.upstream import behaviour, locate
from launcher.upstream.trainers import BACKENDS, Release

TULU = CONFIGS / "tulu" / "sft_qwen7b.yaml"
WITH_PIP = Trainer(
    python=Path("/env/my bin/python"), source="a test", version=(3, 12, 1), packages={"pip": "26"}
)
ALL = (*BACKENDS["open_instruct"].NEEDS, "liger-kernel", "flash-attn", "pip")


@pytest.fixture(autouse=True)
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    fake = Smi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake.cards(4, 4)
    return fake


def subject(made: Plan, *packages: str) -> Subject:
    return checks.of_plan(made, trainer(*packages))


def missing(made: Plan, *packages: str) -> list[str]:
    found = list(checks.packages(subject(made, *packages)))
    return [name for one in found for name in one.message.partition(" lacks ")[2].split(", ")]


def ready(made: Plan, python: Trainer) -> tuple[Finding, ...]:
    """What is warned of before a start on the GPUs here."""
    chosen = devices.choose_devices(made.gpus, None, devices.survey_devices(os.environ))
    return checks.require_ready(made, python, chosen)


def test_a_machine_that_is_ready() -> None:
    assert ready(planned(staged(TULU), 2), trainer(*ALL)) == ()


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    stage = from_text(tmp_path, SFT.format(more="").replace("[set,", f"[{data},"))
    stage = replace(stage, upstream=replace(stage.upstream, root=None))
    made = planned(stage, 8)
    with pytest.raises(NotReady) as caught:
        ready(made, trainer("torch", version=(3, 9, 2)))
    found = caught.value.findings
    assert list(dict.fromkeys(f.code for f in found)) == [
        "no-checkout", "old-python", "missing-packages", "too-few-gpus", "missing-data",
    ]  # fmt: skip
    assert {f.severity for f in found} == {"error"}
    assert all(f.help for f in found)


def test_the_command_that_installs() -> None:
    made = planned(staged(TULU), 2)
    (found,) = checks.packages(subject(made, *set(ALL) - {"flash-attn", "deepspeed", "wandb"}))
    # the pin begins without flash-attn
    assert found.message == "/env/bin/python (a test) lacks deepspeed, wandb"
    plain, built = (found.help or "").split("; then ")
    assert plain.startswith("/env/bin/python -m pip install")
    assert "'wandb>=0.23.1'" in plain and "ninja" in plain
    # what torch must be there for has a command of its own
    assert built.startswith("DS_BUILD_OPS=0 /env/bin/python -m pip install")
    assert "--no-build-isolation" in built and f"`launch doctor {TULU} --install`" in built


@pytest.mark.parametrize(
    ("more", "gpus", "expected"),
    [
        ("", 0, []),
        ("use_liger_kernel: true", 0, ["liger-kernel"]),
        ("use_peft: true\n  load_in_4bit: true", 0, ["peft", "bitsandbytes"]),
    ],
)
def test_what_the_arguments_need(tmp_path: Path, more: str, gpus: int, expected: list[str]) -> None:
    stage = from_text(tmp_path, TRL.format(data="some/set", more=more or "seed: 1"))
    assert missing(planned(stage, gpus), *BACKENDS["trl"].NEEDS) == expected


def refused(made: Plan) -> list[str]:
    with pytest.raises(NotReady) as caught:
        ready(made, trainer(*ALL))
    return [f"{one.code}: {one.message} | {one.help}" for one in caught.value.findings]


def test_a_driver_that_does_not_answer(smi: Smi) -> None:
    smi.fails("Failed to initialize NVML: Driver/library version mismatch", 18)
    (finding,) = refused(planned(staged(TULU), 1))
    assert finding.startswith("no-driver: nvidia-smi says: Failed to initialize NVML")


def with_torch(folder: Path, line: str) -> Trainer:
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{line}\n")
    return replace(trainer(*ALL), path=(folder,))


@pytest.mark.parametrize(
    ("line", "driver", "code"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0", None),
        # within a major version an older driver serves
        ("cuda = '13.2'", "13.0", None),
        ("cuda: Optional[str] = '13.0'", "12.8", "old-driver"),
        ("cuda: Optional[str] = None", "13.0", "cpu-torch"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2.1-abc'", "13.0", None),
    ],
)
def test_torch_against_the_driver(
    smi: Smi, tmp_path: Path, line: str, driver: str, code: str | None
) -> None:
    smi.cards(4, 4, cuda=driver)
    python, made = with_torch(tmp_path, line), planned(staged(TULU), 2)
    if code is None:
        assert ready(made, python) == ()
        return
    with pytest.raises(NotReady) as caught:
        ready(made, python)
    (finding,) = caught.value.findings
    assert finding.code == code
    assert "download.pytorch.org/whl/cu" in (finding.help or "")


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LEAST_SHM", 2**60)
    (finding,) = checks.shared_memory(2)
    assert (finding.severity, finding.code) == ("warning", "small-shm")
    assert list(checks.shared_memory(1)) == []


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A virtual environment with nothing in it, not even pip."""
    place = tmp_path_factory.mktemp("venv") / "a b"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return python.ask_trainer(place / "bin" / "python", "--python")


CHECKOUT = {
    "open_instruct/__init__.py": "",
    "open_instruct/finetune.py": "import thing\nfrom open_instruct import model_utils\n",
    "open_instruct/dpo_tune_cache.py": "import thing\n",
    "open_instruct/model_utils.py": "",
}


def examined(bare: Trainer, tmp_path: Path, thing: str, *, importing: bool = True) -> Report:
    """With a module `thing` on PYTHONPATH, as an image may have it."""
    for name, text in CHECKOUT.items():
        path = tmp_path / "check out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    site = tmp_path / "site"
    site.mkdir(exist_ok=True)
    (site / "thing.py").write_text(thing)
    packages = dict.fromkeys(BACKENDS["open_instruct"].NEEDS, "1.0") | {"thing": "1.5", "pip": "1"}
    asked = Subject(
        trainer=replace(bare, packages=packages, path=(*bare.path, site)),
        upstream=locate.locate("open_instruct", checkout=tmp_path / "check out"),
        stages=("sft",), gpus=0, runs=tmp_path / "runs",
        environ={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    return checks.examine(asked, Devices(), importing=importing, timeout_s=PATIENCE_S)


def codes(report: Report) -> list[str]:
    return [one.code for one in report.findings if one.code != "empty-submodule"]


def test_an_import_error_is_reported_as_one_with_its_place(bare: Trainer, tmp_path: Path) -> None:
    report = examined(bare, tmp_path, "x = 1\n\nfrom os import gone\n")
    (finding,) = [one for one in report.findings if one.code == "import-error"]
    assert (finding.file, finding.line) == (str(tmp_path / "site" / "thing.py"), 3)
    assert finding.message.startswith(
        "importing `open_instruct.finetune` fails: ImportError: cannot import name 'gone'"
    )
    assert "missing-packages" not in codes(report)
    assert report.exit_code is Exit.NOT_READY
    assert report.as_json()["facts"]["imports"]["failed"] == ["open_instruct.finetune"]


def test_a_checkout_that_is_not_the_pin(bare: Trainer, tmp_path: Path) -> None:
    report = examined(bare, tmp_path, "", importing=False)
    assert "unpinned-checkout" in codes(report)
    assert "imports" not in report.as_json()["facts"]


def test_the_second_dpo_script_has_packages_of_its_own(bare: Trainer) -> None:
    """Upstream's dpo.py imports what GRPO needs; launch's extras do not name that."""
    made = planned(staged(CONFIGS / "olmo_core" / "dpo_qwen3_0_6b.yaml"), 0)
    report = checks.examine(checks.of_plan(made, bare), Devices(), importing=False)
    (finding,) = [one for one in report.findings if one.code == "missing-packages"]
    assert "vllm, backoff, docker, openenv-core" in finding.message
    # it wants an older numpy than the tested one, and must not take another torch along
    last = report.install[-1].argv
    assert "vllm" in last and "torch==2.13.0" in last and "-c" not in last


def test_an_environment_without_trl(bare: Trainer, tmp_path: Path) -> None:
    asked = Subject(
        trainer=bare, upstream=locate.locate("trl", search=bare.path), stages=("sft", "dpo"),
        gpus=0, runs=tmp_path / "runs",
    )  # fmt: skip
    report = checks.examine(asked, Devices(why="on the CPU"))
    (missing,) = [one for one in report.findings if one.code == "missing-packages"]
    assert missing.message.endswith(
        "(--python) lacks torch, transformers, trl, accelerate, datasets"
    )
    assert "trl==1.16.0" in (missing.help or "")
    assert "import-error" not in codes(report)
    # there is no pip either
    assert report.install[0].argv == (str(bare.python), "-m", "ensurepip", "--upgrade")
    assert "trl==1.16.0" in report.install[1].argv
    assert json.dumps(report.as_json())
    assert any(line.startswith("run folders") for line in report.lines())


def trl_here() -> Stage:
    pytest.importorskip("trl")
    return staged(CONFIGS / "demo" / "sft.yaml")


@pytest.mark.training
def test_the_environment_of_the_tests_imports(tmp_path: Path) -> None:
    trl_here()
    own = python.ask_trainer(Path(sys.executable), "launch's own")
    asked = Subject(
        trainer=own, upstream=locate.locate("trl", search=own.path), stages=("sft",), gpus=0,
        runs=tmp_path / "runs",
    )  # fmt: skip
    report = checks.examine(asked, Devices(why="on the CPU"))
    assert not [one for one in report.findings if one.code in {"import-error", "missing-packages"}]
    assert "trl.trainer.sft_trainer" in report.as_json()["facts"]["imports"]["fine"]


def test_facts_of_gpus(smi: Smi, tmp_path: Path, write: Write) -> None:
    smi.cards(4, 70000)
    smi.processes((1, 999_999_999, 70000))
    seen = devices.survey_devices({})
    made = planned(staged(TULU), 1)
    report = checks.examine(
        subject(made, *ALL), devices.choose_devices(1, None, seen), look=seen, importing=False
    )
    facts = report.as_json()["facts"]
    assert facts["driver"] == {"version": "580.159.04", "cuda": (13, 0)}
    assert facts["GPU 1"]["used_by"].startswith("pid 999999999")
    assert facts["run gets"]["visible"] == "0"
    assert report.exit_code is Exit.OK
    assert "\n".join(report.lines()).count("NVIDIA H200") == 2
    assert report.lines()[-1] == "ready"
    broken = Finding(severity="error", layer="launch", code="no-checkout", message="")
    assert replace(report, findings=(broken,)).lines()[-1] == "not ready: no-checkout"
    assert [step.argv[0] for step in report.install] == ["/env/bin/python"] * len(report.install)
    assert install.tested()["flash-attn"] in report.install[-1].argv


def test_what_is_lacking(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "__init__.py").touch()
    (tmp_path / "absl.py").touch()
    trainer = replace(WITH_PIP, path=(tmp_path,), packages={"ai2-olmo-core": "1"})
    names = ("ai2-olmo-core", "here", "absl-py", "wandb", "pillow")
    assert install.missing(names, trainer) == ("wandb", "pillow")


def tried(
    trainer: Trainer, site: Path, *modules: str, timeout_s: float = PATIENCE_S, cuda: bool = False
) -> Imports:
    environ = {**os.environ, "PYTHONPATH": str(site)}
    return install.try_imports(modules, trainer, environ=environ, timeout_s=timeout_s, cuda=cuda)


def test_a_package_that_is_not_there(bare: Trainer, tmp_path: Path) -> None:
    # launch's folder holds a `rundir`, which an environment may have too
    answer = tried(bare, tmp_path, "json", "trl.trainer", "rundir")
    assert [one.missing for one in answer.failures] == ["trl", "rundir"]
    assert answer.failures[0].error == "ModuleNotFoundError"


BROKEN = {
    "ImportError": ("from os import no_such_name\n", 1, "cannot import name 'no_such_name'"),
    "SyntaxError": ("x = 1\nprint 'old'\n", 2, "Missing parentheses"),
    "RuntimeError": ("raise RuntimeError('built for\\n torch 1')\n", 1, "built for torch 1"),
    "ModuleNotFoundError": ("import _part_of_python\n", 1, "No module named '_part_of_python'"),
    "SystemExit": ("import sys\nsys.exit('no licence')\n", 2, "no licence"),
}


def test_packages_that_are_broken(bare: Trainer, tmp_path: Path) -> None:
    for error, (text, _, _) in BROKEN.items():
        (tmp_path / error).mkdir()
        (tmp_path / error / "__init__.py").write_text(f"from {error} import inner\n")
        (tmp_path / error / "inner.py").write_text(text)
    answer = tried(bare, tmp_path, *BROKEN, "json")
    assert [one.error for one in answer.failures] == list(BROKEN)
    for failure in answer.failures:
        _, line, message = BROKEN[failure.error]
        assert failure.missing is None
        assert (failure.file, failure.line) == (str(tmp_path / failure.error / "inner.py"), line)
        assert message in failure.message and "\n" not in failure.message


def test_the_cause_behind_other_exceptions(bare: Trainer, write: Write, tmp_path: Path) -> None:
    write("olmo_core.py", "import bettermap\n")
    (failure,) = tried(bare, tmp_path, "olmo_core").failures
    assert failure.missing == "bettermap"
    assert (failure.file, failure.line) == (str(tmp_path / "olmo_core.py"), 1)
    write(
        "lazy.py",
        "try:\n    import behind\nexcept Exception as e:\n    raise RuntimeError('no') from e\n",
    )
    write("behind.py", "1 / 0\n")
    (failure,) = tried(bare, tmp_path, "lazy").failures
    assert (failure.error, failure.file) == ("ZeroDivisionError", str(tmp_path / "behind.py"))


def test_an_interpreter_that_dies_or_hangs(bare: Trainer, write: Write, tmp_path: Path) -> None:
    write("dies.py", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    answer = tried(bare, tmp_path, "json", "no_such", "dies", "csv")
    found = {one.module: (one.error, one.missing) for one in answer.failures}
    assert found == {"no_such": ("ModuleNotFoundError", "no_such"), "dies": ("SIGSEGV", None)}
    write("hangs.py", "import time\ntime.sleep(600)\n")
    (failure,) = tried(bare, tmp_path, "json", "hangs", "csv", timeout_s=2).failures
    assert (failure.module, failure.error) == ("hangs", "TimeoutError after 2 s")


def test_torch_is_asked_for_its_gpus(bare: Trainer, write: Write, tmp_path: Path) -> None:
    cuda = "class cuda:\n    device_count = staticmethod(lambda: 2)\n"
    cuda += "class version:\n    cuda = '13.0'\n__version__ = '2.13.0'\n"
    write(
        "torch.py", cuda + "def ones(*a, **k):\n    raise RuntimeError('driver too old\\nmore')\n"
    )
    assert tried(bare, tmp_path, "torch", cuda=True).cuda == {
        "version": "2.13.0", "cuda": "13.0", "count": 2, "error": "RuntimeError: driver too old",
    }  # fmt: skip
    assert tried(bare, tmp_path, "json", cuda=True).cuda is None


def names(steps: tuple[InstallStep, ...]) -> list[list[str]]:
    found = []
    for step in steps:
        words = [w for w in step.argv[step.argv.index("install") + 1 :] if not w.startswith("--no")]
        words = words[2:] if words[0] == "-c" else words
        found.append([Requirement(word).name for word in words])
    return found


def test_the_order_of_what_is_installed() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = extras["optional-dependencies"]
    for extra in ("trl", "open-instruct"):
        told = {name for step in names(install.steps(WITH_PIP, extra, gpus=True)) for name in step}
        asked = {Requirement(text).name for text in (*wanted[extra], *wanted["gpu"])}
        assert asked <= told
    assert install.extras()["gpu"] == wanted["gpu"]
    # what imports torch while it is built comes after it
    steps = install.steps(WITH_PIP, "open-instruct", gpus=True)
    order = names(steps)
    assert {"torch", "setuptools", "wheel", "ninja", "hjson"} <= set(order[0])
    assert "deepspeed" not in order[0]
    assert order[1:] == [["deepspeed", "flash-attn"]]
    assert steps[1].env == {"DS_BUILD_OPS": "0"} and "--no-build-isolation" in steps[1].argv
    assert "flash-attn" not in str(names(install.steps(WITH_PIP, "open-instruct", gpus=False)))
    # single packages
    (step,) = install.install(WITH_PIP, ["ray>=2", "wandb"])
    assert step.argv[:4] == ("/env/my bin/python", "-m", "pip", "install")
    assert step.argv[-2:] == ("ray>=2", "wandb")
    assert step.shell().startswith("'/env/my bin/python' -m pip install")
    # the build finds no torch where none is there
    assert "torch" in names(install.install(WITH_PIP, ["flash-attn"]))[0]
    ready = replace(
        WITH_PIP, packages={"pip": "1", "torch": "2", **dict.fromkeys(install.BUILD, "1")}
    )
    assert names(install.install(ready, ["flash-attn"])) == [["flash-attn"]]


def test_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(WITH_PIP, packages={})
    first, second = install.install(bare, ["ray"])
    assert first.argv == ("/env/my bin/python", "-m", "ensurepip", "--upgrade")
    assert second.argv[1:3] == ("-m", "pip")
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (only,) = install.install(bare, ["ray"])
    assert only.argv[:5] == (str(uv), "pip", "install", "--python", "/env/my bin/python")


@pytest.mark.parametrize(("detects", "lacking"), [(False, True), (True, False)])
def test_flash_attn_is_needed_where_looking_for_it_fails_without(
    detects: bool, lacking: bool
) -> None:
    """Since #1716 open-instruct trains with torch's attention where flash-attn is not installed."""
    made = planned(staged(TULU), 2)
    behaviours = {**made.stage.schema.behaviours, behaviour.DETECTS_WITHOUT_FLASH: detects}
    schema = replace(made.stage.schema, behaviours=behaviours)
    made = replace(made, stage=replace(made.stage, schema=schema))
    assert ("flash-attn" in checks.needed(subject(made))) == lacking


@pytest.mark.parametrize(
    "release", BACKENDS["open_instruct"].KNOWN, ids=lambda release: release.version[:8]
)
def test_without_a_plan_the_commit_decides_whether_flash_attn_is_needed(release: Release) -> None:
    source = locate.Upstream(
        backend="open_instruct", root=Path("/x"), source="found", is_named=False, pin=BACKENDS["open_instruct"].PIN,
        version=release.version, release=release.version,
    )  # fmt: skip
    asked = Subject(trainer=trainer(), upstream=source, stages=("sft",), gpus=2)
    is_needed = release.version == BACKENDS["open_instruct"].BASELINE
    assert ("flash-attn" in checks.needed(asked)) is is_needed


@pytest.mark.parametrize(
    ("config", "overrides", "is_needed"),
    [
        ("olmo_core/dpo_olmo2_7b_16k.yaml", ["packing=true"], True),
        ("olmo_core/dpo_olmo2_7b_16k.yaml", ["packing=false", "expect.packing=any"], False),
        ("olmo_core/sft_olmo2_7b.yaml", [], True),
    ],
)
def test_packed_rows_of_olmo_core_need_flash_attn(
    config: str, overrides: list[str], is_needed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer's Python has none: what installs it stands beside what the start would be refused with."""
    words = ["--python", sys.executable, "--gpus", "4", "--install", "--format", "json"]
    assert main(["doctor", str(CONFIGS / config), *overrides, *words]) == Exit.NOT_READY
    findings = {f["code"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    lacking = findings["missing-packages"]["message"].partition(" lacks ")[2].split(", ")
    assert ("flash-attn" in lacking) is is_needed
    assert ("packing-refused" in findings) is is_needed


def test_each_trainer_is_examined_where_none_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine(request: Request, backend: str) -> Report:
        lacking = launch_finding("error", "missing-packages", f"{backend} lacks some")
        source = Fact("source", f"{backend} 1.0")
        room = Fact("temporary files", "/tmp, 1 GiB free")
        findings = () if backend in ready_ones else (lacking,)
        return Report(findings=findings, facts=(source, room), install=())

    monkeypatch.setattr(readiness, "of_backend", examine)
    ready_ones = {"trl"}
    assert main(["doctor", "--format", "json"]) == Exit.OK
    answer = json.loads(capsys.readouterr().out)
    assert {name: report["ready"] for name, report in answer["data"]["trainers"].items()} == {
        "open_instruct": False,
        "trl": True,
    }
    assert [finding["severity"] for finding in answer["findings"]] == ["note"]
    assert main(["doctor"]) == Exit.OK
    out = capsys.readouterr().out
    assert out.count("temporary files") == 1
    assert "open_instruct: not ready: missing-packages" in out
    assert "trl: ready" in out
    ready_ones = set()
    assert main(["doctor"]) == Exit.NOT_READY
