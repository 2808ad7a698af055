"""Check of the Docker image, with a simulated builder: its calls and its rejections."""

import stat
import subprocess
import sys

import pytest
import torch
from helpers import refused

from bench import image

NOTEBOOKS = sorted(path.name for path in (image.ROOT / "notebooks").glob("*.ipynb"))
PRETENDS = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(" ".join(words).replace("\\n", " ") + "\\n")
if words[0] == "run":
    port = words[words.index("-p") + 1].split(":")[1]
    silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = subprocess.Popen([sys.executable, "-c", {server!r}, port], **silent)
    print(server.pid)
if words[0] == "rm":
    os.kill(int(words[-1]), 15)
if words[0] == "exec":
    sys.exit({status} if {fails!r} in " ".join(words) else 0)
"""
SERVER = """
import http.server, json, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == "token {token}" and self.path == "/api/contents/notebooks"
        self.send_response(200 if right else 403)
        self.end_headers()
        self.wfile.write(json.dumps({{"content": [{{"name": name}} for name in {names!r}]}}).encode())
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Put only a fake docker with a server of these notebooks on the PATH; return the log of its calls."""

    def put(names, status=0, fails="reproduce"):
        log, docker = tmp_path / "log", tmp_path / "docker"
        server = SERVER.format(token=image.TOKEN, names=names)
        docker.write_text(
            PRETENDS.format(
                python=sys.executable,
                log=str(log),
                server=server,
                status=status,
                fails=fails,
            )
        )
        docker.chmod(docker.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["image"])
        return log

    return put


def test_image_check_builds_starts_and_runs_notebook(pretend, capsys):
    log = pretend(NOTEBOOKS)
    image.main()
    info, build, run, needs, doctor, inside, removed = log.read_text().splitlines()
    assert (info, build) == ("info", "build -t cpt-check .")
    assert run.startswith("run --rm -d --ipc=host -p 127.0.0.1:")
    assert "Python.h" in needs
    assert "torch.version.cuda" in needs
    assert doctor.endswith("-m cpt_lab doctor")
    assert inside.endswith("reproduce --notebook 00 --scale smoke")
    assert removed == f"rm -f {inside.split()[1]}"
    assert f"lists {len(NOTEBOOKS)} notebooks" in capsys.readouterr().out


def test_image_check_rejects_missing_or_failing_notebook(pretend):
    pretend(NOTEBOOKS[1:])
    refused("does not list 00_start_here", image.main, error=SystemExit)
    log = pretend(NOTEBOOKS, status=1)
    refused("notebook 00 does not run inside", image.main, error=SystemExit)
    assert log.read_text().splitlines()[-1].startswith("rm -f"), (
        "the container is removed all the same"
    )


@pytest.mark.parametrize(
    ("fails", "what"), [("Python.h", "what a GPU needs"), ("doctor", "cpt doctor")]
)
def test_image_check_rejects_failing_inner_check(fails, what, pretend):
    pretend(NOTEBOOKS, status=1, fails=fails)
    refused(f"image: {what} fails inside", image.main, error=SystemExit)


def test_image_check_of_gpu_requirements(capfd):
    """Check here, as in the image: a Python header, torch for CUDA, and DGL's device."""
    done = subprocess.run(
        [sys.executable, "-c", image.INSIDE], capture_output=True, text=True
    )
    expected = 0 if torch.version.cuda else 1
    assert done.returncode == expected, done.stderr
    if not expected:
        assert f"torch is for CUDA {torch.version.cuda}" in done.stdout
        assert (
            "DGL is for the CPU alone: cpt_core.graphs is what runs on CUDA"
            in done.stdout
        )
    changed = image.INSIDE.replace('"Python.h")', '"None.h")')
    done = subprocess.run(
        [sys.executable, "-c", changed], capture_output=True, text=True
    )
    assert (done.returncode, "so Triton has no kernels on a GPU" in done.stderr) == (
        1,
        True,
    )


def test_image_check_names_missing_builder(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["image"])
    refused("needs one of docker, podman, buildah", image.main, error=SystemExit)
