"""The parameters of the notebooks: one check for names, types and values, before anything starts.

papermill passes misspelt parameters on without an error; the notebooks and the command line go through here instead.
Names and values of experiments are those of ``cpt_lab.experiments.parameters``; here are those of notebooks besides.

>>> check_parameters(scale="smoke", schedules=["CR"], q_max=[6, 8]).q_max
[6, 8]
"""

import atexit
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SCHEDULES
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_lab.analysis.run_table import table, tuned
from cpt_lab.data.files import check_data, task_for_data
from cpt_lab.experiments import parameters as experiment_parameters
from cpt_lab.experiments.parameters import (
    PAIRS,
    Parameter,
    checked,
    data_parameter,
    did_you_mean,
    literal,
    names_parameter,
    read_list,
    whole_parameter,
)
from cpt_lab.experiments.registry import EXPERIMENTS, recipe, task_of_dataset
from cpt_lab.experiments.schema import is_own
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.sweeps.stores import store_path

_PAIRS_ALLOWED = "a folder of your own such as 'my-pairs/', or '' for none"
_GRAPH_ALLOWED = "a graph of your own such as 'my-graph.npz', or '' for none"


def _is_budget(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 < value <= 1
    )


NOTEBOOK_PARAMETERS: dict[str, Parameter] = {
    **experiment_parameters.PARAMETERS,
    "dataset": data_parameter(
        experiment_parameters.DATASET_NAMES,
        "or your own data: a folder such as 'my-images/', or .npz archives",
        can_be_empty=True,  # where there are sentence pairs instead
    ),
    "pairs": data_parameter(PAIRS, _PAIRS_ALLOWED, can_be_empty=True),
    "graph": data_parameter(
        tuple(EXPERIMENTS["graph"].named_datasets), _GRAPH_ALLOWED, can_be_empty=True
    ),
    "budget": Parameter(
        "float",
        "a number more than 0 and at most 1, the cost relative to static q_max",
        _is_budget,
    ),
    "total_steps": whole_parameter(1, experiment_parameters.MAX_STEPS),
    "workers": whole_parameter(0, 1024),
    "device": names_parameter(("auto", "cpu", "cuda")),
}

# Parameters of a notebook that draws one schedule and has ``total_steps``: one number each.
ONE_SCHEDULE = {
    "q_min": whole_parameter(1, 32),
    "q_max": whole_parameter(1, 32),
    "n_cycles": whole_parameter(1, 1000),
    "total_steps": NOTEBOOK_PARAMETERS["total_steps"],
}

# A notebook with these takes data of every task: section 5 of the paper is about images and graphs.
DEFICIT_PARAMETERS = ("deficit_lengths", "deficit_starts")


class Parameters(SimpleNamespace):
    """Checked parameters, as attributes, their task, and the store that runs of this scale and task go to."""

    task: str
    store: Path

    def run(self, specs: Sequence[RunSpec], watch: bool = False) -> pd.DataFrame:
        """Run the missing specs of this scale's store; return a row per run (see ``run_table.table``).

        Smoke runs go one by one in this process, others in processes of their own, ``workers`` at a time. A bar shows
        how far they are; at smoke scale to people only, so that a log of seconds stays short. Where the learning rate
        is chosen, the runs at the chosen one are returned.

        Specs of one key run once; no specs are an empty table. With ``watch``, at smoke and demo scale on the
        processor, the arms of the first seed train side by side in this process first, and are drawn meanwhile; the
        specs are of one task then.

        Raises:
            RuntimeError: when runs failed: how many, and the reason of the first.
        """
        if not specs:
            return table([])
        from cpt_lab.sweeps.sweep import run_grid  # needs torch

        smoke = self.scale == "smoke"
        workers, device = (
            0 if smoke else vars(self).get("workers"),
            vars(self).get("device", "auto"),
        )
        by_task: dict[str, list[RunSpec]] = {}
        specs = list(
            {spec.key: spec for spec in specs}.values()
        )  # figures may share runs
        for spec in specs:
            by_task.setdefault(spec.recipe.task, []).append(spec)
        if watch and self.scale in ("smoke", "demo") and device != "cuda":
            from cpt_lessons.live_figures import watch as watched

            watched(
                [spec for spec in specs if spec.seed == specs[0].seed],
                self._store_of(specs[0].recipe.task),
            )
        rows = []
        for task, part in by_task.items():
            options: dict[str, Any] = {
                "workers": workers,
                "device": device,
                "progress": None if smoke else True,
            }
            rows += run_grid(part, self._store_of(task), **options)
        runs = table(rows)
        if len(failed := runs[runs.status == "failed"]):
            first = failed.iloc[0]
            reason = first.error.strip().splitlines()[-1]
            which = f"{first.arm} seed {first.seed}"
            raise RuntimeError(
                f"{len(failed)} of {len(runs)} runs failed, {which} with: {reason}"
            )
        return tuned(runs)

    def _store_of(self, task: str) -> Path:
        return self.store.with_name(f"{task}.jsonl")


