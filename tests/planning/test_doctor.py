"""What a machine lacks for a plan, each with what mends it."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import PATIENCE_S, REPOSITORY, Write
from fake_smi import Smi
from packaging.requirements import Requirement
from plans import CONFIGS, SFT, TRL, from_text, load_stage, make_plan, trainer

from launcher.cli.main import main
from launcher.errors import Exit, Finding, NotReady, launch_finding
from launcher.machine import devices, python
from launcher.machine.devices import Devices
from launcher.machine.python import Trainer
from launcher.plan.plan import Plan
from launcher.planning.doctor import checks, install, readiness
from launcher.planning.doctor.checks import Fact, Report, Subject
from launcher.planning.doctor.install import Failure, Imports, InstallStep
from launcher.planning.request import Request
from launcher.upstream import behaviour, locate
from launcher.upstream.trainers import BACKENDS, Release

TULU = CONFIGS / "tulu" / "sft_qwen7b.yaml"
WITH_PIP = Trainer(
    python=Path("/env/my bin/python"), source="a test", version=(3, 12, 1), packages={"pip": "26"}
)
OPEN_INSTRUCT = BACKENDS["open_instruct"]
ALL = (*OPEN_INSTRUCT.NEEDS, "liger-kernel", "flash-attn", "pip")
ON_THE_CPU = Devices(why="on the CPU")


@pytest.fixture(autouse=True)
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """A machine with two cards."""
    fake = Smi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake.cards(4, 4)
    return fake


def plan_tulu(gpus: int = 2) -> Plan:
    return make_plan(load_stage(TULU), gpus)


def subject(plan: Plan, *packages: str) -> Subject:
    return checks.make_subject(plan, trainer(*packages))


def packages_that_lack(findings: Sequence[Finding]) -> list[str]:
    """The packages that the one finding about packages names."""
    (finding,) = [finding for finding in findings if finding.code == "missing-packages"]
    return finding.message.partition(" lacks ")[2].split(", ")


def require_ready(plan: Plan, python: Trainer) -> tuple[Finding, ...]:
    """The warnings before a start on the GPUs here."""
    chosen = devices.choose_devices(plan.gpus, None, devices.survey_devices(os.environ))
    return checks.require_ready(plan, python, chosen)


def refuse(plan: Plan, python: Trainer) -> tuple[Finding, ...]:
    """The errors that keep a start from the GPUs here."""
    with pytest.raises(NotReady) as caught:
        require_ready(plan, python)
    for finding in caught.value.findings:
        assert finding.severity == "error"
        assert finding.help
    return caught.value.findings


def test_a_machine_that_is_ready() -> None:
    assert require_ready(plan_tulu(), trainer(*ALL)) == ()


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    text = SFT.format(more="").replace("[set,", f"[{tmp_path / 'rows.jsonl'},")
    stage = from_text(tmp_path, text)
    stage = replace(stage, upstream=replace(stage.upstream, root=None))
    findings = refuse(make_plan(stage, 8), trainer("torch", version=(3, 9, 2)))
    assert list(dict.fromkeys(finding.code for finding in findings)) == [
        "no-checkout",
        "old-python",
        "missing-packages",
        "too-few-gpus",
        "missing-data",
    ]


def test_the_command_that_installs() -> None:
    # the pin begins without flash-attn
    packages = set(ALL) - {"flash-attn", "deepspeed", "wandb"}
    (finding,) = checks.check_packages(subject(plan_tulu(), *packages))
    assert finding.message == "/env/bin/python (a test) lacks deepspeed, wandb"
    plain, built = str(finding.help).split("; then ")
    assert plain.startswith("/env/bin/python -m pip install")
    assert "'wandb>=0.23.1'" in plain
    assert "ninja" in plain
    # what torch must be there for has a command of its own
    assert built.startswith("DS_BUILD_OPS=0 /env/bin/python -m pip install")
    assert "--no-build-isolation" in built
    assert f"`launch doctor {TULU} --install`" in built


@pytest.mark.parametrize(
    "more, lacking",
    [
        ("use_liger_kernel: true", ["liger-kernel"]),
        ("use_peft: true\n  load_in_4bit: true", ["peft", "bitsandbytes"]),
    ],
)
def test_arguments_need_packages_of_their_own(
    tmp_path: Path, more: str, lacking: list[str]
) -> None:
    needs = BACKENDS["trl"].NEEDS
    plain = make_plan(from_text(tmp_path, TRL.format(data="some/set", more="seed: 1")))
    assert list(checks.check_packages(subject(plain, *needs))) == []
    plan = make_plan(from_text(tmp_path, TRL.format(data="some/set", more=more)))
    assert packages_that_lack(list(checks.check_packages(subject(plan, *needs)))) == lacking


def test_a_driver_that_does_not_answer(smi: Smi) -> None:
    smi.fails("Failed to initialize NVML: Driver/library version mismatch", 18)
    (finding,) = refuse(plan_tulu(1), trainer(*ALL))
    assert finding.code == "no-driver"
    assert finding.message.startswith("nvidia-smi says: Failed to initialize NVML")


@pytest.mark.parametrize(
    "line, driver, code",
    [
        # within a major version an older driver serves
        ("cuda = '13.2'", "13.0", None),
        ("cuda: Optional[str] = '13.0'", "12.8", "old-driver"),
        ("cuda: Optional[str] = None", "13.0", "cpu-torch"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2.1-abc'", "13.0", None),
    ],
)
def test_torch_against_the_driver(
    smi: Smi, write: Write, line: str, driver: str, code: str | None
) -> None:
    smi.cards(4, 4, cuda=driver)
    module = write("torch/version.py", f"__version__ = '2.13.0'\ndebug = False\n{line}\n")
    python = replace(trainer(*ALL), path=(module.parent.parent,))
    if code is None:
        assert require_ready(plan_tulu(), python) == ()
        return
    (finding,) = refuse(plan_tulu(), python)
    assert finding.code == code
    assert "download.pytorch.org/whl/cu" in str(finding.help)


def test_little_shared_memory_is_warned_of_on_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LEAST_SHM", 2**60)
    (finding,) = checks.check_shared_memory(2)
    assert finding.severity == "warning"
    assert finding.code == "small-shm"
    assert list(checks.check_shared_memory(1)) == []


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A virtual environment with nothing in it, not even pip."""
    place = tmp_path_factory.mktemp("venv") / "a b"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return python.ask_trainer(place / "bin" / "python", "--python")


