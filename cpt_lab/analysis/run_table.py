"""Rows as one typed table: all that is asked of a run is a column here, so that nobody else opens a row.  No torch.

>>> load(Path("nowhere.jsonl")).empty
True
"""

import hashlib
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import pandas as pd

from cpt_core.validation import check_choice
from cpt_lab.analysis.metrics import METRICS, main_metric, metric_named, worst_value
from cpt_lab.experiments.spec import savings_of
from cpt_lab.numerics import numerics_of, warn_of_other_numerics
from cpt_lab.paths import ROOT, results_dir, runs_dir
from cpt_lab.sweeps.result_row import ResultRow, column_types
from cpt_lab.sweeps.stores import load_rows, newest

TYPES = {
    "arm": "string",
    "savings": "string",
    "seed": "Int64",
    "scale": "string",
    "task": "string",
    "dataset": "string",
    "model": "string",
    "preset": "string",
    "recipe": "string",
    "q_min": "Int64",
    "q_max": "Int64",
    "q_grad": "Int64",
    **column_types(
        "relative_cost",
        "noise_exposure",
        "share_at_q_min",
        "status",
        "seconds",
        "steps",
    ),
    "bitops": "float64",
    **column_types("device"),
    "started": "string",
    "commit": "string",
    **column_types("title", "error", "key"),
    "aggregation": "string",
    "recipe_but_aggregation": "string",
    "recipe_but_cycles": "string",
    "recipe_but_fanout": "string",
    "recipe_but_length": "string",
    "total_steps": "Int64",
    "n_cycles": "Int64",
    "fanout": "Int64",
    "lr": "float64",
    "learning_rates": "Int64",
    "kind": "string",
    "start": "Int64",
    "stop": "Int64",
    "equal_cost": "bool",
    "bitops_per_op": "float64",
    "first_loss": "float64",
    "last_loss": "float64",
    "valid": "float64",
    "diverged": "bool",
    **column_types("data_checksum"),
    "dirty": "boolean",
    "torch": "string",
    **column_types("store"),
}

# failures that say nothing of the arm: memory, time, files, libraries, network, the device, the end of the process
OUTSIDE = re.compile(
    r"\Atook longer than|\Athe process of the run|CUDA error|CUDA out of memory|DefaultCPUAllocator|DataLoader worker|"
    r"^[\w.]*(MemoryError|OSError|NotFoundError|PermissionError|DirectoryError|FileExistsError|StoreError|ImportError|"
    r"ConnectionError|ConnectionResetError|BrokenPipeError|TimeoutError|URLError|HTTPError|KeyboardInterrupt)\b",
    re.M,
)
SHORT_TITLES = {  # what the data of kept rows are called there, and what they are
    "own graph (cora, Planetoid split)": "Cora",
    "own graph (facebook_ogb_layout)": "Facebook's page-page graph",
    "own images (cifar10-jpeg)": "JPEG copies of CIFAR-10",
    "own pictures (voc2007-first16)": "the first 16 pictures of VOC 2007",
    "own pictures (voc2007-subset320)": "320 pictures of VOC 2007",
}
# of a recipe, what a learning-rate decay and the length of the training change
DECAY_FIELDS = ("lr_rule", "milestones", "steps", "evaluate_every")
EQUAL_COST_ARM = re.compile(
    r"^RR at |delayed [\d.]+ %$|, \d+ of \d+ steps$"
)  # arms that only equal cost needs


class OtherDataWarning(UserWarning):
    """Runs of one recipe were trained on different data under one name; they are not put together."""


def load(*stores: Path, every_rate: bool = False) -> pd.DataFrame:
    """Return one typed line per run, the row that counts of every key, from the stores given or all under ``runs/``.

    Where a recipe leaves the learning rate to be chosen they are those of ``tuned``, or all with ``every_rate``. The
    columns are those of ``table``.

    Warns:
        OtherDataWarning: about runs that are left out because most runs of their recipe had other data.
        OtherNumericsWarning: about runs that were made with other numerics than those of this package.

    Raises:
        ValueError: for a file that is no store, see ``load_rows``.
    """
    files = [Path(file) for file in stores or sorted(runs_dir().glob("*/*.jsonl"))]
    found = table(newest(_of_one_data(_read(files))).values())
    return found if every_rate else tuned(found)


