"""Make the pictures on docs/dashboard.md and docs/index.md: a real run's pages, light and dark, wide and narrow.

    python docs/dashboard_pictures.py            # into docs/images; takes about three minutes

Needs Chromium with its driver (Debian: `apt-get install chromium chromium-driver`), Selenium and Pillow. The run is the
demo, with an environment whose tool can hang, two dead letters, and an older run that was killed.
"""

import base64
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import tomli_w
from PIL import Image, ImageChops
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from stream.connection.run_connection import connect
from stream.queue.stage import RetryPolicy, Stage
from workers.demo.prepare import prepare_run
from workers.settings.toml_file import dump_settings

IMAGES = Path(__file__).parent / "images"
SIZES = {1440: 900, 390: 900}
THEMES = ("light", "dark")
GAP = 24
STEPS = 8
"""Steps before the pictures are taken: enough for charts."""
ENVIRONMENT = '''
import time
from pathlib import Path

from envs.builtin.calculator import Calculator

HANG = Path(__file__).with_name("hang")


class Slow(Calculator):
    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The number to add to it.
        """
        while HANG.exists() and a % 5 == 0:
            time.sleep(0.05)
        return super().add(a, b)
'''


def write_project(folder: Path) -> Path:
    """Write the run's files; returns its settings file."""
    settings = prepare_run(folder / "runs" / "demo", seed=1, steps=60)
    (folder / "slow.py").write_text(ENVIRONMENT)
    file = folder / "runs" / "demo" / "run.toml"
    table = tomllib.loads(dump_settings(settings))
    table["environments"] = {"calculator": f"{folder / 'slow.py'}:Slow"}
    table["rollout"]["call_timeout_s"] = 300.0
    table["run"]["dashboard"] = "off"
    prompts = Path(table["data"]["path"]).read_text().splitlines()
    (folder / "held_out.jsonl").write_text("\n".join(prompts[:16]))
    table["eval"] = {"path": str(folder / "held_out.jsonl"), "every": 3, "group_size": 2}
    file.write_text(tomli_w.dumps(table))
    return file


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command of Penstock; ended at the end."""
    command = [sys.executable, "-m", "penstock", *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:  # noqa: S603
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def wait_for(what: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Return what a function returns as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not get there")
        time.sleep(0.1)
    return found


def steps(run: Path) -> int:
    """Return how many steps a run has made."""
    file = run / "metrics.jsonl"
    return sum("reward/mean" in line for line in file.read_text().splitlines()) if file.exists() else 0


async def let_some_die(run: Path) -> None:
    """Claim prompts as a worker would, and give them up because of their content."""
    live = json.loads((run / "live.json").read_text())
    async with connect(live["redis"], run.name, create=False) as connection:
        stage = Stage(connection, "prompts", "rollout-7", RetryPolicy(data_attempts=1))
        for error in ("ValueError: no column 'problem'", "ValueError: image 3 does not decode"):
            for lease in (await stage.claim(1)).leases:
                await stage.release(lease, "data", error)


def open_browser() -> webdriver.Chrome:
    """Start headless Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def picture(driver: webdriver.Chrome, url: str, width: int, theme: str) -> Image.Image:
    """Return a picture of a page."""
    metrics = {"width": width, "height": SIZES[width], "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get(url)
    time.sleep(1.5)
    driver.execute_script("document.querySelector('[aria-describedby]')?.scrollIntoView({block: 'center'})")
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": False})
    return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")


def sheet(driver: webdriver.Chrome, url: str) -> Image.Image:
    """Return the four pictures of a page on one: light above dark, wide beside narrow; empty space below is cut off."""
    rows = [[picture(driver, url, width, theme) for width in SIZES] for theme in THEMES]
    heights = [min(max(map(content_height, row)) + GAP, max(SIZES.values())) for row in rows]
    found = Image.new("RGB", (sum(SIZES) + GAP, sum(heights) + GAP), "#8a939c")
    y = 0
    for row, height in zip(rows, heights, strict=True):
        x = 0
        for each in row:
            found.paste(each.crop((0, 0, each.width, height)), (x, y))
            x += each.width + GAP
        y += height + GAP
    return found


def content_height(page: Image.Image) -> int:
    """Return the height of a picture without the empty space at its bottom."""
    ground = Image.new("RGB", page.size, page.getpixel((0, page.height - 1)))
    box = ImageChops.difference(page, ground).point(lambda value: 255 if value > 8 else 0).getbbox()
    return box[3] if box else page.height


def token_url(folder: Path, page: str) -> str:
    """Return the address of a group in which rewards differ, with the tokens of two completions."""
    command = [
        sys.executable,
        "-m",
        "penstock",
        "groups",
        "demo",
        "--json",
        "--end",
        "trained",
        "--step",
        "2..",
        "-n",
        "1",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603
    return f"{page}/group?id={json.loads(done.stdout.splitlines()[0])['prompt_id']}"


def take_all(folder: Path, out: Path) -> None:
    """Take the pictures of a run that goes on."""
    run = folder / "runs" / "demo"
    wait_for(lambda: steps(run) >= STEPS)
    older = folder / "runs" / "demo-killed"
    changing = ("weights", "checkpoints", "redis", "live.json", "summary.json", "*.sock", "*.lock")
    shutil.copytree(run, older, ignore=shutil.ignore_patterns(*changing))
    (older / "run.toml").write_text((run / "run.toml").read_text().replace(str(run), str(older)))
    anyio.run(let_some_die, run)
    with started(folder, "dashboard", "--allow-changes", "--port", "0") as process:
        address = str(process.stdout and process.stdout.readline()).split()[-1]
        root = address.partition("/?token=")[0]
        page = f"{root}/runs/demo"
        group = token_url(folder, page)
        driver = open_browser()
        try:
            driver.get(address)  # the cookie with the token
            pages = {
                "run": page,
                "groups": f"{page}/groups?end=trained",
                "group": group,
                "group-tokens": f"{group}&tokens=0,1&color=advantage",
                "timeline": f"{page}/timeline?step=4..6",
                "compare": f"{root}/compare?run=demo&run=demo-killed",
                "evaluations": f"{page}/evaluations",
                "in-flight": f"{page}/in-flight",
                "workers": f"{page}/workers",
                "dead": f"{page}/dead",
                "runs": root,
            }
            for name, url in pages.items():
                if name == "in-flight":
                    (folder / "hang").touch()
                    time.sleep(4)
                sheet(driver, url).save(out / f"dashboard-{name}.webp", quality=50, method=6)
            for theme in THEMES:
                picture(driver, page, max(SIZES), theme).save(out / f"landing-{theme}.webp", quality=60, method=6)
        finally:
            (folder / "hang").unlink(missing_ok=True)
            driver.quit()


def main() -> None:
    """Make the run and the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_project(folder)
        with started(folder, "run", str(file), "--no-check", "--quiet"):
            take_all(folder, IMAGES)


if __name__ == "__main__":
    main()
