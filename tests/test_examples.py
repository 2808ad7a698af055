"""Example scripts: each one runs and does what its description states."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import papermill
import pytest
import torch
import yaml
from helpers import refused, run_command

import cpt_core as cpt
from cpt_lab.experiments.grids import find_grids

FOLDER = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.slow


def example(name):
    return runpy.run_path(str(FOLDER / f"{name}.py"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_example_is_short_documented_and_tested(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert (ast.get_docstring(ast.parse(text)) or "").count(".") >= 1
    assert path.stem in Path(__file__).read_text()
    brings = {"sklearn": "lab", "lightning": "lightning", "transformers": "text"}
    needed = {
        brings[name]
        for name in re.findall(r"^(?:from|import) (\w+)", text, re.M)
        if name in brings
    }
    assert re.findall(r"extras? `([\w,]+)`", text) == [",".join(sorted(needed))]
    page = (FOLDER.parent / "docs" / "integrations.md").read_text()
    assert (
        f"[`{path.name}`](../examples/{path.name}) | `{','.join(sorted(needed))}` |"
        in page
    )


def test_example_switch_kernels_follows_schedule():
    train = example("switch_kernels")["train"]
    schedule = cpt.schedules.TableSchedule(((16, 30), (32, 10)))
    accuracy, types = train(schedule, 24)
    assert types == [torch.bfloat16] * 30 + [torch.float32] * 10
    assert accuracy > 0.5
    assert train(schedule, 16)[1] == [torch.float32] * 40


@pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning")
def test_example_study_resumes_after_interruption(
    tmp_path, monkeypatch, command, capsys
):
    monkeypatch.chdir(tmp_path)
    assert command("study", "new", "mine")[0] == 0
    status, _, error = command("study", "new", "mine")
    assert status == 2
    message = "study.py is there already; name another folder, nothing was written"
    assert message in error
    folder = tmp_path / "mine"
    monkeypatch.chdir(folder)
    script, store = folder / "study.py", folder / "study.jsonl"
    text = script.read_text()
    script.write_text(text.replace("STORE = 400", "STORE = 4"))

    def study(seeds):
        monkeypatch.setattr(sys, "argv", ["study.py", str(seeds)])
        runpy.run_path("study.py", run_name="__main__")
        return capsys.readouterr().out.splitlines()

    refused("windows, at most one a step", study, 3)
    assert not store.exists()  # so that the settings may be corrected
    script.write_text(text.replace("STORE = 400", "STORE = 40"))
    lines = study(3)
    rows = store.read_text().splitlines()
    is_static = [line.startswith("static") for line in lines[2:-1]]
    table = list(zip(lines[2:-1], is_static, strict=True))
    arms = [line.rsplit(None, 4)[0] for line, static in table if not static]
    static = [line.split()[1:] for line, static in table if static]
    assert set(arms) == {*cpt.SUITE, "allocated"}
    assert len(rows) == 2 + 3 * (len(arms) + len(static))
    assert static[-1][:2] == ["8", "1.000"]
    assert lines[-1].startswith("Better than static bits of the same cost: ")
    assert (folder / "study.png").stat().st_size > 10_000

    store.write_text("".join(f"{row}\n" for row in rows[:-3]))
    assert study(3) == lines
    assert store.read_text().splitlines() == rows
    refused("give 3 or more, got 2", study, 2)

    script.write_text(
        script.read_text().replace(
            '"""Return a model, a', "# comment\n    " + '"""Return a model, a'
        )
    )
    assert study(3) == lines
    code = script.read_text()
    script.write_text(code.replace("lr=0.003", "lr=0.001"))
    refused("results of another build, quality or setting", study, 3)
    assert store.read_text().splitlines() == rows
    script.write_text(code)

    notebook = papermill.execute_notebook(
        folder / "study.ipynb",
        None,
        {"seeds": 3},
        cwd=folder,
        progress_bar=False,
        kernel_name="python3",
    )
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert outputs[-2]["text"].strip() == lines[-1]
    assert "image/png" in outputs[-1]["data"]
    assert store.read_text().splitlines() == rows


def test_example_processes_train_one_model(tmp_path, monkeypatch, capsys):
    """Train in a group of one process; the tests of integrations have several."""
    monkeypatch.chdir(tmp_path)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in {**address, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    example("processes")["main"]()
    assert not torch.distributed.is_initialized()
    first, *report = capsys.readouterr().out.splitlines()
    assert first.startswith("1 processes, accuracy ")
    assert float(first.split()[-2]) > 80
    # 64 x 32 multiplications for each of 50 pictures
    assert report[1].split()[:2] == ["0", "102,400"]
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["precision"]["last_step"] == 200


CLUSTER = FOLDER / "cluster"
GRID = ["digits/mlp6", "--arms", "CR", "RR"]
FOLDERS = {"CPT_DATA_DIR": "/data", "CPT_RUNS_DIR": "/shared"}
JOB = {"SLURM_JOB_NODELIST": "a,b", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
TORCHRUN = (
    "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-id 7 --rdzv-backend c10d "
    "--rdzv-endpoint a:29500 -m cpt_lab run"
)


@pytest.mark.parametrize(
    ("script", "called"),
    [
        ("slurm_array.sh", [*"cpt run".split(), *GRID, "--workers", "1"]),
        ("slurm_torchrun.sh", [*TORCHRUN.split(), *GRID]),
    ],
)
def test_example_slurm_script_starts_sweep(script, called, tmp_path):
    """Replace the programs of a cluster by ones that print their arguments."""
    programs = {
        "cpt": 'printf "%s\\n" cpt "$@"',
        "srun": 'printf "%s\\n" "$@"',
        "scontrol": 'printf "a\\nb\\n"',
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(CLUSTER / script), *GRID]
    out = run_command(*command, env={**os.environ, **path, **FOLDERS, **JOB})
    assert out.splitlines() == called
    process = subprocess.run(command, env=path, capture_output=True, text=True)
    assert "name the folder of the data" in process.stderr


def test_example_dask_hands_workers_to_sweep(monkeypatch):
    """Replace dask-jobqueue and the sweep by ones that record what they are given."""
    calls = []

    class Cluster:
        scheduler_address = "tcp://a:1"

        def __init__(self, **options):
            calls.append(options["job_script_prologue"])

        def adapt(self, minimum, maximum):
            calls.append((minimum, maximum))

        def close(self):
            calls.append("closed")

    def run(command):
        calls.append(command[1:])
        return SimpleNamespace(returncode=3)

    queue = SimpleNamespace(SLURMCluster=Cluster)
    monkeypatch.setitem(sys.modules, "dask_jobqueue", queue)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["slurm_dask.py", *GRID])
    for name, folder in FOLDERS.items():
        monkeypatch.setenv(name, folder)
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(CLUSTER / "slurm_dask.py"), run_name="__main__")
    scheduler = ["--executor", "dask", "--scheduler", "tcp://a:1"]
    assert error.value.code == 3
    assert calls == [
        ["export CPT_DATA_DIR=/data CPT_RUNS_DIR=/shared"],
        (0, 16),
        ["-m", "cpt_lab", "run", *GRID, *scheduler],
        "closed",
    ]


def test_example_kubernetes_job_runs_existing_grid():
    job = yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["cpt", "run"]
    assert find_grids(container["command"][2])
    assert {e["name"] for e in container["env"]} == {"CPT_DATA_DIR", "CPT_RUNS_DIR"}
    assert {m["name"] for m in container["volumeMounts"]} == {
        v["name"] for v in pod["volumes"]
    }
    assert all(isinstance(word, str) for word in container["command"])


def test_example_hugging_face_trainer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    found = example("huggingface")["main"](str(tmp_path), steps=16)
    assert found["eval_bits"] == 8
    assert found["eval_loss"] < 4.6  # below that of guessing one of 100 characters
    assert (tmp_path / "checkpoint-8" / "precision.pt").exists()


def test_example_lightning_trainer(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    found = example("lightning_digits")["main"](steps=100, folder=str(tmp_path))
    assert found["eval_bits"] == 8
    assert found["accuracy"] > 0.6


PATCHES = sorted(FOLDER.glob("*.patch"))


def hunks(path):
    """Return a patch's script, and (the preceding line number, added lines); a patch quotes no foreign line."""
    head, diff = path.read_text().split("\ndiff --git ")
    assert all(
        word in head
        for word in (
            "git apply --3way --unidiff-zero",
            "patch -p1",
            "sha256sum -c",
            "is quoted here",
        )
    )
    hunk = re.compile(r"^@@ -(\d+),0 \+\d+(?:,\d+)? @@\n((?:\+.*\n)+)", re.M)
    _, index, old, new = hunk.sub("", diff).splitlines()
    assert (old[:6], new) == ("--- a/", f"+++ b/{old[6:]}")
    assert (
        f"git cat-file -e {index.split()[1][:12]} " in head
    )  # else git takes the numbers of lines for another file
    found = [
        (int(after), re.findall(r"^\+(.*)", added, re.M))
        for after, added in hunk.findall(diff)
    ]
    assert sum(len(added) for _, added in found) == 3
    return old[6:], found


