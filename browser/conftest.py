"""Fixtures of the browser tests: browser, folder of screenshots, JupyterLab server, pages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

from browser.lab import Server

ROOT = Path(__file__).parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start Playwright's own Chromium, or the installed one."""
    with sync_playwright() as playwright:
        bundled = Path(playwright.chromium.executable_path)
        installed = next(filter(None, map(shutil.which, NAMES)), None)
        if not bundled.exists() and installed is None:
            pytest.exit(
                f"no Chromium: neither {bundled} nor one of {', '.join(NAMES)} is there. Get one: make chromium",
                1,
            )
        sandbox = (
            sys.platform != "linux" or os.geteuid() != 0
        )  # Chromium refuses its sandbox to root
        try:
            instance = playwright.chromium.launch(
                executable_path=None if bundled.exists() else installed,
                chromium_sandbox=sandbox,
            )
        except Error as error:
            pytest.exit(
                f"Chromium does not start: {error.message}. Another one: make chromium",
                1,
            )
        yield instance
        instance.close()


@pytest.fixture(scope="session")
def shots() -> Path:
    """Return the folder of screenshots."""
    folder = ROOT / "build" / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start JupyterLab on a copy of the notebooks, with separate settings."""
    with Server(tmp_path_factory.mktemp("lab"), ROOT) as running_server:
        yield running_server


@pytest.fixture(scope="session")
def site() -> Path:
    """Return the folder of the site that ``make book`` built."""
    folder = ROOT / "build" / "book"
    if not (folder / "explorer.html").exists():
        pytest.exit(f"{folder} is not whole: make book", 1)
    return folder


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of the committed rows, and return its path."""
    page = tmp_path_factory.mktemp("report") / "report.html"
    rows = sorted((ROOT / "data" / "results").glob("*.jsonl"))
    subprocess.run(
        [sys.executable, "-m", "cpt_lab", "report", *rows, "--out", page],
        check=True,
        cwd=ROOT,
    )
    return page


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of ``make reproduce`` after notebook 03 ran at demo scale.

    The runs have two schedules and static 8, on three seeds.
    """
    runs = tmp_path_factory.mktemp("runs")
    parameters = ["schedules=[CR, RR]", "static_bits=[8]", "seeds=[0, 1, 2]"]
    command = [
        sys.executable,
        "-m",
        "cpt_lab",
        "reproduce",
        "--scale",
        "demo",
        "--notebook",
        "03",
    ]
    for parameter in parameters:
        command += ["--parameter", parameter]
    subprocess.run(
        command, check=True, cwd=ROOT, env={**os.environ, "CPT_RUNS_DIR": str(runs)}
    )
    return runs / "reproduce" / "demo" / "index.html"
