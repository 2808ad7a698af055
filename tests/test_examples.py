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
from cpt_lab.sweeps.stores import load_rows

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
    status, _, wrong = command("study", "new", "mine")
    assert status == 2
    assert (
        "study.py is there already; name another folder, nothing was written" in wrong
    )
    folder = tmp_path / "mine"
    monkeypatch.chdir(folder)
    script, store = folder / "study.py", folder / "study.jsonl"
    assert len(script.read_text().splitlines()) <= 160
    script.write_text(
        script.read_text().replace(
            "STEPS, Q_MAX, STORE = 400", "STEPS, Q_MAX, STORE = 40"
        )
    )

    def study(seeds):
        monkeypatch.setattr(sys, "argv", ["study.py", str(seeds)])
        runpy.run_path("study.py", run_name="__main__")
        return capsys.readouterr().out.splitlines()

    said = study(3)
    kept = store.read_text().splitlines()
    arms = [
        line.rsplit(None, 4)[0] for line in said[2:-1] if not line.startswith("static")
    ]
    static = [line.split()[1:] for line in said[2:-1] if line.startswith("static")]
    assert {*arms} == {*cpt.SUITE, "allocated"}
    assert len(kept) == 1 + 3 * (len(arms) + len(static))
    assert static[-1][:2] == ["8", "1.000"]
    assert said[-1].startswith("Better than static bits of the same cost: ")
    assert (folder / "study.png").stat().st_size > 10_000
    store.write_text("".join(f"{line}\n" for line in kept[:-3]))
    assert study(3) == said
    assert store.read_text().splitlines() == kept
    refused("give 3 or more, got 2", study, 2)
    book = papermill.execute_notebook(
        folder / "study.ipynb",
        None,
        {"seeds": 3},
        cwd=folder,
        progress_bar=False,
        kernel_name="python3",
    )
    shown = [
        output
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert shown[-2]["text"].strip() == said[-1]
    assert "image/png" in shown[-1]["data"]
    assert store.read_text().splitlines() == kept


def test_example_processes_train_one_model(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    surroundings = os.environ | {
        "PYTHONPATH": str(FOLDER.parent),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = [*command, str(FOLDER / "processes.py")]
    first, *report = run_command(
        *script, cwd=tmp_path, env=surroundings, timeout=300
    ).splitlines()
    assert first.startswith("2 processes, accuracy ")
    assert float(first.split()[-2]) > 80
    assert report[1].split()[:2] == [
        "0",
        "204,800",
    ]  # 64 x 32 products for each of 2 x 50 pictures
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["precision"]["last_step"] == 200


CLUSTER = FOLDER / "cluster"
GRID = ["digits/mlp6", "--scale", "smoke", "--arms", "CR", "RR", "--seeds", "0"]


def on_a_cluster(script, tmp_path, **programs):
    """Run a cluster script with small data; ``programs`` replace those found only on clusters."""
    for name, text in {
        "cpt": f'exec {sys.executable} -m cpt_lab "$@"',
        **programs,
    }.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():  # of a job that is running it cannot be written
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)
    found = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CPT_RUNS_DIR": str(tmp_path / "runs"),
    }
    found |= {
        "CPT_DATA_DIR": str(tmp_path),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(FOLDER.parent),
    }
    found |= {
        "SLURM_JOB_NODELIST": "here",
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "7",
        "GPUS": "2",
    }
    words = ["bash", str(CLUSTER / script), *GRID]
    return subprocess.Popen(
        words,
        cwd=tmp_path,
        env=found,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_example_slurm_array_shares_a_grid(tmp_path):
    """Run the SLURM script twice at once, without SLURM."""
    jobs = [on_a_cluster("slurm_array.sh", tmp_path) for _ in range(2)]
    for job in jobs:
        said, wrong = job.communicate(timeout=300)
        assert (job.returncode, said.splitlines()[-1]) == (0, "2 ok"), wrong
    store = tmp_path / "runs/smoke/image.jsonl"
    assert (
        len(store.read_text().splitlines()) == len(load_rows(store)) == 2
    )  # none was done twice


QUEUE = """
from dask.distributed import LocalCluster

class SLURMCluster(LocalCluster):
    def __init__(self, cores, memory, walltime, worker_extra_args, job_extra_directives, job_script_prologue):
        assert job_script_prologue[0].startswith("export CPT_DATA_DIR=/")
        how = {"processes": False, "protocol": "tcp", "dashboard_address": None}
        super().__init__(n_workers=0, threads_per_worker=cores, resources={"GPU": 1}, **how)
"""


def test_example_dask_starts_workers_on_demand(tmp_path):
    """Replace dask-jobqueue by a local cluster."""
    (tmp_path / "dask_jobqueue.py").write_text(QUEUE)
    found = os.environ | {
        "CPT_RUNS_DIR": str(tmp_path / "runs"),
        "CPT_DATA_DIR": str(tmp_path),
    }
    found |= {"PYTHONPATH": f"{FOLDER.parent}:{tmp_path}"}
    words = [sys.executable, str(CLUSTER / "slurm_dask.py"), *GRID]
    assert (
        run_command(*words, cwd=tmp_path, env=found, timeout=300).splitlines()[-1]
        == "2 ok"
    )
    assert len(load_rows(tmp_path / "runs/smoke/image.jsonl")) == 2


def test_example_torchrun_job_uses_all_processes(tmp_path):
    """Replace SLURM's ``srun`` and ``scontrol`` by two-line programs."""
    torchrun = f'exec {sys.executable} -m torch.distributed.run "$@"'
    stand_ins = {
        "srun": 'exec "$@"',
        "scontrol": "echo localhost",
        "torchrun": torchrun,
    }
    job = on_a_cluster("slurm_torchrun.sh", tmp_path, **stand_ins)
    said, wrong = job.communicate(timeout=300)
    assert (job.returncode, said.splitlines()[-1]) == (0, "2 ok"), wrong
    assert [
        row["provenance"]["processes"]
        for row in load_rows(tmp_path / "runs/smoke/image.jsonl")
    ] == [2, 2]


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
