"""Committed files of ``notebooks/sweeps``: names, number of runs and stated GPU hours."""

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


@pytest.fixture(autouse=True)
def without_data(monkeypatch):
    """Accept parameters that name missing data."""
    monkeypatch.setattr(parameters, "check_data", lambda recipe: None)


def specs_of(path):
    given = yaml.safe_load(path.read_text())
    P = check_parameters(task_of_dataset(given["dataset"]), **given)
    return {
        spec.key: spec for figure in FIGURES[path.name[:2]] for spec in figure(P)
    }.values()


def gpu_hours(specs):
    """Return the GPU hours of specs, from the MACs used in the plan of the paper."""
    rows = {
        row["grid"]: row
        for row in json.loads((results_dir() / "paper_scale.json").read_text())["rows"]
    }
    macs = sum(
        1e9 * rows[f"{s.recipe.dataset}/{s.recipe.model}"]["gigamacs"] * s.recipe.steps
        for s in specs
    )
    return OPERATIONS * macs / (TFLOPS * 1e12) / 3600


def test_sweep_files_cover_every_paper_notebook():
    assert {path.name[:2] for path in FILES} == set(FIGURES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sweep_file_sets_parameters_of_notebook(path):
    (notebook,) = notebooks(path.name[:2])
    given = yaml.safe_load(path.read_text())
    assert set(given) <= set(parameters_of(notebook))
    assert given["scale"] == "paper"
    command = re.search(r"^#   papermill (\S+) \S+ -f (\S+)$", path.read_text(), re.M)
    assert notebooks_dir() / command[1].removeprefix("notebooks/") == notebook
    assert command[2] == f"notebooks/sweeps/{path.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sweep_file_states_runs_and_hours(path, capsys):
    specs = specs_of(path)
    stated = re.search(
        r"^# ([\d,]+) runs, about ([\d,.]+) GPU hours at (\d+) TFLOP/s",
        path.read_text(),
        re.M,
    )
    hours = gpu_hours(specs)
    assert stated.groups() == (
        f"{len(specs):,}",
        f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}",
        f"{TFLOPS}",
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sweep_file_names_required_download(path):
    given = yaml.safe_load(path.read_text())
    for dataset in filter(None, (given["dataset"], given.get("pairs"))):
        assert re.search(
            rf"^# First: .*cpt download {dataset}\b", path.read_text(), re.M
        )
