"""Parameters of notebooks, and ``P.run``."""

import sys
from types import SimpleNamespace

import nbformat
import papermill
import pytest
import torch
from dataset_layouts import image_folder, write
from helpers import refused
from nbformat.v4 import new_code_cell, new_notebook

from cpt_lab.experiments import designs
from cpt_lab.sweeps import stores, sweep
from cpt_lab.training.device import DeviceNotFoundError
from cpt_lessons.parameters import check_parameters, check_values


@pytest.fixture
def asked(monkeypatch):
    """Record the calls of ``run_grid`` instead of running them."""
    calls = []
    monkeypatch.setattr(
        sweep,
        "run_grid",
        lambda *given, **options: calls.append((*given, options)) or [],
    )
    return calls


def grid(scale, *data, **changes):
    """Return the runs of one schedule and seed."""
    options = {"schedules": ["CR"], "static_bits": [], "seeds": [0], **changes}
    return designs.quality_cost(scale, *data, **options)


@pytest.mark.slow
def test_parameters_run_returns_table():
    parameters = check_parameters(scale="smoke")
    runs = parameters.run(grid("smoke", static_bits=[8], steps=8, n_cycles=1))
    assert runs.arm.to_list() == ["CR", "static 8"]
    assert runs.accuracy.between(0, 1).all()
    assert (runs.first_loss > 0).all()
    rows = stores.load_rows(parameters.store)
    assert [row["key"] for row in rows] == runs.key.to_list()


def test_check_parameters_reads_user_data_completely(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    files = image_folder(kind="JPEG")
    write(tmp_path / "pets", files)
    check_parameters(scale="smoke", dataset="pets/")
    names = [name for name in files if name.endswith("1.jpeg")]
    cut = {name: files[name][: len(files[name]) * 2 // 3] for name in names}
    write(tmp_path / "pets", cut)
    message = r"4 files are wrong:\n.*train/a/1.jpeg cannot be read"
    refused(message, check_parameters, scale="smoke", dataset="pets/")


def test_parameters_run_of_no_specs_is_empty(asked):
    assert check_parameters(scale="smoke").run([]).empty
    assert asked == []


@pytest.mark.parametrize(
    ("given", "workers", "device", "progress"),
    [
        ({"scale": "smoke", "workers": 3}, 0, "auto", None),
        ({"scale": "demo", "workers": 3, "device": "cuda"}, 3, "cuda", True),
        ({"scale": "demo"}, None, "auto", True),
    ],
)
def test_parameters_run_chooses_workers_device_and_store(
    given, workers, device, progress, asked, monkeypatch, tmp_path
):
    """Store the runs of every task apart, whatever the task of the notebook."""
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    parameters, scale = check_parameters("language_model", **given), given["scale"]
    text = grid(scale, "pydoc", static_bits=[8])
    nodes = grid(scale, "digits-graph")
    assert parameters.run([*text, *nodes, *text]).empty
    options = {"workers": workers, "device": device, "progress": progress}
    assert asked == [
        (text, parameters.store.with_name("language_model.jsonl"), options),
        (nodes, parameters.store.with_name("graph.jsonl"), options),
    ]
    if scale == "demo":
        assert asked[1][1] == stores.store_path("demo", "graph")


@pytest.mark.parametrize("scale", ["smoke", "demo", "paper"])
def test_check_parameters_rejects_missing_device(scale, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = {"scale": scale, "device": "cuda", "error": DeviceNotFoundError}
    refused("device 'cuda' was asked for", check_parameters, **given)
    assert check_parameters(scale=scale, device="cpu").device == "cpu"


def test_parameters_run_selects_best_learning_rate(monkeypatch):
    specs = grid("paper", "xnli", q_max=[8])
    point = {"split": "valid", "when": "final", "precision": "q_max"}
    metrics = [[{"name": "accuracy", "value": s.recipe.lr, **point}] for s in specs]
    rows = [
        {**stores.describe(s), "status": "ok", "metrics": values}
        for s, values in zip(specs, metrics, strict=True)
    ]
    monkeypatch.setattr(sweep, "run_grid", lambda *_, **__: rows)
    assert len(specs) == 3
    assert check_parameters(scale="smoke").run(specs).lr.to_list() == [5e-5]


def test_parameters_run_reports_failures_in_one_line(monkeypatch):
    specs = grid("smoke", schedules=["CR", "RR"])
    rows = [{**stores.describe(s), "status": "ok", "metrics": []} for s in specs]
    error = "Traceback (most recent call last):\n  ...\nValueError: no such thing\n"
    rows[1] |= {"status": "failed", "error": error}
    monkeypatch.setattr(sweep, "run_grid", lambda *_, **__: rows)
    message = r"^1 of 2 runs failed, RR seed 0 with: ValueError: no such thing$"
    parameters = check_parameters(scale="smoke")
    refused(message, parameters.run, specs, error=RuntimeError)


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (
            {"q_max": "[6, 8]", "schedules": "[CR, RR]"},
            {"q_max": [6, 8], "schedules": ["CR", "RR"]},
        ),
        (
            {"static_bits": "[]", "seeds": None, "q_min": None},
            {"static_bits": [], "seeds": None, "q_min": None},
        ),
        (
            {"static_bits": (4, 8), "schedules": "['CR', \"RR\"]", "learning_rate": 1},
            {"static_bits": [4, 8], "schedules": ["CR", "RR"], "learning_rate": 1},
        ),
        (
            {"q_max": 6, "q_min": 3, "n_cycles": 2, "total_steps": 60},
            {"q_max": 6},
        ),  # a notebook of one schedule
    ],
)
def test_check_parameters_reads_papermill_values(given, values):
    P = check_parameters(**given)
    assert {name: vars(P)[name] for name in values} == values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"q_max": [6], "total_steps": 60},
            "q_max must be a whole number from 1 to 32; got",
        ),
        (
            {"q_max": None},
            "q_max must be a list of whole numbers from 1 to 32; got None",
        ),
        ({"dataset": ""}, "dataset must name a data set or files of your own"),
        ({"static_bits": "8"}, "static_bits must be a list .*; got '8'"),
        (
            {"aggregations": ["float"]},
            "aggregations must be a list of fp, quantized; got 'float'",
        ),
        (
            {"deficit_lengths": [1.5]},
            "deficit_lengths must be a list of whole numbers .* got 1.5",
        ),
        (
            {"deficit_start": [1]},
            "unknown parameter 'deficit_start'; did you mean 'deficit_starts'",
        ),
    ],
)
def test_check_parameters_names_invalid_values(given, message):
    refused(message, check_parameters, **given)