THREE = ("make_schedule", "quantize_", "PrecisionScheduler")
IMPORTS = ["import torch"]
BEGINNING = [
    "def main(args, model, optimizer, data_loader, seen):",
    "    loader_train = data_loader",
]
LOOP = """
    if args.resume:
        optimizer.load_state_dict(args.resume)
    for _ in range(args.start, args.stop):
        for i, x in enumerate(data_loader, 1):
            model.train()(x).square().mean().backward()
            if i % args.grad_accum_steps == 0 or i == len(data_loader):
                seen.append(model.precision.bits)
                optimizer.step()
        seen.append(model.eval().precision.bits)
    return optimizer.state_dict()
"""
AROUND = {"import": (IMPORTS, []), "    schedule": (BEGINNING, LOOP.splitlines()[1:])}


@pytest.mark.parametrize("path", PATCHES, ids=lambda p: p.stem)
def test_example_patch_trains_resumes_and_evaluates(path, tmp_path):
    """Apply the patch to a stand-in script with the needed lines at the same places."""
    name, places = hunks(path)
    used = re.findall(
        r"\bcpt\.(\w+)", "\n".join(line for _, added in places for line in added)
    )
    assert (sorted(used), len(path.read_text().splitlines()) < 60) == (
        sorted(THREE),
        True,
    )
    lines = [""] * (places[-1][0] + 40)
    for after, (first, *_) in places:
        above, below = next(
            around for start, around in AROUND.items() if first.startswith(start)
        )
        lines[after - len(above) : after + len(below)] = above + below
    script = tmp_path / name
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("\n".join(lines))
    run_command("git", "apply", "--unidiff-zero", path, cwd=tmp_path)
    main = runpy.run_path(str(script))["main"]
    accumulated = 3 if "grad_accum_steps" in path.read_text() else 1
    epoch = -(-50 // accumulated)
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=4 * epoch)

    def trained(start, stop, resume=None):
        model, seen = torch.nn.Linear(3, 2), []
        args = SimpleNamespace(
            epochs=4,
            grad_accum_steps=accumulated,
            start=start,
            stop=stop,
            resume=resume,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return seen, main(
            args, model, optimizer, [torch.randn(4, 3) for _ in range(50)], seen
        )

    expected = [
        q
        for e in range(4)
        for q in (*map(schedule, range(e * epoch, (e + 1) * epoch)), 8)
    ]
    whole, state = trained(0, 4)
    assert (whole, state["precision"]["last_step"]) == (expected, 4 * epoch)
    half, state = trained(0, 2)
    assert half + trained(2, 4, state)[0] == expected
