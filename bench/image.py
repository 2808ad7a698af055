"""Check of the Docker image: build it, start JupyterLab, list the notebooks, run one.

    python -m bench.image
    python -m bench.image --builder buildah --base localhost/python:3.11

Needs docker, podman or buildah; the first that works is taken. The image holds 8 GB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME, TOKEN = "cpt-check", "of-this-check"
BUILDERS = {
    "docker": ("docker", "info"),
    "podman": ("podman", "info"),
    "buildah": ("buildah", "info"),
}
ISOLATION = (
    "--isolation",
    "chroot",
    "--network",
    "host",
)  # buildah's, which asks for no daemon and no privileges


def _works(builder: str) -> bool:
    return (
        shutil.which(builder) is not None
        and subprocess.run(BUILDERS[builder], capture_output=True).returncode == 0
    )


def build(builder: str, base: str | None) -> None:
    """Build the image from the checkout."""
    arguments = ["--build-arg", f"BASE_IMAGE={base}"] if base else []
    more = [*ISOLATION, "--layers"] if builder == "buildah" else []
    subprocess.run(
        [builder, "build", *more, *arguments, "-t", NAME, "."], cwd=ROOT, check=True
    )


@contextmanager
def running(builder: str, port: int) -> Iterator[list[str]]:
    """Start the image as the README says; yield the prefix of commands that run inside it."""
    if builder != "buildah":
        start = [
            "run",
            "--rm",
            "-d",
            "--ipc=host",
            "-p",
            f"127.0.0.1:{port}:8888",
            "-e",
            f"JUPYTER_TOKEN={TOKEN}",
            NAME,
        ]
        container = subprocess.run(
            [builder, *start], check=True, capture_output=True, text=True
        ).stdout.strip()
        try:
            yield [builder, "exec", container]
        finally:
            subprocess.run([builder, "rm", "-f", container], capture_output=True)
        return
    container = subprocess.run(
        [builder, "from", NAME], check=True, capture_output=True, text=True
    ).stdout.strip()
    command_prefix = [builder, "run", *ISOLATION, container, "--"]
    inspection = json.loads(
        subprocess.run(
            [builder, "inspect", container], check=True, capture_output=True
        ).stdout
    )
    command = [
        word if not word.startswith("--port") else f"--port={port}"
        for word in inspection["OCIv1"]["config"]["Cmd"]
    ]
    server = subprocess.Popen(
        [*command_prefix, "env", f"JUPYTER_TOKEN={TOKEN}", *command]
    )
    try:
        yield command_prefix
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        subprocess.run([builder, "rm", container], capture_output=True)


def ask(port: int, path: str, patience: float = 120.0) -> dict:
    """Return the answer of JupyterLab's server; wait until it is up."""
    end = time.monotonic() + patience
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"token {TOKEN}"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return dict(json.load(answer))
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if time.monotonic() > end:
                raise SystemExit(
                    f"image: no answer from JupyterLab within {patience:.0f} seconds"
                ) from None
            time.sleep(0.5)


# What a GPU would need can be seen without one. Triton compiles a file that includes Python.h when it starts.
INSIDE = """
import pathlib, sysconfig, torch
header = pathlib.Path(sysconfig.get_paths()["include"], "Python.h")
if not header.exists():
    raise SystemExit(f"there is no {header}, so Triton has no kernels on a GPU")
if torch.version.cuda is None:
    raise SystemExit(f"torch {torch.__version__} is built for the CPU alone")
import dgl
parts = pathlib.Path(dgl.__file__).parent.glob("*.so")
on_cuda = any(b"libcudart" in part.read_bytes() for part in parts)
print(f"image: Python.h is there, torch is for CUDA {torch.version.cuda}")
print("image: DGL is for", "CUDA" if on_cuda else "the CPU alone: cpt_core.graphs is what runs on CUDA")
"""


def look_inside(command_prefix: list[str]) -> None:
    """Check inside the image what a GPU needs, and run ``cpt doctor``."""
    for check, arguments in (
        ("what a GPU needs", ("-c", INSIDE)),
        ("cpt doctor", ("-m", "cpt_lab", "doctor")),
    ):
        run = ["sh", "-c", 'cd /home/cpt/cpt && exec python "$@"', "sh", *arguments]
        if subprocess.run([*command_prefix, *run], stdin=subprocess.DEVNULL).returncode:
            raise SystemExit(f"image: {check} fails inside")


def main() -> None:
    """Build the image, start it, and run the checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--builder", choices=BUILDERS, help="default: the first that works"
    )
    parser.add_argument(
        "--base", help="BASE_IMAGE of the Dockerfile, where its own cannot be had"
    )
    options = parser.parse_args()
    builder = options.builder or next(filter(_works, BUILDERS), None)
    if builder is None:
        raise SystemExit(
            f"image needs one of {', '.join(BUILDERS)}; docker needs its daemon, too"
        )
    build(builder, options.base)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running(builder, port) as command_prefix:
        listed_notebooks = {
            entry["name"] for entry in ask(port, "/api/contents/notebooks")["content"]
        }
        committed_notebooks = {
            path.name for path in (ROOT / "notebooks").glob("*.ipynb")
        }
        if not committed_notebooks <= listed_notebooks:
            raise SystemExit(
                f"image: JupyterLab does not list {', '.join(sorted(committed_notebooks - listed_notebooks))}"
            )
        print(f"image: JupyterLab lists {len(committed_notebooks)} notebooks")
        look_inside(command_prefix)
        run = [
            "sh",
            "-c",
            "cd /home/cpt/cpt && python -m cpt_lab reproduce --notebook 00 --scale smoke",
        ]
        if subprocess.run([*command_prefix, *run], stdin=subprocess.DEVNULL).returncode:
            raise SystemExit("image: notebook 00 does not run inside")
    print("image: notebook 00 ran inside; all checks passed")


if __name__ == "__main__":
    main()