def examine(bare: Trainer, write: Write, thing: str, *, importing: bool = True) -> Report:
    """Examine a checkout that imports a module `thing`, which PYTHONPATH has."""
    script = "import thing\nfrom open_instruct import model_utils\n"
    write("check out/open_instruct/__init__.py", "")
    write("check out/open_instruct/finetune.py", script)
    write("check out/open_instruct/dpo_tune_cache.py", "import thing\n")
    checkout = write("check out/open_instruct/model_utils.py", "").parent.parent
    site = write("site/thing.py", thing).parent
    packages = dict.fromkeys((*OPEN_INSTRUCT.NEEDS, "thing", "pip"), "1.0")
    asked = Subject(
        trainer=replace(bare, packages=packages, path=(*bare.path, site)),
        upstream=locate.locate("open_instruct", checkout=checkout),
        stages=("sft",),
        gpus=0,
        runs=site / "runs",
        environ={**os.environ, "PYTHONPATH": str(site)},
    )
    return checks.examine(asked, Devices(), importing=importing, timeout_s=PATIENCE_S)


def test_an_import_error_is_reported_with_its_place(
    bare: Trainer, write: Write, tmp_path: Path
) -> None:
    report = examine(bare, write, "x = 1\n\nfrom os import gone\n")
    findings = {finding.code: finding for finding in report.findings}
    assert "missing-packages" not in findings
    finding = findings["import-error"]
    assert finding.file == str(tmp_path / "site" / "thing.py")
    assert finding.line == 3
    error = "ImportError: cannot import name 'gone'"
    assert finding.message.startswith(f"importing `open_instruct.finetune` fails: {error}")
    assert report.exit_code is Exit.NOT_READY
    assert report.as_json()["facts"]["imports"]["failed"] == ["open_instruct.finetune"]


def test_a_checkout_that_is_not_the_pin(bare: Trainer, write: Write) -> None:
    report = examine(bare, write, "", importing=False)
    assert "unpinned-checkout" in [finding.code for finding in report.findings]
    assert "imports" not in report.as_json()["facts"]


