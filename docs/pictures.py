"""Take the pictures for pages of `plait report`: `python docs/generate.py pages`. It trains the example under four plans, which requires an
idle machine, and takes the pictures in a headless chromium."""

import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

DOCS = Path(__file__).resolve().parent
JOB = "examples/stdlib_gpt/job.py"
PLANS = {"one": "dp=1", "shards": "fsdp=2", "pipeline": "pp=2 microbatches=4", "replicas": "dp=2"}
PAGES = {"report_gpt": (("replicas",), 1500), "report_pipeline": (("pipeline",), 2250), "report_three": (("replicas", "one", "shards"), 2900)}
"""The runs of each page, and the height of its picture in pixels."""
WIDTH = 1000


def picture(page: Path, file: Path, height: int) -> None:
    """Take a picture of a page in a window of this height."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("there is no chromium here to take the pictures with")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{height}", f"--screenshot={file}"]
    subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(DOCS.parent / "examples", Path(folder, "examples"))
        plait = partial(subprocess.run, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        into, runs = Path(folder, "runs"), dict[str, Path]()
        for name, plan in PLANS.items():
            plait([sys.executable, "-m", "plait", "train", JOB, "--plan", plan, "--steps", "60"])
            runs[name] = (into / "latest").resolve()
        for name, (shown, height) in PAGES.items():
            plait([sys.executable, "-m", "plait", "report", *(str(runs[each]) for each in shown)])
            picture((runs[shown[0]] if len(shown) == 1 else into) / "report.html", DOCS / f"{name}.png", height)
