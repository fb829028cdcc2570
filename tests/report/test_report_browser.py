"""The report in a real browser: what is drawn, what hovering shows, what the switches do."""

import csv
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S
from made_runs import loss, manifest, write_run

from launcher.report import page, series
from launcher.report.series import Run
from launcher.verdict.evidence import Evidence

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-dev-shm-usage",
    "window-size=1300,1000",
    "force-device-scale-factor=1",
)

# scripts, with their arguments in `arguments`
COUNT_PIXELS = """
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
SET = """
const [id, value, event] = arguments;
document.getElementById(id).value = value;
document.getElementById(id).dispatchEvent(new Event(event));
"""
NEXT_FRAME = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
PICTURE = "return document.querySelector(`#panel-${arguments[0]} canvas`).toDataURL()"
LOADED = "return performance.getEntriesByType('resource').map((one) => one.name)"
OUTSIDE = """
const width = document.documentElement.clientWidth;
return [...document.querySelectorAll("#verdict ~ * code, #verdict ~ * td, .banner *, .overview *")]
  .filter((one) => one.getBoundingClientRect().right > width + 1).length;
"""
OPEN_DETAILS = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
HEIGHTS = """
const codes = '#arguments ~ * th code, td.value code, #findings ~ * td > code';
return [...document.querySelectorAll(codes)].map((one) => one.offsetHeight);
"""


class Page:
    """A page in the browser, with as many runs as it is opened with."""

    def __init__(self, driver: Any, file: Path) -> None:
        self.driver = driver
        self.file = file

    def open(self, *runs: Run) -> None:
        self.file.write_text(page.render(list(runs)), encoding="utf-8")
        self.driver.get(self.file.as_uri())
        self.wait_for("performance.getEntriesByName('drawn').length > 0")

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, condition: str) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        wait = WebDriverWait(self.driver, PATIENCE_S)
        wait.until(lambda driver: driver.execute_script(f"return {condition}"))

    def wait_for_frame(self) -> None:
        """A chart is drawn in the frame after what changed it."""
        self.driver.execute_async_script(NEXT_FRAME)

    def element(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.element(selector).text)

    def count(self, key: str, colour: str) -> int:
        """How many pixels of a chart are nearly of this colour."""
        self.wait_for_frame()
        return int(self.run(COUNT_PIXELS, key, colour))

    def is_drawn(self, key: str, colour: str) -> bool:
        return self.count(key, colour) > 50

    def readout(self, key: str) -> list[str]:
        self.wait_for_frame()
        return list(self.run(READOUT, key))

    def picture(self, key: str) -> str:
        self.wait_for_frame()
        return str(self.run(PICTURE, key))

    def hover(self, key: str, share: float) -> None:
        """Move the pointer to this share of a chart's width."""
        from selenium.webdriver.common.action_chains import ActionChains

        over = self.element(f"#panel-{key} .u-over")
        self.run("arguments[0].scrollIntoView({block: 'center'})", over)
        left = round((share - 0.5) * (over.size["width"] - 2))
        chain = ActionChains(self.driver, duration=50)
        chain.move_to_element_with_offset(over, left, 0).perform()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium")
    browsers = [path for path in map(shutil.which, BROWSERS) if path is not None]
    chromedriver = shutil.which("chromedriver")
    if not browsers:
        pytest.skip("no chromium")
    if chromedriver is None:
        pytest.skip("no chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = browsers[0]
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield chrome
    chrome.quit()


@pytest.fixture
def shown(driver: Any, tmp_path: Path) -> Iterator[Page]:
    """A page that the policy forbids nothing, that throws nothing and loads nothing."""
    yield Page(driver, tmp_path / "a.html")
    assert driver.get_log("browser") == []
    assert driver.execute_script(LOADED) == []


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """40 steps of half a second, and 60 of a quarter, of which two were not finite."""
    other = manifest(name="other")
    first = write_run(tmp_path / "one")
    second = write_run(tmp_path / "two", steps=60, record=other, bad=(30, 31), scale=0.5)
    return series.load_runs([str(first), str(second)])


def test_curves_are_drawn_and_switched_off(shown: Page, runs: list[Run]) -> None:
    shown.open(*runs)
    for key in ("loss", "learning_rate", "tokens", "memory", "rewards", "margin", "accuracy"):
        assert shown.is_drawn(key, "--c0"), key
        assert shown.is_drawn(key, "--c1"), key
    # the steps that were not finite
    assert shown.count("loss", "--fail") > 5
    assert shown.count("margin", "--fail") == 0

    shown.element("input[data-run='1']").click()
    assert shown.count("loss", "--c1") == 0
    assert shown.is_drawn("loss", "--c0")
    assert shown.readout("loss") == [f"1{loss(40):.4g}"]

    shown.element("input[data-run='1']").click()
    assert shown.is_drawn("loss", "--c1")


def test_hovering_shows_the_values_of_all_runs(shown: Page, runs: list[Run]) -> None:
    shown.open(*runs)
    assert shown.text("#at") == "last step"
    assert shown.readout("loss") == [f"1{loss(40):.4g}", f"2{loss(60, 60):.4g}"]

    shown.hover("loss", 0.0)
    assert shown.text("#at") == "step 1"
    assert shown.readout("loss") == [f"1{loss(1):.4g}", f"2{loss(1, 60):.4g}"]
    # the same step in every chart; what is logged every fifth step shows the one beside it
    assert shown.readout("tokens") == ["16,000", "212,000"]

    # the first run has ended by then
    shown.hover("loss", 1.0)
    assert shown.text("#at") == "step 60"
    assert shown.readout("loss") == ["1–", f"2{loss(60, 60):.4g}"]

    shown.hover("margin", 29.2 / 59)
    assert shown.text("#at") == "step 30"
    assert shown.readout("loss") == [f"1{loss(30):.4g}", "2notfinite"]
    assert shown.readout("memory") == ["161.25/70.5", "230.63/35.25"]


def test_smoothing(shown: Page, runs: list[Run]) -> None:
    shown.open(*runs)
    plain = shown.picture("loss")
    shown.run(SET, "smoothing", 0.9, "input")
    assert shown.picture("loss") != plain
    assert shown.text("#smoothing-is") == "0.90"
    shown.run(SET, "smoothing", 0, "input")
    assert shown.picture("loss") == plain


def test_the_rest_of_the_curves_is_drawn_once_it_is_opened(shown: Page, runs: list[Run]) -> None:
    shown.open(*runs)
    shown.element("#more-curves summary").click()
    shown.wait_for("document.querySelectorAll('#more-curves canvas').length > 0")
    drawn = shown.run("return document.querySelectorAll('#more-curves canvas').length")
    assert drawn == shown.run("return document.querySelectorAll('#more-curves figure').length")


def test_texts_of_a_run_run_nothing(shown: Page, tmp_path: Path) -> None:
    nasty = "</script><script>document.title='owned'</script>"
    nasty += "<img src=x onerror=\"document.title='owned'\">"
    content = manifest(name=nasty)
    content["args"]["x"] = {"value": nasty, "origin": nasty}
    rows = [{"step": step, "loss": 1.0 / step, nasty: 1.0} for step in range(1, 20)]
    point = {"name": nasty, "state": nasty, "detail": {"reason": nasty}}
    verdict = {"status": nasty, "points": [point]}
    run = series.run_from_records(tmp_path, content, verdict, rows, Evidence())

    shown.open(*series.rename_duplicates([run, run]))
    assert shown.driver.title == "2 runs"
    shown.open(run)
    assert nasty in shown.driver.title
    shown.element("#more-curves summary").click()
    assert nasty in shown.text("#more-curves figure h3")


def test_nothing_lies_outside_of_a_narrow_screen(shown: Page, runs: list[Run]) -> None:
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    shown.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        shown.open(runs[0])
        shown.run(OPEN_DETAILS)
        assert shown.run("return document.documentElement.scrollWidth") <= 390
        assert shown.run(OUTSIDE) == 0
    finally:
        shown.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_names_values_and_codes_stay_on_one_line(shown: Page, runs: list[Run]) -> None:
    shown.open(*runs)
    shown.run(OPEN_DETAILS)
    heights = shown.run(HEIGHTS)
    assert len(heights) > 12
    assert max(heights) < 2 * min(heights)


def test_equal_curves_are_both_seen(shown: Page, tmp_path: Path) -> None:
    run = series.load_run(write_run(tmp_path / "one"))
    shown.open(*series.rename_duplicates([run, run]))
    assert shown.is_drawn("loss", "--c0")
    assert shown.is_drawn("loss", "--c1")


def test_a_spike_is_off_the_scale_and_named(shown: Page, tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 1.0, "grad_norm": 1.0} for step in range(1, 60)]
    rows[8]["grad_norm"] = 90.0
    shown.open(series.run_from_records(tmp_path, manifest(), {"status": "pass"}, rows, Evidence()))
    button = shown.element("#panel-grad_norm button.clip")
    assert button.text == "up to 90 at step 9: show"
    clipped = shown.picture("grad_norm")
    button.click()
    assert button.text == "leave spikes out"
    assert shown.picture("grad_norm") != clipped


