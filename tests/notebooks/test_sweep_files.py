"""Committed files of ``notebooks/sweeps``: parameters, number of runs and stated GPU hours."""

import json
import re

import pytest
import yaml

from bench.paper_scale import OPERATIONS
from cpt_lab.experiments.registry import task_of_dataset
from cpt_lab.paths import notebooks_dir, results_dir, sweeps_dir
from cpt_lessons import paper_runs, parameters
from cpt_lessons.notebooks import notebooks, parameters_of
from cpt_lessons.parameters import check_parameters

FILES = sorted(sweeps_dir().glob("*.yaml"))
FIGURES = {
    "03": (paper_runs.figure_3,),
    "04": (paper_runs.figure_4,),
    "05": (paper_runs.figure_5, paper_runs.figure_6),
    "06": (paper_runs.figure_7,),
    "07": (paper_runs.section_5,),
}
TFLOPS = 10  # of the example in docs/sweeps.md


def gpu_hours(specs):
    """Return the GPU hours of runs, from the MACs in the plan of the paper."""
    plan = json.loads((results_dir() / "paper_scale.json").read_text())["rows"]
    gigamacs = {row["grid"]: row["gigamacs"] for row in plan}
    recipes = [spec.recipe for spec in specs]
    macs = sum(1e9 * gigamacs[f"{r.dataset}/{r.model}"] * r.steps for r in recipes)
    return OPERATIONS * macs / (TFLOPS * 1e12) / 3600


def test_sweep_files_cover_every_paper_notebook():
    assert {path.name[:2] for path in FILES} == set(FIGURES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sweep_file_agrees_with_notebook(path, monkeypatch):
    """Set parameters of the notebook, and state the command, runs, hours and downloads."""
    monkeypatch.setattr(parameters, "check_data", lambda recipe: None)
    text = path.read_text()
    given = yaml.safe_load(text)
    (notebook,) = notebooks(path.name[:2])
    assert given.keys() <= parameters_of(notebook).keys()
    assert given["scale"] == "paper"

    command = re.search(r"^#   papermill notebooks/(\S+) \S+ -f (\S+)$", text, re.M)
    assert notebooks_dir() / command[1] == notebook
    assert command[2] == f"notebooks/sweeps/{path.name}"
    for dataset in filter(None, (given["dataset"], given.get("pairs"))):
        assert re.search(rf"^# First: .*cpt download {dataset}\b", text, re.M)

    checked = check_parameters(task_of_dataset(given["dataset"]), **given)
    specs = [spec for figure in FIGURES[path.name[:2]] for spec in figure(checked)]
    runs = {spec.key: spec for spec in specs}
    hours = gpu_hours(runs.values())
    hours_text = f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}"
    stated = f"# {len(runs):,} runs, about {hours_text} GPU hours at {TFLOPS} TFLOP/s"
    assert stated in text