def test_the_second_dpo_script_has_packages_of_its_own(bare: Trainer) -> None:
    """Upstream's dpo.py imports what GRPO needs; launch's extras do not name that."""
    plan = make_plan(load_stage(CONFIGS / "olmo_core" / "dpo_qwen3_0_6b.yaml"), 0)
    report = checks.examine(checks.make_subject(plan, bare), Devices(), importing=False)
    lacking = packages_that_lack(report.findings)
    assert lacking[-4:] == ["vllm", "backoff", "docker", "openenv-core"]
    # it wants an older numpy than the tested one, and must not take another torch along
    last = report.install[-1].argv
    assert "vllm" in last
    assert "torch==2.13.0" in last
    assert "-c" not in last


def trl_subject(trainer: Trainer, *stages: str) -> Subject:
    upstream = locate.locate("trl", search=trainer.path)
    return Subject(trainer=trainer, upstream=upstream, stages=stages, gpus=0)


def test_an_environment_without_trl(bare: Trainer) -> None:
    report = checks.examine(trl_subject(bare, "sft", "dpo"), ON_THE_CPU)
    needs = ["torch", "transformers", "trl", "accelerate", "datasets"]
    assert packages_that_lack(report.findings) == needs
    assert "import-error" not in [finding.code for finding in report.findings]
    # there is no pip either
    pip, packages = report.install
    assert pip.argv == (str(bare.python), "-m", "ensurepip", "--upgrade")
    assert "trl==1.16.0" in packages.argv
    assert json.dumps(report.as_json())
    assert any(line.startswith("run folders") for line in report.lines())


@pytest.mark.training
def test_the_environment_of_the_tests_imports() -> None:
    pytest.importorskip("trl")
    own = python.ask_trainer(Path(sys.executable), "launch's own")
    report = checks.examine(trl_subject(own, "sft"), ON_THE_CPU)
    codes = {finding.code for finding in report.findings}
    assert not codes & {"import-error", "missing-packages"}
    assert "trl.trainer.sft_trainer" in report.as_json()["facts"]["imports"]["fine"]


def test_facts_of_gpus(smi: Smi) -> None:
    smi.cards(4, 70000)
    smi.processes((1, 999_999_999, 70000))
    seen = devices.survey_devices({})
    chosen = devices.choose_devices(1, None, seen)
    report = checks.examine(subject(plan_tulu(1), *ALL), chosen, look=seen, importing=False)
    facts = report.as_json()["facts"]
    assert facts["driver"] == {"version": "580.159.04", "cuda": (13, 0)}
    assert facts["GPU 1"]["used_by"].startswith("pid 999999999")
    assert facts["run gets"]["visible"] == "0"
    assert report.exit_code is Exit.OK
    assert "\n".join(report.lines()).count("NVIDIA H200") == 2
    assert report.lines()[-1] == "ready"
    assert install.read_tested()["flash-attn"] in report.install[-1].argv


def test_a_package_is_there_with_its_metadata_or_its_module(write: Write, tmp_path: Path) -> None:
    write("here/__init__.py", "")
    write("absl.py", "")
    (tmp_path / "wandb").mkdir()
    trainer = replace(WITH_PIP, path=(tmp_path,), packages={"ai2-olmo-core": "1"})
    names = ("ai2-olmo-core", "here", "absl-py", "wandb", "pillow")
    assert install.find_missing(names, trainer) == ("wandb", "pillow")


def try_imports(
    trainer: Trainer, site: Path, *modules: str, timeout_s: float = PATIENCE_S, cuda: bool = False
) -> Imports:
    environ = {**os.environ, "PYTHONPATH": str(site)}
    return install.try_imports(modules, trainer, environ=environ, timeout_s=timeout_s, cuda=cuda)


def test_a_package_that_is_not_there(bare: Trainer, tmp_path: Path) -> None:
    # launch's folder holds a `rundir`, which an environment may have too
    trl, rundir = try_imports(bare, tmp_path, "json", "trl.trainer", "rundir").failures
    assert trl.error == "ModuleNotFoundError"
    assert trl.missing == "trl"
    assert rundir.missing == "rundir"


BROKEN = [
    ("ImportError", "from os import no_such_name\n", 1, "cannot import name 'no_such_name'"),
    ("SyntaxError", "x = 1\nprint 'old'\n", 2, "Missing parentheses"),
    ("RuntimeError", "raise RuntimeError('built for\\n torch 1')\n", 1, "built for torch 1"),
    ("ModuleNotFoundError", "import _part_of_python\n", 1, "No module named '_part_of_python'"),
    ("SystemExit", "import sys\nsys.exit('no licence')\n", 2, "no licence"),
]