def _read(files: Iterable[Path]) -> list[ResultRow]:
    return [
        {**row, "store": _place(file), "title": _title(row, file)}
        for file in files
        for row in load_rows(file)
    ]


def _title(row: ResultRow, file: Path) -> str:
    """Call what is kept by what it is: to the run it was data of the user's own."""
    title = str(row.get("title", ""))
    if file.parent == results_dir():
        for own, name in SHORT_TITLES.items():
            title = title.replace(own, name)
    return title


def _of_one_data(rows: list[ResultRow]) -> list[ResultRow]:
    """Keep, of every recipe, the rows on the data that most have (the newest of equally many), and those on none."""
    recipes: dict[str, list[ResultRow]] = defaultdict(list)
    for row in (
        rows
    ):  # a data set may have several checksums for good: recipes take parts of it
        if row.get("data_checksum"):
            recipes[_recipe_key(row["spec"]["recipe"])].append(row)
    left_out: set[int] = set()
    for mine in recipes.values():
        ordered = sorted(
            mine, key=lambda row: row["provenance"]["started"], reverse=True
        )
        kept = Counter(row["data_checksum"] for row in ordered).most_common(1)[0][0]
        other = [row for row in mine if row["data_checksum"] != kept]
        if other:
            left_out.update(map(id, other))
            names = " and ".join(sorted({row["data_checksum"] for row in other}))
            dataset, stores = (
                other[0]["spec"]["recipe"]["dataset"],
                ", ".join(sorted({row["store"] for row in other})),
            )
            warnings.warn(
                f"{len(other)} runs on {dataset} in {stores} are left out: their data (checksum {names}) are not those "
                f"of the other {len(mine) - len(other)} ({kept})",
                OtherDataWarning,
                stacklevel=3,
            )
    return [row for row in rows if id(row) not in left_out]


def committed(*names: str) -> pd.DataFrame:
    """Return the runs of the stores under ``data/results`` with these names, such as "image_digits", or of all.

    Where several stores hold a run, the row that counts among all of them is taken, whichever were named.
    """
    there = {path.stem: path for path in sorted(results_dir().glob("*.jsonl"))}
    rows = _read(
        dict.fromkeys(
            [
                *(
                    there[check_choice("name of kept rows", name, there)]
                    for name in names
                ),
                *there.values(),
            ]
        )
    )
    places = {_place(there[name]) for name in names or there}
    named = {row["key"] for row in rows if row["store"] in places}
    return tuned(
        table(
            newest(_of_one_data([row for row in rows if row["key"] in named])).values()
        )
    )


def table(rows: Iterable[ResultRow]) -> pd.DataFrame:
    """Return one line per run: arm, seed, settings, costs, status and the test metrics.

    ``diverged`` marks runs that broke: their loss, an evaluation or a weight was not finite, or an error of their own
    ended them. They count, with the worst value of their task as metrics (``Experiment.worst``). A run that failed for
    a reason outside of it, such as memory, time or missing data, has NaN and is to be run again.

    Metrics at q_max bits are called by their name, such as "accuracy", and "accuracy_best_valid" at the best step on
    held-out data, or "accuracy_best_test" where there are none; "_current" marks those at the bits of the step. Those
    of ``METRICS`` are always there. Values are as stored: accuracies are shares.

    Some columns of ``TYPES``: ``recipe`` is a short name that the runs of one experiment share, ``recipe_but_...`` one
    that leaves out what an experiment may vary; ``total_steps`` those of the recipe, ``steps`` those that ran;
    ``learning_rates`` how many there are to choose from, ``valid`` the main metric on held-out data, by which they
    are chosen; ``start`` and ``stop`` of a deficit (0 and 0 without one, missing where there are several windows or
    the schedule is of another kind); ``equal_cost`` marks arms that only such an experiment has; ``first_loss`` and
    ``last_loss`` of the training; ``lr_rule`` and ``milestones`` of the recipe, "" where it has none; ``numerics``,
    the version that made the row, missing where it is unknown. The last column, ``evaluations``, holds lists of dicts:
    the curves.
    """
    rows = list(rows)
    lines = [
        {**_settings(row["spec"]), **_outcome(row), **_metrics(row)} for row in rows
    ]
    _count_diverged(lines, rows)
    found = dict.fromkeys(
        name for line in lines for name in line if name not in (*TYPES, "evaluations")
    )
    metrics = list(dict.fromkeys([*found, *METRICS]))
    frame = pd.DataFrame(lines, columns=[*TYPES, *metrics, "evaluations"])
    return frame.astype(
        {**TYPES, **dict.fromkeys(metrics, "float64"), "evaluations": "object"}
    )