def test_check_values_accepts_q_max_or_list():
    """Accept a number or a list, before the command knows which notebook runs."""
    assert check_values({"q_max": 6}) == {"q_max": 6}
    assert check_values({"q_max": "[6, 8]"}) == {"q_max": [6, 8]}
    refused("q_max must be a list", check_values, {"q_max": 64})


CELL = '''q_max: list = [8]  # [6, 8] gives both halves
seeds: list = None
learning_rate: float = None  # None takes the recipe's
device = "auto"'''


@pytest.fixture
def typed_notebook(tmp_path):
    """Return a notebook with typed and commented parameters."""
    cell = new_code_cell(CELL, metadata={"tags": ["parameters"]})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path = tmp_path / "typed.ipynb"
    nbformat.write(new_notebook(cells=[cell], metadata={"kernelspec": kernel}), path)
    return path


def test_papermill_lists_types_defaults_and_comments(typed_notebook):
    parameters = papermill.inspect_notebook(str(typed_notebook))
    assert list(parameters["q_max"].values()) == [
        "q_max",
        "list",
        "[8]",
        "[6, 8] gives both halves",
    ]
    rate = parameters["learning_rate"]
    assert (rate["inferred_type_name"], rate["default"]) == ("float", "None")
    assert rate["help"] == "None takes the recipe's"


def test_check_parameters_names_injected_by_papermill(monkeypatch):
    cells = [
        "x = 1",
        '# Parameters\nq_max = [6, 8]\nscale: str = "demo"\n',
        "# Parameters of mine\ny = 2",
    ]
    shell = SimpleNamespace(user_ns={"In": cells})
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell)
    )
    check_parameters(q_max=[6, 8], scale="smoke")
    refused(
        "this notebook has no parameter 'scale'. It has q_max",
        check_parameters,
        q_max=[6, 8],
    )
