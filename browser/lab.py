"""JupyterLab for the browser tests: a server on a copy of the notebooks, and an open notebook."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Locator, Page

from cpt_lessons.notebooks import copy_notebooks

PATIENCE = 240  # seconds for a notebook at smoke scale, on a machine with other work

# Every cell stays in the page, so that all of them can be looked at; the theme is that of the system; no news.
SETTINGS = {
    "notebook-extension/tracker": {
        "windowingMode": "none",
        "autoStartDefaultKernel": True,
    },
    "apputils-extension/themes": {"adaptive-theme": True},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}

# What a run leaves in the page, cell by cell.
STATE = """() => [...document.querySelectorAll(".jp-Notebook .jp-Cell")].map(cell => ({
    code: cell.classList.contains("jp-CodeCell"),
    prompt: cell.querySelector(".jp-InputPrompt")?.textContent ?? "",
    types: [...cell.querySelectorAll(".jp-OutputArea-output[data-mime-type]")].map(o => o.dataset.mimeType),
    text: [...cell.querySelectorAll(".jp-OutputArea-output")].map(o => o.innerText).join("\\n"),
    pictures: [...cell.querySelectorAll(".jp-OutputArea-output img")].map(
        i => i.complete && i.naturalWidth > 0 && i.getBoundingClientRect().width > 0)
}))"""

# Text of the reader's pages in which formulas are still as they are written.
RAW_MATHS = r"""() => [...document.querySelectorAll(".jp-RenderedMarkdown")].flatMap(part => {
    const copy = part.cloneNode(true);
    copy.querySelectorAll("code, pre, mjx-container").forEach(e => e.remove());
    return copy.textContent.match(/\$[^$\n]*\$|\$\$|\\\(|\\\[|\\frac|\\mathrm/g) ?? [];
})"""


class Server:
    """A JupyterLab that stops at the end of its ``with`` block.

    Args:
        folder: a new folder, for the notebooks without outputs, their runs and all that Jupyter writes.
        root: the checkout whose package the kernels import.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.notebooks, settings_folder = folder / "notebooks", folder / "jupyter"
        for path in copy_notebooks(self.notebooks):
            book = nbformat.read(path, as_version=4)
            for cell in book.cells:
                if cell.cell_type == "code":
                    cell.outputs, cell.execution_count = [], None
            nbformat.write(book, path)
        for name, values in SETTINGS.items():
            path = (
                settings_folder
                / "settings"
                / "@jupyterlab"
                / f"{name}.jupyterlab-settings"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values), encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.token, self.address, self.log = (
            secrets.token_hex(16),
            f"http://127.0.0.1:{port}",
            folder / "jupyter.log",
        )
        environment = {
            "JUPYTER_CONFIG_DIR": settings_folder,
            "JUPYTER_DATA_DIR": settings_folder,
            "JUPYTER_RUNTIME_DIR": settings_folder / "runtime",
            "JUPYTERLAB_SETTINGS_DIR": settings_folder / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": settings_folder / "workspaces",
            "IPYTHONDIR": settings_folder / "ipython",
            "PYTHONPATH": root,
        }
        command = [
            sys.executable,
            "-m",
            "jupyter",
            "lab",
            "--no-browser",
            "--allow-root",
            f"--port={port}",
        ]
        command += [
            "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self.token}",
        ]
        command += [f"--ServerApp.root_dir={self.notebooks}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.notebooks,
                env=os.environ
                | {name: str(value) for name, value in environment.items()},
            )

    def __enter__(self) -> Server:
        end = time.monotonic() + 60
        while True:
            try:
                self.ask("api/status")
                return self
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None or time.monotonic() > end:
                    self.process.kill()
                    raise RuntimeError(
                        f"JupyterLab did not start:\n{self.log.read_text()}"
                    ) from None
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        try:
            self.stop_kernels()
            self.process.terminate()
            self.process.wait(30)
        finally:
            self.process.kill()

    def ask(self, path: str, method: str = "GET") -> Any:
        """Return the answer of Jupyter's REST API."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(
            f"{self.address}/{path}", None, headers, method=method
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read() or "null")

    def stop_kernels(self) -> None:
        """Stop every kernel, so that the next notebook has the machine to itself."""
        for session in self.ask("api/sessions"):
            self.ask(f"api/sessions/{session['id']}", "DELETE")


class Notebook:
    """A notebook that is open in JupyterLab.

    Args:
        page: a fresh page of a browser.
        server: where the notebook lies.
        name: its file.
    """

    def __init__(self, page: Page, server: Server, name: str) -> None:
        self.page, self.path = page, server.notebooks / name
        self.cells = nbformat.read(self.path, as_version=4).cells
        # in a workspace of its own: in that of the others, their tabs would be opened again
        page.goto(
            f"{server.address}/lab/workspaces/{self.path.stem}/tree/{name}?token={server.token}"
        )
        page.locator(".jp-Notebook .jp-Cell").nth(len(self.cells) - 1).wait_for(
            timeout=60_000
        )
        page.locator(".jp-StatusBar-Widget").get_by_text("| Idle").wait_for(
            timeout=60_000
        )  # its kernel is there

    def cell(self, i: int) -> Locator:
        """Return a cell by its place."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(i)

    def state(self) -> list[dict[str, Any]]:
        """Return the state of every cell on the page: prompt, kinds and text of outputs, whether images are loaded."""
        return self.page.evaluate(STATE)

    def containing(self, pattern: str) -> dict[str, int]:
        """Return the indices of the code cells that match a pattern, by the pattern's first group."""
        code = [
            (i, c.source) for i, c in enumerate(self.cells) if c.cell_type == "code"
        ]
        return {group: i for i, source in code for group in re.findall(pattern, source)}

    def run_all(self) -> None:
        """Choose Run All Cells in the menu, and wait until no cell is pending."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.page.locator(
            ".jp-InputPrompt", has_text=re.compile(r"\d|\*")
        ).first.wait_for(timeout=20_000)
        is_idle = '() => ![...document.querySelectorAll(".jp-InputPrompt")].some(e => e.textContent.includes("*"))'
        self.page.wait_for_function(is_idle, timeout=1000 * PATIENCE)
        self.page.locator(
            "[data-status=idle].jp-Notebook-ExecutionIndicator"
        ).wait_for()

    def run(self, i: int, source: str | None = None) -> str:
        """Replace the source of a cell if one is given, run it by Ctrl-Enter, and return its output."""
        counts = [
            int(n) for cell in self.state() for n in re.findall(r"\d+", cell["prompt"])
        ]
        editor = self.cell(i).locator(".cm-content")
        editor.scroll_into_view_if_needed()
        editor.click(position={"x": 5, "y": 5})
        if source is not None:
            self.page.keyboard.press("Control+a")
            self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Control+Enter")
        is_finished = f"""() => Number(document.querySelectorAll(".jp-Notebook .jp-Cell")[{i}]
            .querySelector(".jp-InputPrompt").textContent.replace(/\\D/g, "")) > {max(counts, default=0)}"""
        self.page.wait_for_function(is_finished, timeout=1000 * PATIENCE)
        return self.state()[i]["text"]

    def saved(self) -> Any:
        """Save the notebook by Ctrl-S, and return the saved file."""
        before = self.path.read_bytes()
        self.page.locator(".jp-Notebook").press("Escape")
        self.page.keyboard.press("Control+s")
        end = time.monotonic() + 30
        while time.monotonic() < end:
            time.sleep(0.2)
            if (content := self.path.read_bytes()) != before and content.endswith(
                b"}\n"
            ):
                return nbformat.reads(content.decode("utf-8"), as_version=4)
        raise TimeoutError(f"{self.path.name} was not saved")

    def picture(self, path: Path) -> None:
        """Save a screenshot of the whole notebook."""
        size = self.page.viewport_size
        height = self.page.evaluate(
            "document.querySelector('.jp-WindowedPanel-outer').scrollHeight"
        )
        self.page.set_viewport_size(
            {"width": size["width"], "height": min(int(height) + 150, 16_000)}
        )
        self.page.evaluate(
            "document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0"
        )
        self.page.wait_for_timeout(300)
        self.page.screenshot(path=path)
        self.page.set_viewport_size(size)