def test_packages_that_are_broken(bare: Trainer, write: Write, tmp_path: Path) -> None:
    names = []
    for error, text, _, _ in BROKEN:
        write(f"{error}/__init__.py", f"from {error} import inner\n")
        write(f"{error}/inner.py", text)
        names.append(error)
    failures = try_imports(bare, tmp_path, *names, "json").failures
    for failure, (error, _, line, message) in zip(failures, BROKEN, strict=True):
        assert failure.module == error
        assert failure.error == error
        assert failure.missing is None
        assert failure.file == str(tmp_path / error / "inner.py")
        assert failure.line == line
        assert message in failure.message
        assert "\n" not in failure.message


def test_the_cause_behind_other_exceptions(bare: Trainer, write: Write, tmp_path: Path) -> None:
    def failure_of(module: str) -> Failure:
        (failure,) = try_imports(bare, tmp_path, module).failures
        return failure

    script = write("olmo_core.py", "import bettermap\n")
    failure = failure_of("olmo_core")
    assert failure.missing == "bettermap"
    assert failure.file == str(script)
    assert failure.line == 1
    lazy = "try:\n    import behind\nexcept Exception as e:\n    raise RuntimeError('no') from e\n"
    write("lazy.py", lazy)
    behind = write("behind.py", "1 / 0\n")
    failure = failure_of("lazy")
    assert failure.error == "ZeroDivisionError"
    assert failure.file == str(behind)