@pytest.mark.parametrize(
    ("axis", "end"), [("tokens", "180k tokens"), ("time", "0:00:20"), ("step", "step 60")]
)
def test_the_x_axis_shows_steps_tokens_or_time(
    shown: Page, runs: list[Run], axis: str, end: str
) -> None:
    shown.open(*runs)
    shown.run(SET, "x-axis", axis, "change")
    assert shown.is_drawn("loss", "--c0")
    assert shown.is_drawn("loss", "--c1")
    shown.hover("loss", 1.0)
    assert shown.text("#at") == end


def test_over_time_the_faster_run_ends_first(shown: Page, runs: list[Run]) -> None:
    shown.open(*runs)
    shown.run(SET, "x-axis", "time", "change")
    shown.hover("loss", 1.0)
    assert shown.readout("loss") == [f"1{loss(40):.4g}", "2–"]
    # at 7.5 s is its step 30, which was not finite
    shown.hover("loss", (7.5 - 0.25) / (20 - 0.25))
    assert shown.readout("loss")[1] == "2notfinite"


def test_a_logarithmic_scale(shown: Page, runs: list[Run]) -> None:
    shown.open(*runs)
    losses = shown.picture("loss")
    memory = shown.picture("memory")
    button = shown.element("#log-y")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert shown.is_drawn("loss", "--c0")
    assert shown.picture("loss") != losses
    # what begins at zero by its nature has no such scale
    assert shown.picture("memory") == memory
    button.click()
    assert shown.picture("loss") == losses


def test_all_curves_are_saved_as_csv(shown: Page, tmp_path: Path) -> None:
    """A file from disk, of a page that may load nothing."""
    first = write_run(tmp_path / "one")
    second = write_run(tmp_path / "two", record=manifest(name='=2+3,"x"'), steps=60)
    shown.open(*series.load_runs([str(first), str(second)]))
    place = tmp_path / "downloads"
    place.mkdir()
    behaviour = {"behavior": "allow", "downloadPath": str(place)}
    shown.driver.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    shown.element("#csv").click()
    deadline = time.monotonic() + PATIENCE_S
    while not list(place.glob("*.csv")):
        assert time.monotonic() < deadline
        time.sleep(0.1)

    (file,) = place.glob("*.csv")
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 100
    assert rows[0]["run"] == "dpo tulu"
    assert rows[0]["step"] == "1"
    assert float(rows[0]["loss"]) == pytest.approx(loss(1), rel=1e-6)
    # logged at every fifth step only
    for row in rows[:4]:
        assert row["learning_rate"] == ""
    assert rows[4]["learning_rate"] != ""
    # no spreadsheet takes a name for a formula
    assert rows[-1]["run"].endswith('=2+3,"x"')
    assert not rows[-1]["run"].startswith("=")
