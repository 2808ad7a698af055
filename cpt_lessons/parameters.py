"""The parameters of the notebooks: one check for names, types and values, before anything starts.

papermill passes misspelt parameters on without an error; the notebooks and the command line go through here instead.

>>> check_parameters(scale="smoke", schedules=["CR"]).schedules
['CR']
"""

import ast
import atexit
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SCHEDULES
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_lab.analysis.runs import table, tuned
from cpt_lab.data.files import check_data
from cpt_lab.experiments.recipe import PRESETS, SCALES, is_own
from cpt_lab.experiments.recipes import EXPERIMENTS, recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.sweeps.stores import store_path


@dataclass(frozen=True)
class Parameter:
    """One parameter: what is allowed in words, and a test of a value."""

    allowed: str
    accepts: Callable[[Any], bool]


def _one_of(names: Iterable[str]) -> Parameter:
    names = tuple(names)
    return Parameter(f"one of {', '.join(names)}", lambda v: isinstance(v, str) and v in names)


def _data(names: tuple[str, ...], own: str, none: tuple[str, ...] = ("",)) -> Parameter:
    """A data set that has a name, one of the user's own, or none."""
    return Parameter(
        f"one of {', '.join(names)}, {own}", lambda v: isinstance(v, str) and (v in (*names, *none) or is_own(v))
    )


