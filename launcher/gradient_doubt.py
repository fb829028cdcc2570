"""Whether a recorded run trained under a DeepSpeed that is known to corrupt gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import rundir
from launcher.backends.deepspeed_rules import engine_config
from launcher.backends.gradient_rules import fault
from launcher.check import Verdict, with_point


def reason(manifest: Mapping[str, Any]) -> str | None:
    """What is known of the recorded release and settings; None where nothing speaks against them."""
    plan = manifest.get("plan")
    plan = plan if isinstance(plan, dict) else {}
    recorded = manifest.get("deepspeed", _of_old_record(manifest))
    if not plan.get("gpus") or not isinstance(recorded, dict):
        return None
    config, version = recorded.get("config"), recorded.get("version")
    accumulation = plan.get("accumulation")
    found = fault(
        config if isinstance(config, dict) else {}, version if isinstance(version, str) else None,
        accumulation=accumulation if isinstance(accumulation, int) else None,
    )  # fmt: skip
    return found[2] if found is not None and found[0] == "error" else None


def _of_old_record(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Records of before 2026-11-23 name the file alone; those that shipped overlapped under ZeRO 1 and 2."""
    if "args" not in manifest and "argv" not in manifest:
        return None
    argv = manifest.get("argv")
    words = argv if isinstance(argv, list) else []
    trainer = manifest.get("trainer")
    packages = trainer.get("packages") if isinstance(trainer, dict) else None
    version = packages.get("deepspeed") if isinstance(packages, dict) else None
    args = manifest.get("args")
    own = args.get("zero_stage") if isinstance(args, dict) else None
    stage = own.get("value") if isinstance(own, dict) else None
    config = engine_config({"zero_stage": stage}, None)
    if config is None:
        if "--deepspeed_config_file" not in words[:-1]:
            return None
        path = Path(str(words[words.index("--deepspeed_config_file") + 1]))
        shipped = path.parent.name == "deepspeed" and path.stem[:5] in ("zero1", "zero2")
        config = rundir.read_json(path)
        if shipped:
            config = {"zero_optimization": {"stage": int(path.stem[4]), "overlap_comm": True}}
            config |= {"communication_data_type": "fp32"} if "fp32" in path.stem else {}
    return {"config": config, "version": version}


def doubted(verdict: Verdict, manifest: Mapping[str, Any]) -> Verdict:
    """The verdict without a pass for gradients that nobody compared, where `reason` has one."""
    point = next((p for p in verdict.points if p.name == "gradients"), None)
    if point is None or point.state != "unknown" or (why := reason(manifest)) is None:
        return verdict
    return with_point(
        verdict, point, {"reason": why, "help": "train again: docs/gradients.md"}, ok=None
    )