def test_an_interpreter_that_dies(bare: Trainer, write: Write, tmp_path: Path) -> None:
    write("dies.py", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    absent, dies = try_imports(bare, tmp_path, "json", "no_such", "dies", "csv").failures
    assert absent.module == "no_such"
    assert absent.missing == "no_such"
    assert dies.module == "dies"
    assert dies.error == "SIGSEGV"
    assert dies.missing is None


def test_an_import_that_hangs(bare: Trainer, write: Write, tmp_path: Path) -> None:
    write("hangs.py", "import time\ntime.sleep(600)\n")
    (failure,) = try_imports(bare, tmp_path, "json", "hangs", "csv", timeout_s=2).failures
    assert failure.module == "hangs"
    assert failure.error == "TimeoutError after 2 s"


def test_torch_is_asked_for_its_gpus(bare: Trainer, write: Write, tmp_path: Path) -> None:
    module = "class cuda:\n    device_count = staticmethod(lambda: 2)\n"
    module += "class version:\n    cuda = '13.0'\n__version__ = '2.13.0'\n"
    module += "def ones(*a, **k):\n    raise RuntimeError('driver too old\\nmore')\n"
    write("torch.py", module)
    assert try_imports(bare, tmp_path, "torch", cuda=True).cuda == {
        "version": "2.13.0",
        "cuda": "13.0",
        "count": 2,
        "error": "RuntimeError: driver too old",
    }
    assert try_imports(bare, tmp_path, "json", cuda=True).cuda is None


def names_of(step: InstallStep) -> list[str]:
    """The packages that a step installs."""
    words = list(step.argv[step.argv.index("install") + 1 :])
    if "-c" in words:
        words = words[words.index("-c") + 2 :]
    return [Requirement(word).name for word in words if not word.startswith("--")]


@pytest.mark.parametrize("extra", ["trl", "open-instruct"])
def test_every_package_of_an_extra_is_installed(extra: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {Requirement(text).name for text in (*extras[extra], *extras["gpu"])}
    names: list[str] = []
    for step in install.list_steps(WITH_PIP, extra, gpus=True):
        names += names_of(step)
    assert asked <= set(names)
    assert install.read_extras()["gpu"] == extras["gpu"]


def test_what_imports_torch_while_it_is_built_comes_after_it() -> None:
    first, second = install.list_steps(WITH_PIP, "open-instruct", gpus=True)
    assert {"torch", "setuptools", "wheel", "ninja", "hjson"} <= set(names_of(first))
    assert "deepspeed" not in names_of(first)
    assert names_of(second) == ["deepspeed", "flash-attn"]
    assert second.env == {"DS_BUILD_OPS": "0"}
    assert "--no-build-isolation" in second.argv
    on_the_cpu = install.list_steps(WITH_PIP, "open-instruct", gpus=False)
    assert names_of(on_the_cpu[-1]) == ["deepspeed"]
    # the build finds no torch where none is there
    assert "torch" in names_of(install.install(WITH_PIP, ["flash-attn"])[0])
    packages = dict.fromkeys(("pip", "torch", *install.BUILD), "1")
    (only,) = install.install(replace(WITH_PIP, packages=packages), ["flash-attn"])
    assert names_of(only) == ["flash-attn"]


def test_single_packages_are_installed_by_pip() -> None:
    (step,) = install.install(WITH_PIP, ["ray>=2", "wandb"])
    assert step.argv[:4] == ("/env/my bin/python", "-m", "pip", "install")
    assert step.argv[-2:] == ("ray>=2", "wandb")
    assert step.shell().startswith("'/env/my bin/python' -m pip install")


def test_without_pip_it_is_installed_first_or_uv_is_taken(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = replace(WITH_PIP, packages={})
    first, second = install.install(bare, ["ray"])
    assert first.argv == ("/env/my bin/python", "-m", "ensurepip", "--upgrade")
    assert second.argv[1:3] == ("-m", "pip")
    uv = write("uv", "#!/bin/sh\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent))
    (only,) = install.install(bare, ["ray"])
    assert only.argv[:5] == (str(uv), "pip", "install", "--python", "/env/my bin/python")


@pytest.mark.parametrize("detects", [False, True])
def test_flash_attn_is_needed_where_looking_for_it_fails_without(detects: bool) -> None:
    """Since #1716 open-instruct trains with torch's attention without it."""
    plan = plan_tulu()
    schema = plan.stage.schema
    behaviours = {**schema.behaviours, behaviour.DETECTS_WITHOUT_FLASH: detects}
    stage = replace(plan.stage, schema=replace(schema, behaviours=behaviours))
    needed = checks.list_needed(subject(replace(plan, stage=stage)))
    assert ("flash-attn" in needed) is not detects


@pytest.mark.parametrize("release", OPEN_INSTRUCT.KNOWN, ids=lambda release: release.version[:8])
def test_without_a_plan_the_commit_decides_whether_flash_attn_is_needed(release: Release) -> None:
    source = locate.Upstream(
        backend="open_instruct",
        root=Path("/x"),
        source="found",
        is_named=False,
        pin=OPEN_INSTRUCT.PIN,
        version=release.version,
        release=release.version,
    )
    needed = checks.list_needed(
        Subject(trainer=trainer(), upstream=source, stages=("sft",), gpus=2)
    )
    assert ("flash-attn" in needed) is (release.version == OPEN_INSTRUCT.BASELINE)


OLMO_DPO = "olmo_core/dpo_olmo2_7b_16k.yaml"


@pytest.mark.parametrize(
    "config, overrides, is_needed",
    [
        (OLMO_DPO, ["packing=true"], True),
        (OLMO_DPO, ["packing=false", "expect.packing=any"], False),
        ("olmo_core/sft_olmo2_7b.yaml", [], True),
    ],
)
def test_packed_rows_of_olmo_core_need_flash_attn(
    config: str, overrides: list[str], is_needed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What installs it stands beside what the start would be refused with."""
    words = ["--python", sys.executable, "--gpus", "4", "--install", "--format", "json"]
    assert main(["doctor", str(CONFIGS / config), *overrides, *words]) == Exit.NOT_READY
    findings = json.loads(capsys.readouterr().out)["findings"]
    messages = {finding["code"]: finding["message"] for finding in findings}
    assert ("flash-attn" in messages["missing-packages"]) is is_needed
    assert ("packing-refused" in messages) is is_needed


def test_each_trainer_is_examined_where_none_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = {"trl"}

    def examine_backend(request: Request, backend: str) -> Report:
        findings = []
        if backend not in ready:
            findings.append(launch_finding("error", "missing-packages", f"{backend} lacks some"))
        source = Fact("source", f"{backend} 1.0")
        room = Fact("temporary files", "/tmp, 1 GiB free")
        return Report(findings=tuple(findings), facts=(source, room), install=())

    monkeypatch.setattr(readiness, "examine_backend", examine_backend)
    assert main(["doctor", "--format", "json"]) == Exit.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["data"]["trainers"]["open_instruct"]["ready"] is False
    assert answer["data"]["trainers"]["trl"]["ready"] is True
    assert [finding["severity"] for finding in answer["findings"]] == ["note"]

    ready.clear()
    assert main(["doctor"]) == Exit.NOT_READY
    out = capsys.readouterr().out
    assert out.count("temporary files") == 1
    assert "open_instruct: not ready: missing-packages" in out