def _whole(low: int, high: int) -> Parameter:
    return Parameter(f"a whole number from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def _list(allowed: str, item: Parameter) -> Parameter:
    return Parameter(allowed, lambda v: isinstance(v, (list, tuple)) and all(map(item.accepts, v)))


PAIRS, GRAPHS = (tuple(EXPERIMENTS[task].named) for task in ("entailment", "graph"))
# sentence pairs have a parameter of their own
DATASETS = tuple(name for e in EXPERIMENTS.values() for name in e.named if name not in PAIRS)

PARAMETERS: dict[str, Parameter] = {
    "scale": _one_of(SCALES),
    "dataset": _data(DATASETS, "or your own data: a folder such as 'my-images/', or .npz archives", ()),
    "pairs": _data(PAIRS, "a folder of your own such as 'my-pairs/', or '' for none"),
    "graph": _data(GRAPHS, "a graph of your own such as 'my-graph.npz', or '' for none"),
    "budget": Parameter(
        "a number more than 0 and at most 1, the cost relative to static q_max",
        lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v <= 1,
    ),
    "model": Parameter("the name of a model, or '' for the first of the data set", lambda v: isinstance(v, str)),
    "preset": _one_of(PRESETS),
    "schedules": _list(f"a list of {', '.join(SCHEDULES)}", _one_of(SCHEDULES)),
    "seeds": _list("a list of whole numbers from 0 to 2147483647, [] for the recipe's", _whole(0, 2**31 - 1)),
    "q_min": _whole(1, 32),
    "q_max": _whole(1, 32),
    "n_cycles": _whole(1, 1000),
    "total_steps": _whole(1, 10_000_000),
    "workers": _whole(0, 1024),
    "device": _one_of(("auto", "cpu", "cuda")),
}


class Parameters(SimpleNamespace):
    """Checked parameters, as attributes, and the store that runs of this scale and task go to."""

    store: Path

    def run(self, specs: Sequence[RunSpec], watch: bool = False) -> pd.DataFrame:
        """Run what the store of this scale does not hold yet and return a typed line per run (``analysis.runs.table``).

        Smoke runs go one by one in this process, others in processes of their own, ``workers`` at a time. A bar shows
        how far they are; at smoke scale to people only, so that a log of seconds stays short. Where the learning rate
        is chosen, the runs at the chosen one are returned.

        Specs are of one task; none are an empty table. With ``watch``, at smoke and demo scale on the processor, the
        arms of the first seed train side by side in this process first, and are drawn meanwhile.

        Raises:
            RuntimeError: when runs failed: how many, and the reason of the first.
        """
        if not specs:
            return table([])
        from cpt_lab.sweeps.sweep import run_grid  # needs torch

        smoke = self.scale == "smoke"
        workers, device = 0 if smoke else vars(self).get("workers"), vars(self).get("device", "auto")
        store = self.store.with_name(f"{specs[0].recipe.task}.jsonl")
        if watch and self.scale != "paper" and device != "cuda":
            from cpt_lessons.watching import watch as watched

            watched([spec for spec in specs if spec.seed == specs[0].seed], store)
        runs = table(run_grid(specs, store, workers=workers, device=device, progress=None if smoke else True))
        if len(failed := runs[runs.status == "failed"]):
            first = failed.iloc[0]
            reason = first.error.strip().splitlines()[-1]
            which = f"{first.arm} seed {first.seed}"
            raise RuntimeError(f"{len(failed)} of {len(runs)} runs failed, {which} with: {reason}")
        return tuned(runs)


def check_parameters(task: str = "image", /, **given: Any) -> Parameters:
    """Check the parameters of a notebook, and that its data is there; errors name what is allowed.

    Names that papermill injected and that the notebook does not have are refused here too. The store of smoke runs is
    a fresh temporary file, so that they really run; other scales keep theirs under ``runs/``, so that they resume.

    The task is that of the notebook's runs.

    Raises:
        ValueError: for a wrong name or value, and for data of one's own that is laid out for another task.
        DataNotFoundError: when the data is not there.
    """
    check_values(given)
    for name in _injected():
        if name not in given:
            raise ValueError(f"this notebook has no parameter {name!r}{_meant(name, given)} It has {', '.join(given)}")
    shape = {name: given[name] for name in ("q_min", "q_max", "n_cycles", "total_steps") if name in given}
    if len(shape) == 4:
        with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):  # the notebook shows it
            for name in SCHEDULES:
                make_schedule(name, **shape)
    scale, preset = given.get("scale", "smoke"), given.get("preset", "ours")
    wanted = [(given["dataset"], given.get("model") or None, task)] if "dataset" in given else []
    wanted += [(given["pairs"], None, "entailment")] if given.get("pairs") else []
    wanted += [(given["graph"], None, "graph")] if given.get("graph") else []
    for dataset, model, own_task in wanted:
        found = recipe(scale, dataset, model, preset, own_task)
        if found.task != own_task:
            raise ValueError(f"{dataset!r} is for another notebook: its task is {found.task!r}, not {own_task!r}")
        check_data(found)
        if is_own(dataset):
            from cpt_lab.tasks.base import read_whole  # here, as it imports torch

            read_whole(found)
    if scale != "smoke":
        return Parameters(**given, store=store_path(scale, task))
    folder = tempfile.mkdtemp(prefix="cpt-smoke-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Parameters(**given, store=Path(folder) / f"{task}.jsonl")


def parse(assignments: Sequence[str]) -> dict[str, Any]:
    """Read "name=value" texts, one or several in each; a value is a Python literal or bare words, in lists too.

    A value goes on to the next " name=": it may hold spaces.

    >>> parse(["dataset=cifar10", "schedules=[CR, RR]", "seeds=[0, 1]"])
    {'dataset': 'cifar10', 'schedules': ['CR', 'RR'], 'seeds': [0, 1]}
    >>> parse(["dataset=my pictures/ seeds=[0, 1]"])
    {'dataset': 'my pictures/', 'seeds': [0, 1]}
    """
    found: dict[str, Any] = {}
    for assignment in (part for text in assignments for part in re.split(r"\s+(?=\w+=)", text.strip())):
        name, sign, text = assignment.partition("=")
        if not sign:
            raise ValueError(f"a parameter is written NAME=VALUE; got {assignment!r}")
        if name in found:
            raise ValueError(f"parameter {name!r} is given twice")
        if text.startswith("["):
            found[name] = [_literal(word) for word in text.strip("[]").split(",") if word.strip()]
        else:
            found[name] = _literal(text)
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


def _injected() -> list[str]:
    """Return the names that papermill assigned in this notebook: it puts them into a cell of their own."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cells = shell.user_ns.get("In", []) if shell is not None else []
    return [n for cell in cells if cell.startswith("# Parameters\n") for n in re.findall(r"^(\w+) =", cell, re.M)]


def check_values(given: dict[str, Any]) -> None:
    """Check names and values alone."""
    for name, value in given.items():
        if name not in PARAMETERS:
            raise ValueError(f"unknown parameter {name!r}{_meant(name, PARAMETERS)} There is {', '.join(PARAMETERS)}")
        if not PARAMETERS[name].accepts(value):
            raise ValueError(f"{name} must be {PARAMETERS[name].allowed}; got {value!r}")


def _meant(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else "."
