"""The page of a report in a browser: no errors, no requests, no horizontal scrolling, accessible to screen readers."""

import importlib.util
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import Command

from plait.planner.alternatives import Alternative
from plait.report.figures import Prediction, make_figures
from plait.report.page import format_percent, format_value, render_page
from plait.report.run_files import RunFiles

JOBS = str(Path(__file__).parents[1] / "jobs.py") + ":mlp"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
AXE = (spec := importlib.util.find_spec("axe_playwright_python")) and spec.origin
MISSING = [name for name, there in (
    ("chromium", BROWSER), ("chromedriver", DRIVER), ("selenium", importlib.util.find_spec("selenium")),
    ("axe-playwright-python", AXE),
) if not there]  # fmt: skip
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"there is no {', '.join(MISSING)} here: make browser")
WIDTHS = (420, 1280)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a pipeline, of replicas, of three runs together, and of a run without events."""
    folder = tmp_path_factory.mktemp("pages")
    plans = {"pipeline": "pp=2 microbatches=3", "replicas": "dp=2", "one": "dp=1"}
    runs = list[Path]()
    for plan in plans.values():
        command = Command("train", JOBS, "--plan", plan, "--batch", "12", "--steps", "12", "--save-every", "6", folder=folder)
        assert command.wait() == 0, command.output
        runs.append((folder / "runs" / "latest").resolve())
    found = {name: make_figures([RunFiles.read(run)], predict=predicted) for name, run in zip(plans, runs)}
    found["three"] = make_figures([RunFiles.read(run) for run in runs[::-1]], predict=predicted)
    shutil.rmtree(runs[1] / "events")
    found["damaged"] = make_figures([RunFiles.read(runs[1])], predict=predicted)
    for name, shown in found.items():
        (folder / f"{name}.html").write_text(render_page(shown), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in found}


def predicted(run: RunFiles, batch: int) -> Prediction:
    """The parts and the memory of a step, as the planner predicts them."""
    parts = {"compute": 0.004, "gradients": 0.001, "bubble": 0.001, "fixed": 0.0005}
    memory = {"parameters": 4000, "optimizer": 8000, "activations": 9000}
    larger = Alternative("batch", "dp=2", 24, {part: 1.5 * seconds for part, seconds in parts.items()})
    return Prediction(seconds=0.0065, parts=parts, memory=memory, others=(larger,))


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    driver.set_page_load_timeout(60)
    media = {"features": [{"name": "prefers-color-scheme", "value": request.param}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver.scheme = request.param
    yield driver
    driver.quit()


def opened(browser: Any, file: Path, width: int) -> None:
    """The page, in a window of this width."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("performance"), browser.get_log("browser")
    browser.get(file.as_uri())
    end = time.monotonic() + 60.0
    while browser.execute_script("return document.documentElement.dataset.ready") is None:
        assert time.monotonic() < end, "the script did not end"
        time.sleep(0.1)
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "replicas", "one", "three", "damaged"])
def test_a_page_in_a_browser(pages: dict[str, Path], browser: Any, name: str) -> None:
    """In light and dark mode, on a phone and on a desktop screen."""
    axe = (Path(str(AXE)).parent / "axe.min.js").read_text(encoding="utf-8")
    for width in WIDTHS:
        opened(browser, pages[name], width)
        sent = [json.loads(each["message"])["message"] for each in browser.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"
                 and m["params"].get("documentURL", "").startswith("file:")]  # fmt: skip
        assert asked, "the log has the page itself"
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        dark = browser.execute_script("return matchMedia('(prefers-color-scheme:dark)').matches")
        assert dark == (browser.scheme == "dark")
        assert browser.execute_script(DRAWN) == []
        browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.get_log("browser") == []
        browser.execute_script(axe)
        found = browser.execute_async_script("const done = arguments[0]; axe.run().then(done, e => done({violations: [{id: String(e)}]}))")
        assert [(v["id"], [n["html"][:200] for n in v.get("nodes", ())]) for v in found["violations"]] == []


DRAWN = """
const empty = [];
for (const plot of document.querySelectorAll(".plot")) {
  const canvas = plot.querySelector("canvas");
  if (!canvas) { if (plot.textContent !== "nothing recorded") empty.push(plot.id); continue; }
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  if (!pixels.some(v => v)) empty.push(plot.id || plot.dataset.block);
}
return empty;
"""
"""Plots without a pixel."""


@pytest.mark.slow
def test_the_page_shows_the_figures(pages: dict[str, Path], browser: Any) -> None:
    """The page shows the values of `--json`: the head, the split of each rank, memory."""
    opened(browser, pages["pipeline"], 1280)
    shown = browser.execute_script("return JSON.parse(document.getElementById('figures').textContent)")
    for each in shown["head"]:
        (text,) = browser.execute_script(f"return [...document.querySelectorAll('[data-figure=\"{each['name']}\"]')].map(e => e.innerText)")
        assert format_value(each["measured"], each["unit"]) in text and format_value(each["predicted"], each["unit"]) in text
    cells = browser.execute_script("return [...document.querySelectorAll('[data-part]')].map(e => [e.dataset.part, +e.dataset.rank, e.innerText])")
    ranks = shown["runs"][0]["split"]["ranks"]
    assert cells and all(text == format_percent(ranks[rank]["parts"].get(part, 0) / ranks[rank]["seconds"]) for part, rank, text in cells)
    assert all(sum(r["parts"].values()) == pytest.approx(r["seconds"]) for r in ranks)


@pytest.mark.slow
def test_a_chart_zooms_by_keyboard_and_by_mouse(pages: dict[str, Path], browser: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    opened(browser, pages["pipeline"], 1280)
    plot = browser.find_element(By.CSS_SELECTOR, "[data-block=measured]")
    shot = lambda: browser.execute_script("return document.querySelector('[data-block=predicted] canvas').toDataURL()")  # noqa: E731
    browser.execute_script("document.querySelector('[data-block=measured]').scrollIntoView({block: 'center'})")
    before = shot()
    plot.send_keys("+")
    browser.execute_async_script("setTimeout(arguments[0], 100)")
    zoomed = shot()
    assert zoomed != before, "both timelines have one scale"
    plot.send_keys("0")
    browser.execute_async_script("setTimeout(arguments[0], 100)")
    assert shot() == before
    ActionChains(browser).move_to_element(plot.find_element(By.CSS_SELECTOR, ".u-over")).perform()
    assert "measured · rank" in browser.find_element(By.ID, "readout").text
    plot.send_keys(Keys.TAB)