def check_parameters(task: str = "image", /, **given: Any) -> Parameters:
    """Check the parameters of a notebook, and that its data is there; errors name what is allowed.

    Names that papermill injected and that the notebook does not have are refused here too. The store of smoke runs is
    a fresh temporary file, so that they really run; other scales keep theirs under ``runs/``, so that they resume.

    Lists may be given as texts, as papermill gives them: ``-p q_max "[6, 8]"``.

    Args:
        task: of the notebook's runs. A notebook with parameters of deficits takes data of every task.
        given: the parameters.

    Raises:
        ValueError: for a wrong name or value, and for data of one's own that is laid out for another task.
        DataNotFoundError: when the data is not there.
        DeviceNotFoundError: for CUDA where there is none.
    """
    given = check_values(given, "total_steps" in given)
    for name in _injected():
        if name not in given:
            hint = did_you_mean(name, given)
            raise ValueError(
                f"this notebook has no parameter {name!r}{hint} It has {', '.join(given)}"
            )
    shape = {name: given[name] for name in ONE_SCHEDULE if name in given}
    if len(shape) == len(ONE_SCHEDULE):
        with warnings.catch_warnings(
            action="ignore", category=ShortCycleWarning
        ):  # the notebook shows it
            for name in SCHEDULES:
                make_schedule(name, **shape)
    dataset = given.get("dataset")
    if dataset == "" and not given.get("pairs"):
        raise ValueError(
            "dataset must name a data set or files of your own; '' is for sentence pairs alone"
        )
    if dataset and any(name in given for name in DEFICIT_PARAMETERS):
        task = task_of_dataset(dataset) or task_for_data(dataset)
    scale, preset = given.setdefault("scale", "smoke"), given.get("preset", "ours")
    requested_data = [(dataset, given.get("model") or None, task)] if dataset else []
    requested_data += (
        [(given["pairs"], None, "entailment")] if given.get("pairs") else []
    )
    requested_data += [(given["graph"], None, "graph")] if given.get("graph") else []
    for name, model, own_task in requested_data:
        data_recipe = recipe(scale, name, model, preset, own_task)
        if data_recipe.task != own_task:
            raise ValueError(
                f"{name!r} is for another notebook: its task is {data_recipe.task!r}, not {own_task!r}"
            )
        check_data(data_recipe)
        if is_own(name):
            from cpt_lab.tasks.base import read_all_data  # here, as it imports torch

            read_all_data(data_recipe)
    if "device" in given:
        from cpt_lab.training.device import check_device  # here, as it imports torch

        check_device(given["device"])
    if scale != "smoke":
        return Parameters(**given, task=task, store=store_path(scale, task))
    folder = tempfile.mkdtemp(prefix="cpt-smoke-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Parameters(**given, task=task, store=Path(folder) / f"{task}.jsonl")


def parse(assignments: Sequence[str]) -> dict[str, Any]:
    """Read "name=value" texts, one or several in each; a value is a Python literal or bare words, in lists too.

    A value goes on to the next " name=": it may hold spaces.

    >>> parse(["dataset=cifar10", "schedules=[CR, RR]", "seeds=[0, 1]"])
    {'dataset': 'cifar10', 'schedules': ['CR', 'RR'], 'seeds': [0, 1]}
    >>> parse(["dataset=my pictures/ seeds=[0, 1]"])
    {'dataset': 'my pictures/', 'seeds': [0, 1]}
    """
    values: dict[str, Any] = {}
    for assignment in (
        part for text in assignments for part in re.split(r"\s+(?=\w+=)", text.strip())
    ):
        name, sign, text = assignment.partition("=")
        if not sign:
            raise ValueError(f"a parameter is written NAME=VALUE; got {assignment!r}")
        if name in values:
            raise ValueError(f"parameter {name!r} is given twice")
        values[name] = read_list(text) if text.startswith("[") else literal(text)
    return values


def _injected() -> list[str]:
    """Return the names that papermill assigned in this notebook: it puts them into a cell of their own."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cells = shell.user_ns.get("In", []) if shell is not None else []
    injected = [cell for cell in cells if cell.startswith("# Parameters\n")]
    return [
        name
        for cell in injected
        for name in re.findall(r"^(\w+)(?:: \w+)? =", cell, re.M)
    ]


def check_values(
    given: Mapping[str, Any], one_schedule: bool | None = None
) -> dict[str, Any]:
    """Check names and values alone, and return the values, lists also from their texts.

    Args:
        given: name -> value.
        one_schedule: whether they are of a notebook that draws one schedule, see ``ONE_SCHEDULE``; None takes its
            values and those of the other notebooks.
    """
    values = {}
    for name, value in given.items():
        single = ONE_SCHEDULE.get(name)
        if single is not None and one_schedule:
            values[name] = single.check(name, value)
        elif single is not None and one_schedule is None and single.accepts(value):
            values[name] = value
        else:
            values[name] = checked(name, value, NOTEBOOK_PARAMETERS)
    return values
