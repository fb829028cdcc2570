"""How long a report takes to make, and to open in a headless Chromium.

usage: python -m benchmarks.report [--json]

Three DPO runs of 10,000 steps with every curve, read from their folders. `open` is the time from the
navigation to the frame after the last chart was drawn; `empty` the same for a page without anything,
which is what the browser itself costs. Goals on two cores: open at most 1 s; one run of 1,000 steps
rendered in at most 50 ms. Needs selenium, chromium and chromedriver for the opening.
"""

from __future__ import annotations

import functools
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import ratio
from benchmarks.ratio import Pair
from launcher import page, series
from launcher.series import Run

ROUNDS = 7
STEPS = 10_000
EMPTY = "<!doctype html><html lang=en><title>empty</title><p>empty<script>performance.mark('drawn')</script>"


def made(folder: Path, name: str, steps: int) -> Run:
    """A run folder with a probe's record of so many steps, read back."""
    path = folder / name
    path.mkdir(parents=True)
    noise = random.Random(name)
    args = {
        f"argument_{n}": {"value": n, "origin": "default: trl/trainer/dpo_config.py:1"}
        for n in range(160)
    }
    plan = {"gpus": 8, "per_device": 4, "accumulation": 4, "global": 128, "steps": steps}
    manifest = {"stage": "dpo", "backend": "trl", "name": name, "plan": plan, "args": args}
    (path / "run.json").write_text(json.dumps(manifest))
    (path / "verdict.json").write_text(json.dumps({"status": "pass", "points": [], "steps": steps}))
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(row(step, steps, noise)) + "\n")
    return series.read(path)


def row(step: int, steps: int, noise: random.Random) -> dict[str, float]:
    """One step of a DPO run that goes well."""
    done = step / steps
    margin = 3 * (1 - math.exp(-4 * done)) + noise.gauss(0, 0.25)
    return {
        "step": step,
        "finite": True,
        "loss": 0.69 * math.exp(-2 * done) + noise.gauss(0, 0.02),
        "learning_rate": 5e-7 * min(1, done * 10) * (1 - done),
        "tokens": 400_000 + noise.randrange(20_000),
        "positions": 430_000,
        "seconds": 3.4 + noise.random() * 0.3,
        "allocated_gib": 68.4,
        "reserved_gib": 74.1,
        "grad_norm": 1 + noise.random(),
        "rewards/chosen": -0.2 * margin,
        "rewards/rejected": -1.2 * margin,
        "rewards/margins": margin,
        "rewards/accuracies": 0.5 + 0.35 * (1 - math.exp(-5 * done)),
        "logps/chosen": -280 + noise.random(),
        "logps/rejected": -300 + noise.random(),
    }


def rendered(runs: list[Run]) -> tuple[str, float]:
    """The page, and the median of the seconds that it takes to make."""
    text = page.overlay(runs)
    taken = ratio.interleaved({"page": ratio.timed(lambda: page.overlay(runs))}, ROUNDS)["page"]
    return text, statistics.median(taken)


def pairs(folder: Path) -> Iterator[Pair]:
    """A report of one long run, read and drawn, beside parsing its figures."""
    made(folder, "run", STEPS)
    path = folder / "run"

    def parse() -> None:
        with (path / "metrics.jsonl").open(encoding="utf-8") as file:
            for line in file:
                json.loads(line)

    yield Pair(
        name="report", what="10,000 steps, read and drawn / parsing them as JSON",
        ours=ratio.timed(lambda: page.overlay([series.read(path)])), beside=ratio.timed(parse),
    )  # fmt: skip


def opened(pages: dict[str, Path]) -> dict[str, float] | None:
    """Seconds until each page has drawn, interleaved; None where there is no browser to ask."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    try:
        from selenium import webdriver
    except ImportError:
        return None
    if browser is None or driver is None:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1400,1000"):
        options.add_argument(f"--{flag}")
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))

    def draw(path: Path) -> float:
        chrome.get(path.as_uri())
        return drawn(chrome)

    try:
        cases = {name: functools.partial(draw, path) for name, path in pages.items()}
        taken = ratio.interleaved(cases, ROUNDS, warm=False)
    finally:
        chrome.quit()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def drawn(chrome: object) -> float:
    """When the page said that its charts are there, in seconds since the navigation."""
    ask = "return (performance.getEntriesByName('drawn')[0] || {}).startTime"
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if (at := chrome.execute_script(ask)) is not None:  # type: ignore[attr-defined]
            return float(at) / 1000
        time.sleep(0.02)
    raise SystemExit("the page has drawn nothing for 30 s")


def main() -> None:
    """Measure everything, print one line each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [made(folder, f"run-{number}", STEPS) for number in range(3)]
        text, seconds = rendered(runs)
        _, small = rendered([made(folder, "small", 1_000)])
        (folder / "report.html").write_text(text)
        (folder / "empty.html").write_text(EMPTY)
        pages = {"open": folder / "report.html", "empty": folder / "empty.html"}
        told = {
            "render 3 x 10,000 steps, s": seconds,
            "render 1,000 steps, s": small,
            "page, MB": len(text) / 1e6,
            **{f"{name}, s": value for name, value in (opened(pages) or {}).items()},
        }
    if "--json" in sys.argv[1:]:
        print(json.dumps(told))
        return
    for key, value in told.items():
        print(f"{key:<28}{value:8.3f}")


if __name__ == "__main__":
    main()
