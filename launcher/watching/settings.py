"""What `launch` wants of the probe: the JSON in `LAUNCH_PROBE`."""

from __future__ import annotations

from typing import Any


class Settings:
    """What `launch` wants of the probe; whatever is missing asks for nothing.

    `target` upstream's script, `out` folder of the records, `cpu`, `backend`, `stage`; `packed`
    whether packing was asked for (the same on every rank, so that collectives may depend on it);
    `gradients` whether those of autograd are compared with those that the optimizer uses; `expect`
    point -> state; `on_violation` stop or warn; `within` optimizer steps until what is expected must be
    proved; `isolation` whether packing is tested; `on_hang` stop or report; `hang_factor` times the
    median step, and `hang_seconds` at least, make a hang; `first_loss` is what the first step must give
    where the policy still is its own reference; without `final_save` the run ends after its last step;
    `profile` is the step whose kernels are recorded.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.target = str(given["target"])
        self.out = str(given["out"])
        self.cpu = bool(given.get("cpu"))
        self.backend = given.get("backend")
        self.stage = given.get("stage")
        self.packed = bool(given.get("packed"))
        wanted = given.get("expect") or {}
        self.expect = {point: state for point, state in wanted.items() if state != "any"}
        self.gradients = wanted.get("gradients") != "any"
        self.checks_loss = wanted.get("loss", "finite") != "any"
        self.stops = given.get("on_violation") == "stop"
        self.within = int(given.get("within") or 3)
        self.isolation = bool(given.get("isolation", True))
        self.stops_hang = given.get("on_hang") == "stop"
        self.hang_factor = float(given.get("hang_factor") or 20)
        self.hang_seconds = float(given.get("hang_seconds") or 300)
        self.first_loss = given.get("first_loss")
        self.final_save = bool(given.get("final_save", True))
        self.profile = int(given.get("profile") or 0)