def _with_further_columns(tabulate: Any) -> Any:
    """Add the columns of the learning-rate decay and the numerics, which most rules of the paper's claims do not read.

    Warns:
        OtherNumericsWarning: of rows that were not made with the numerics of this package.
    """

    @wraps(tabulate)
    def with_further_columns(rows: Iterable[ResultRow]) -> pd.DataFrame:
        rows = list(rows)
        found = tabulate(rows)
        recipes = [row["spec"]["recipe"] for row in rows]
        columns = {
            "lr_rule": [recipe.get("lr_rule", "") for recipe in recipes],
            "milestones": [
                " ".join(f"{share:g}" for share in recipe.get("milestones", ()))
                for recipe in recipes
            ],
            "recipe_but_decay": [
                _recipe_key(recipe, *DECAY_FIELDS) for recipe in recipes
            ],
        }
        for name, values in columns.items():
            found.insert(
                found.columns.get_loc("evaluations"),
                name,
                pd.array(values, dtype="string"),
            )
        versions = pd.array([numerics_of(row) for row in rows], dtype="Int64")
        found.insert(found.columns.get_loc("evaluations"), "numerics", versions)
        warn_of_other_numerics(rows, stacklevel=3)
        return found

    return with_further_columns


table = _with_further_columns(
    table
)  # not above it: rules have the fingerprint of the function without these columns


