"""Check of the Docker image, with a simulated builder: its calls and its rejections."""

import subprocess
import sys

import pytest
import torch
from helpers import refused

from bench import image

NOTEBOOKS = sorted(path.name for path in (image.ROOT / "notebooks").glob("*.ipynb"))
DOCKER = """#!{python}
import os, subprocess, sys
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
    sys.exit({fails!r} in " ".join(words))
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
def fake_docker(tmp_path, monkeypatch):
    """Return a function that puts only a fake docker on the PATH, and returns the log of its calls."""

    def put(notebooks=NOTEBOOKS, fails="nothing"):
        log, docker = tmp_path / "log", tmp_path / "docker"
        server = SERVER.format(token=image.TOKEN, names=notebooks)
        script = DOCKER.format(
            python=sys.executable, log=str(log), server=server, fails=fails
        )
        docker.write_text(script)
        docker.chmod(0o755)
        return log

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["image"])
    return put


@pytest.mark.slow
def test_image_check_builds_starts_and_runs_notebook(fake_docker, capsys):
    log = fake_docker()
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("notebooks", "fails", "message"),
    [
        (NOTEBOOKS[1:], "nothing", "does not list 00_start_here"),
        (NOTEBOOKS, "reproduce", "notebook 00 does not run inside"),
        (NOTEBOOKS, "Python.h", "image: what a GPU needs fails inside"),
        (NOTEBOOKS, "doctor", "image: cpt doctor fails inside"),
    ],
)
def test_image_check_reports_failure(notebooks, fails, message, fake_docker):
    """End with the reason, and remove the container all the same."""
    log = fake_docker(notebooks, fails)
    refused(message, image.main, error=SystemExit)
    assert log.read_text().splitlines()[-1].startswith("rm -f")


def test_image_check_names_missing_builder(fake_docker):
    refused("needs one of docker, podman, buildah", image.main, error=SystemExit)


@pytest.mark.slow
def test_image_check_of_gpu_requirements():
    """Check this environment as the image: a Python header, torch for CUDA, and DGL's device."""

    def run(script):
        command = [sys.executable, "-c", script]
        process = subprocess.run(command, capture_output=True, text=True)
        return process.returncode, process.stdout, process.stderr

    status, out, err = run(image.INSIDE)
    assert status == (0 if torch.version.cuda else 1), err
    if torch.version.cuda:
        assert f"torch is for CUDA {torch.version.cuda}" in out
        assert "DGL is for the CPU alone: cpt_core.graphs is what runs on CUDA" in out
    status, _, err = run(image.INSIDE.replace('"Python.h")', '"None.h")'))
    assert status == 1
    assert "so Triton has no kernels on a GPU" in err
