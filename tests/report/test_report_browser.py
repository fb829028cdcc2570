"""The report in a real browser: what is drawn, what hovering shows, what the switches do."""

import csv
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S
from made_runs import loss, made, manifest

from launcher.report import page, series
from launcher.report.series import Run

Browser = Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# how many pixels of a chart are nearly of this colour
COUNT = """
const [key, name] = arguments;
const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const want = [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
const canvas = document.querySelector(`#panel-${key} canvas`);
const copy = document.createElement("canvas");
copy.width = canvas.width;
copy.height = canvas.height;
const context = copy.getContext("2d", { willReadFrequently: true });
context.drawImage(canvas, 0, 0);
const data = context.getImageData(0, 0, copy.width, copy.height).data;
let count = 0;
for (let i = 0; i < data.length; i += 4) {
  if (data[i + 3] > 200 && want.every((v, c) => Math.abs(data[i + c] - v) < 24)) count++;
}
return count;
"""
READOUT = """
return [...document.querySelectorAll(`#panel-${arguments[0]} .readout li`)]
  .filter((item) => !item.hidden).map((item) => item.innerText.replace(/\\s+/g, ""));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium")
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium" if binary is None else "no chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1300,1000",
        "force-device-scale-factor=1", f"user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


@pytest.fixture(autouse=True)
def _nothing_goes_wrong(browser: Browser) -> Iterator[None]:
    yield
    # what the policy forbids, what throws, what cannot be loaded: all of it is told here
    assert browser.get_log("browser") == []
    loaded = "return performance.getEntriesByType('resource').map((one) => one.name)"
    assert browser.execute_script(loaded) == []


def show(browser: Browser, path: Path, runs: list[Run]) -> None:
    path.write_text(page.render(runs), encoding="utf-8")
    browser.get(path.as_uri())
    waited(browser, "performance.getEntriesByName('drawn').length > 0")


def waited(browser: Browser, condition: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, PATIENCE_S).until(lambda b: b.execute_script(f"return {condition}"))


def count(browser: Browser, key: str, colour: str) -> int:
    # a chart is drawn in the frame after what changed it
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    return int(browser.execute_script(COUNT, key, colour))


def readout(browser: Browser, key: str) -> list[str]:
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    return list(browser.execute_script(READOUT, key))


def found(browser: Browser, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def hover(browser: Browser, key: str, share: float) -> None:
    """Move the pointer to this share of a chart's width."""
    from selenium.webdriver.common.action_chains import ActionChains

    over = found(browser, f"#panel-{key} .u-over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    width = over.size["width"]
    left = round((share - 0.5) * (width - 2))
    ActionChains(browser, duration=50).move_to_element_with_offset(over, left, 0).perform()


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    told = manifest(name="other")
    other = made(tmp_path / "two", steps=60, told=told, bad=(30, 31), scale=0.5)
    return series.load_runs([str(made(tmp_path / "one")), str(other)])


def test_curves_are_drawn_and_switched_off(
    browser: Browser, runs: list[Run], tmp_path: Path
) -> None:
    show(browser, tmp_path / "a.html", runs)
    for key in ("loss", "learning_rate", "tokens", "memory", "rewards", "margin", "accuracy"):
        for colour in ("--c0", "--c1"):
            assert count(browser, key, colour) > 50, (key, colour)
    # the steps that were not finite
    assert count(browser, "loss", "--fail") > 5
    assert count(browser, "margin", "--fail") == 0
    found(browser, "input[data-run='1']").click()
    assert count(browser, "loss", "--c1") == 0
    assert count(browser, "loss", "--c0") > 50
    assert readout(browser, "loss") == [f"1{loss(40):.4g}"]
    found(browser, "input[data-run='1']").click()
    assert count(browser, "loss", "--c1") > 50


def test_hovering_shows_the_values_of_all_runs(
    browser: Browser, runs: list[Run], tmp_path: Path
) -> None:
    show(browser, tmp_path / "a.html", runs)
    assert found(browser, "#at").text == "last step"
    assert readout(browser, "loss") == [f"1{loss(40):.4g}", f"2{loss(60, 60):.4g}"]
    hover(browser, "loss", 0.0)
    assert found(browser, "#at").text == "step 1"
    assert readout(browser, "loss") == [f"1{loss(1):.4g}", f"2{loss(1, 60):.4g}"]
    # the same step in every chart; what is logged every fifth step shows the one beside it
    assert readout(browser, "tokens") == ["16,000", "212,000"]
    hover(browser, "loss", 1.0)
    assert found(browser, "#at").text == "step 60"
    # the first run has ended by then
    assert readout(browser, "loss") == ["1–", f"2{loss(60, 60):.4g}"]
    hover(browser, "margin", 29.2 / 59)
    assert found(browser, "#at").text == "step 30"
    assert readout(browser, "loss") == [f"1{loss(30):.4g}", "2notfinite"]
    assert readout(browser, "memory") == ["161.25/70.5", "230.63/35.25"]


def test_smoothing_and_the_rest_of_the_curves(
    browser: Browser, runs: list[Run], tmp_path: Path
) -> None:
    show(browser, tmp_path / "a.html", runs)
    canvas = "return document.querySelector('#panel-loss canvas').toDataURL()"
    plain = browser.execute_script(canvas)
    slide = (
        "const slider = document.getElementById('smoothing'); slider.value = arguments[0];"
        "slider.dispatchEvent(new Event('input'))"
    )
    browser.execute_script(slide, 0.9)
    count(browser, "loss", "--c0")
    assert browser.execute_script(canvas) != plain
    assert found(browser, "#smoothing-is").text == "0.90"
    browser.execute_script(slide, 0)
    count(browser, "loss", "--c0")
    assert browser.execute_script(canvas) == plain
    found(browser, "#more-curves summary").click()
    waited(browser, "document.querySelectorAll('#more-curves canvas').length > 0")
    drawn = browser.find_elements("css selector", "#more-curves canvas")
    assert len(drawn) == len(browser.find_elements("css selector", "#more-curves figure"))


def test_texts_of_a_run_run_nothing(browser: Browser, tmp_path: Path) -> None:
    nasty = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    told = manifest(name=nasty)
    told["args"]["x"] = {"value": nasty, "origin": nasty}
    rows = [{"step": n, "loss": 1.0 / n, nasty: 1.0} for n in range(1, 20)]
    verdict = {
        "status": nasty,
        "points": [{"name": nasty, "state": nasty, "detail": {"reason": nasty}}],
    }
    runs = [series.run_from_records(tmp_path, told, verdict, rows) for _ in range(2)]
    show(browser, tmp_path / "a.html", series.rename_duplicates(runs))
    assert browser.title == "2 runs"
    show(browser, tmp_path / "a.html", runs[:1])
    assert nasty in browser.title
    found(browser, "#more-curves summary").click()
    assert nasty in found(browser, "#more-curves figure h3").text


def test_nothing_lies_outside_of_a_narrow_screen(
    browser: Browser, runs: list[Run], tmp_path: Path
) -> None:
    outside = """
    const width = document.documentElement.clientWidth;
    return [...document.querySelectorAll("#verdict ~ * code, #verdict ~ * td, .banner *, .overview *")]
      .filter((one) => one.getBoundingClientRect().right > width + 1).length;
    """
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        show(browser, tmp_path / "a.html", runs[:1])
        browser.execute_script(
            "document.querySelectorAll('details.evidence').forEach((one) => { one.open = true; })"
        )
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        assert browser.execute_script(outside) == 0
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    # names and values of arguments and codes of findings stay whole
    show(browser, tmp_path / "a.html", runs)
    browser.execute_script(
        "document.querySelectorAll('details').forEach((d) => { d.open = true; })"
    )
    heights = browser.execute_script(
        "const codes = '#arguments ~ * th code, td.value code, #findings ~ * td > code';"
        "return [...document.querySelectorAll(codes)].map((one) => one.offsetHeight)"
    )
    assert len(heights) > 12 and max(heights) < 2 * min(heights)


def test_equal_curves_are_both_seen(browser: Browser, tmp_path: Path) -> None:
    paths = [made(tmp_path / name, told=manifest(name=name)) for name in ("one", "two")]
    show(browser, tmp_path / "a.html", series.load_runs([str(path) for path in paths]))
    counts = [count(browser, "loss", colour) for colour in ("--c0", "--c1")]
    assert min(counts) > 50, counts


def test_a_spike_is_off_the_scale_and_said(browser: Browser, tmp_path: Path) -> None:
    table = [{"step": n, "loss": 1.0, "grad_norm": 90.0 if n == 9 else 1.0} for n in range(1, 60)]
    run = series.run_from_records(tmp_path, manifest(), {"status": "pass"}, table)
    show(browser, tmp_path / "a.html", [run])
    button = found(browser, "#panel-grad_norm button.clip")
    assert button.text == "up to 90 at step 9: show"
    clipped = count(browser, "grad_norm", "--c0")
    button.click()
    assert button.text == "leave spikes out"
    assert count(browser, "grad_norm", "--c0") != clipped


def choose_axis(browser: Browser, name: str) -> None:
    pick = (
        "const axis = document.getElementById('x-axis'); axis.value = arguments[0];"
        "axis.dispatchEvent(new Event('change'))"
    )
    browser.execute_script(pick, name)
    count(browser, "loss", "--c0")


def test_the_x_axis_shows_steps_tokens_or_time(
    browser: Browser, runs: list[Run], tmp_path: Path
) -> None:
    show(browser, tmp_path / "a.html", runs)
    for axis, end in (("tokens", "180k tokens"), ("time", "0:00:20"), ("step", "step 60")):
        choose_axis(browser, axis)
        for colour in ("--c0", "--c1"):
            assert count(browser, "loss", colour) > 50, (axis, colour)
        hover(browser, "loss", 1.0)
        assert found(browser, "#at").text == end
    # 40 steps of half a second, 60 of a quarter: the second one ends first
    choose_axis(browser, "time")
    hover(browser, "loss", 1.0)
    assert readout(browser, "loss") == [f"1{loss(40):.4g}", "2–"]
    # at 7.5 s is its step 30, which was not finite
    hover(browser, "loss", (7.5 - 0.25) / (20 - 0.25))
    assert readout(browser, "loss")[1] == "2notfinite"


def test_a_logarithmic_scale(browser: Browser, runs: list[Run], tmp_path: Path) -> None:
    show(browser, tmp_path / "a.html", runs)
    picture = "return document.querySelector(`#panel-${arguments[0]} canvas`).toDataURL()"
    plain = {key: browser.execute_script(picture, key) for key in ("loss", "memory")}
    button = found(browser, "#log-y")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert count(browser, "loss", "--c0") > 50
    assert browser.execute_script(picture, "loss") != plain["loss"]
    # what begins at zero by its nature has no such scale
    assert browser.execute_script(picture, "memory") == plain["memory"]
    button.click()
    count(browser, "loss", "--c0")
    assert browser.execute_script(picture, "loss") == plain["loss"]


def test_all_curves_as_csv(browser: Browser, tmp_path: Path) -> None:
    """A file from disk, of a page that may load nothing."""
    told = manifest(name='=2+3,"x"')
    runs = series.load_runs(
        [str(made(tmp_path / "one")), str(made(tmp_path / "two", told=told, steps=60))]
    )
    show(browser, tmp_path / "a.html", runs)
    place = tmp_path / "downloads"
    place.mkdir()
    behaviour = {"behavior": "allow", "downloadPath": str(place)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    found(browser, "#csv").click()
    until = time.monotonic() + PATIENCE_S
    while not list(place.glob("*.csv")):
        assert time.monotonic() < until
        time.sleep(0.1)
    (file,) = place.glob("*.csv")
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 100
    assert (rows[0]["run"], rows[0]["step"]) == ("dpo tulu", "1")
    assert float(rows[0]["loss"]) == pytest.approx(loss(1), rel=1e-6)
    # logged at every fifth step only
    assert [row["learning_rate"] != "" for row in rows[:5]] == [False, False, False, False, True]
    # no spreadsheet takes a name for a formula
    assert rows[-1]["run"].endswith('=2+3,"x"') and not rows[-1]["run"].startswith("=")