def _count_diverged(lines: list[dict[str, Any]], rows: list[ResultRow]) -> None:
    """Give the lines of runs that diverged the worst value of their task in every metric that their data set has."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for line, row in zip(lines, rows, strict=True):
        names[line["dataset"]] |= dict.fromkeys(_metrics(row))
    for line, row in zip(lines, rows, strict=True):
        if line["diverged"]:
            main = main_metric(line["task"])
            for name in (main.name, *names[line["dataset"]], "valid"):
                metric = main if name == "valid" else metric_named(name)
                line[name] = worst_value(line["task"], metric, row["spec"]["recipe"])


def _settings(spec: dict[str, Any]) -> dict[str, Any]:
    recipe, schedule = spec["recipe"], spec["schedule"]
    windows = schedule.get("windows", [None, None])
    start, stop = (
        windows[0] if len(windows) == 1 else (None, None) if windows else (0, 0)
    )
    return {
        "arm": spec["arm"],
        "savings": savings_of(spec["arm"]),
        "seed": spec["seed"],
        "scale": spec["scale"],
        "preset": spec["preset"],
        "q_max": spec["q_max"],
        "q_grad": spec["q_grad"],
        **{
            name: recipe[name]
            for name in ("task", "dataset", "model", "q_min", "n_cycles", "lr")
        },
        "recipe": _recipe_key(recipe),
        "recipe_but_aggregation": _recipe_key(recipe, "aggregation"),
        "recipe_but_cycles": _recipe_key(recipe, "n_cycles"),
        "recipe_but_fanout": _recipe_key(recipe, "fanout", "aggregation"),
        "recipe_but_length": _recipe_key(
            recipe, "steps", "milestones", "evaluate_every"
        ),
        "total_steps": recipe["steps"],
        "learning_rates": len(recipe.get("learning_rates", ())) or 1,
        "aggregation": recipe.get("aggregation", ""),
        "fanout": recipe.get("fanout") if recipe["batch"] else None,
        "kind": schedule["kind"],
        "start": start,
        "stop": stop,
        "equal_cost": EQUAL_COST_ARM.search(spec["arm"]) is not None,
    }


def _outcome(row: ResultRow) -> dict[str, Any]:
    """What a row says of a run but its spec and its metrics."""
    nan, where = float("nan"), row["provenance"]
    failed = row["status"] == "failed" and not OUTSIDE.search(row.get("error", ""))
    losses, bitops = row.get("loss") or [nan], row.get("bitops", {})
    return {
        **{
            name: row[name]
            for name in ("relative_cost", "noise_exposure", "status", "key")
        },
        **{
            name: row.get(name, "")
            for name in ("title", "error", "device", "data_checksum", "store")
        },
        "diverged": row["status"] == "diverged" or failed,
        "share_at_q_min": _share_at_q_min(row),
        "seconds": row.get("seconds", nan),
        "steps": row.get("steps"),
        "bitops": bitops.get("paper", nan),
        "bitops_per_op": bitops.get("per_op", nan),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "started": where["started"],
        "commit": where["commit"],
        "dirty": where["dirty"],
        "torch": where.get("versions", {}).get("torch", ""),
        "evaluations": row.get("evaluations", []),
    }


def _metrics(row: ResultRow) -> dict[str, float | None]:
    """The test metrics of a row by the names of their columns, and the main one on held-out data as "valid"."""
    main = main_metric(row["spec"]["recipe"]["task"]).name
    out = {}
    for m in row.get("metrics", []):
        if m["split"] == "test":
            suffix = {
                "final": "",
                "best_valid": "_best_valid",
                "best_test": "_best_test",
            }[m["when"]]
            out[
                f"{m['name']}{suffix}"
                + ("" if m["precision"] == "q_max" else "_current")
            ] = m["value"]
        elif (m["name"], m["split"], m["when"], m["precision"]) == (
            main,
            "valid",
            "final",
            "q_max",
        ):
            out["valid"] = m["value"]
    return out


def tuned(runs: pd.DataFrame) -> pd.DataFrame:
    """Keep the runs at the learning rate that is best for their arm, where a recipe leaves it to be chosen.

    The choice is made per arm by the mean of the main metric over seeds on the validation set; the test set plays no
    part in it. A rate at which a smaller share of the runs diverged goes first, whatever the others reached. A rate of
    which no run counts is not chosen. Runs of recipes with one learning rate are all kept.

    Paper: section 4.4 (the learning rate of every schedule is chosen on held-out data).
    """
    arm = ["task", "recipe", "arm", "q_max", "preset", "scale"]
    better = [main_metric(task).better for task in runs["task"]]
    counted = runs.assign(
        score=runs["valid"] * better, lost=runs["diverged"].where(runs["valid"].notna())
    )
    means = (
        counted.astype({"lost": "float64"})
        .groupby([*arm, "lr"])[["lost", "score"]]
        .mean()
        .reset_index()
    )
    # ties, and arms of which no run counts, take the smallest rate: it comes first; NaN is sorted to the end
    best = means.sort_values(
        ["lost", "score"], ascending=[True, False], kind="stable"
    ).drop_duplicates(arm)
    chosen = pd.MultiIndex.from_frame(runs[[*arm, "lr"]]).isin(
        pd.MultiIndex.from_frame(best[[*arm, "lr"]])
    )
    return runs[chosen | (runs["learning_rates"] == 1)]


def _place(store: Path) -> str:
    """Where a store is, from the project's folder on; of others the last two names."""
    return (
        store.relative_to(ROOT).as_posix()
        if store.is_relative_to(ROOT)
        else "/".join(store.parts[-2:])
    )


def _recipe_key(recipe: dict[str, Any], *but: str) -> str:
    """Return a short name of a recipe without some fields; at several learning rates it is the same."""
    left_out = {*but, "lr"} if len(recipe.get("learning_rates", ())) > 1 else set(but)
    kept = {name: value for name, value in recipe.items() if name not in left_out}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]


def _share_at_q_min(row: ResultRow) -> float:
    """Share of the steps at the q_min of the experiment: of static precisions, only the lowest has any."""
    schedule = row["spec"]["schedule"]
    if schedule["kind"] == "static":
        return float(schedule["q_max"] == row["spec"]["recipe"]["q_min"])
    return row["share_at_q_min"]
