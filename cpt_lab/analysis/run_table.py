"""Result rows as one typed table.  No torch.

``load`` and ``committed`` read stores, ``table`` turns rows into columns, ``tuned`` selects the best learning rates.
Every property of a run that the analysis needs is a column here: no other module opens rows.

>>> load(Path("nowhere.jsonl")).empty
True
"""

import hashlib
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from cpt_core.validation import check_choice
from cpt_lab.analysis.metrics import METRICS, main_metric, metric_named, worst_value
from cpt_lab.experiments.spec import savings_of
from cpt_lab.numerics import numerics_of, warn_of_other_numerics
from cpt_lab.paths import ROOT, results_dir, runs_dir
from cpt_lab.sweeps.result_row import ResultRow, column_types
from cpt_lab.sweeps.stores import load_rows, newest

COLUMN_TYPES = {
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

# Failures with external causes: memory, time, files, libraries, network, the device, the end of the process.
EXTERNAL_FAILURE = re.compile(
    r"\Atook longer than|\Athe process of the run|CUDA error|CUDA out of memory|DefaultCPUAllocator|DataLoader worker|"
    r"^[\w.]*(MemoryError|OSError|NotFoundError|PermissionError|DirectoryError|FileExistsError|StoreError|ImportError|"
    r"ConnectionError|ConnectionResetError|BrokenPipeError|TimeoutError|URLError|HTTPError|KeyboardInterrupt)\b",
    re.M,
)
SHORT_TITLES = {  # title of the data in committed rows -> title on pages
    "own graph (cora, Planetoid split)": "Cora",
    "own graph (facebook_ogb_layout)": "Facebook's page-page graph",
    "own images (cifar10-jpeg)": "JPEG copies of CIFAR-10",
    "own pictures (voc2007-first16)": "the first 16 pictures of VOC 2007",
    "own pictures (voc2007-subset320)": "320 pictures of VOC 2007",
}
# Fields of a recipe that depend on the learning-rate decay and on the length of the training.
DECAY_FIELDS = ("lr_rule", "milestones", "steps", "evaluate_every")
# arms that exist for equal-cost comparisons alone
EQUAL_COST_ARM = re.compile(r"^RR at |delayed [\d.]+ %$|, \d+ of \d+ steps$")


class OtherDataWarning(UserWarning):
    """Runs of one recipe were trained on different data with one name; they are not combined."""


def load(*stores: Path, every_rate: bool = False) -> pd.DataFrame:
    """Return a typed table with one line per run, from the given stores or all under ``runs/``.

    Of several rows with one key the newest valid one counts. If a recipe has several learning rates the runs are those
    of ``tuned``, or all with ``every_rate``. The columns are those of ``table``.

    Warns:
        OtherDataWarning: about runs that are left out because most runs of their recipe had other data.
        OtherNumericsWarning: about runs that were made with other numerics than those of this package.

    Raises:
        ValueError: for a file that is not a store, see ``load_rows``.
    """
    files = [Path(file) for file in stores or sorted(runs_dir().glob("*/*.jsonl"))]
    runs = table(newest(_keep_main_data(_read(files))).values())
    return runs if every_rate else tuned(runs)


def _read(
    files: Iterable[Path], keys: Collection[str] | None = None
) -> list[ResultRow]:
    """Return the rows of some stores with the columns "store" and "title"; with ``keys`` of these runs alone."""
    rows: list[ResultRow] = []
    for file in files:
        store = _place(file)
        for row in load_rows(file, keys):
            rows.append({**row, "store": store, "title": _title(row, file)})
    return rows


def _title(row: ResultRow, file: Path) -> str:
    """Return the title of a row; user data of committed rows have a short name."""
    title = str(row.get("title", ""))
    if file.parent == results_dir():
        for former_title, name in SHORT_TITLES.items():
            title = title.replace(former_title, name)
    return title


def _keep_main_data(rows: list[ResultRow]) -> list[ResultRow]:
    """Return the rows on the data that most runs of their recipe have (the newest of equally frequent ones).

    Rows without a data checksum are all returned. A data set may have several checksums, as recipes use parts of it.
    """
    recipes: dict[str, list[ResultRow]] = defaultdict(list)
    for row in rows:
        if row.get("data_checksum"):
            recipes[recipe_key(row["spec"]["recipe"])].append(row)
    left_out: set[int] = set()
    for recipe_rows in recipes.values():
        newest_first = sorted(
            recipe_rows, key=lambda row: row["provenance"]["started"], reverse=True
        )
        counts = Counter(row["data_checksum"] for row in newest_first)
        main_checksum, num_main = counts.most_common(1)[0]
        other_rows = [
            row for row in recipe_rows if row["data_checksum"] != main_checksum
        ]
        if other_rows:
            left_out.update(map(id, other_rows))
            _warn_of_other_data(other_rows, main_checksum, num_main)
    return [row for row in rows if id(row) not in left_out]


def _warn_of_other_data(
    other_rows: list[ResultRow], main_checksum: str, num_main: int
) -> None:
    checksums = sorted({row["data_checksum"] for row in other_rows})
    stores = sorted({row["store"] for row in other_rows})
    dataset = other_rows[0]["spec"]["recipe"]["dataset"]
    warnings.warn(
        f"{len(other_rows)} runs on {dataset} in {', '.join(stores)} are left out: their data (checksum "
        f"{' and '.join(checksums)}) are not those of the other {num_main} ({main_checksum})",
        OtherDataWarning,
        stacklevel=4,
    )


def committed(*names: str) -> pd.DataFrame:
    """Return the runs of the stores under ``data/results`` with these names, such as "image_digits", or of all.

    If several stores have a run, the row that counts among all of them is used, whichever stores are named. Tables are
    cached while the files stay the same; the returned one is a copy.
    """
    store_files = {path.stem: path for path in sorted(results_dir().glob("*.jsonl"))}
    for name in names:
        check_choice("name of kept rows", name, store_files)
    versions = []
    for path in store_files.values():
        status = path.stat()
        versions.append(_FileVersion(path, status.st_mtime_ns, status.st_size))
    named_files = tuple(store_files[name] for name in names or store_files)
    return _committed(named_files, tuple(versions)).copy()


class _FileVersion(NamedTuple):
    """A file, and what changes when it is written."""

    path: Path
    mtime_ns: int
    size: int


@lru_cache(maxsize=8)
def _committed(
    named_files: tuple[Path, ...], all_files: tuple[_FileVersion, ...]
) -> pd.DataFrame:
    """Return the runs of named stores among all stores."""
    rows = _read(named_files)
    other_files = [file.path for file in all_files if file.path not in named_files]
    rows += _read(other_files, {row["key"] for row in rows})
    return tuned(table(newest(_keep_main_data(rows)).values()))


def table(rows: Iterable[ResultRow]) -> pd.DataFrame:
    """Return one line per run: arm, seed, settings, costs, status and the test metrics.

    ``diverged`` marks runs that broke: their loss, an evaluation or a weight was not finite, or an error of their own
    ended them. They count, with the worst value of their task as metrics (``Experiment.worst``). A run that failed for
    an external reason, such as memory, time or missing data, has NaN and is to be run again.

    Metrics at q_max bits have their own name, such as "accuracy", and "accuracy_best_valid" at the best step on
    held-out data, or "accuracy_best_test" without held-out data; "_current" marks those at the bits of the step. Those
    of ``METRICS`` are always columns. Values are as stored: accuracies are shares.

    Some columns of ``COLUMN_TYPES``: ``recipe`` is a short name that the runs of one experiment share,
    ``recipe_but_...`` one that leaves out what an experiment may vary; ``total_steps`` are the steps of the recipe,
    ``steps`` those that ran; ``learning_rates`` is the number of rates to choose from, ``valid`` the main metric on
    held-out data, by which they are chosen; ``start`` and ``stop`` of a deficit (0 and 0 without one, missing for
    several windows or another kind of schedule); ``equal_cost`` marks arms of equal-cost experiments alone;
    ``first_loss`` and ``last_loss`` of the training; ``lr_rule`` and ``milestones`` of the recipe, "" for none;
    ``numerics``, the version that made the row, missing if unknown. The last column, ``evaluations``, holds lists of
    dicts: the learning curves.
    """
    rows = list(rows)
    lines = [
        {**_settings(row["spec"]), **_outcome(row), **_metrics(row)} for row in rows
    ]
    _count_diverged(lines, rows)
    metric_names: dict[str, None] = {}
    for line in lines:
        metric_names |= dict.fromkeys(line)
    for name in (*COLUMN_TYPES, "evaluations"):
        metric_names.pop(name, None)
    metrics = list(dict.fromkeys([*metric_names, *METRICS]))
    frame = pd.DataFrame(lines, columns=[*COLUMN_TYPES, *metrics, "evaluations"])
    return frame.astype(
        {**COLUMN_TYPES, **dict.fromkeys(metrics, "float64"), "evaluations": "object"}
    )


def _with_further_columns(tabulate: Any) -> Any:
    """Add the columns of the learning-rate decay and the numerics, which most rules of the paper's claims do not read.

    Warns:
        OtherNumericsWarning: about rows that were not made with the numerics of this package.
    """

    @wraps(tabulate)
    def with_further_columns(rows: Iterable[ResultRow]) -> pd.DataFrame:
        rows = list(rows)
        frame = tabulate(rows)
        recipes = [row["spec"]["recipe"] for row in rows]
        columns = {
            "lr_rule": [recipe.get("lr_rule", "") for recipe in recipes],
            "milestones": [
                " ".join(f"{share:g}" for share in recipe.get("milestones", ()))
                for recipe in recipes
            ],
            "recipe_but_decay": [
                recipe_key(recipe, *DECAY_FIELDS) for recipe in recipes
            ],
            "recipe_but_steps": [recipe_key(recipe, "steps") for recipe in recipes],
        }
        for name, values in columns.items():
            frame.insert(
                frame.columns.get_loc("evaluations"),
                name,
                pd.array(values, dtype="string"),
            )
        versions = pd.array([numerics_of(row) for row in rows], dtype="Int64")
        frame.insert(frame.columns.get_loc("evaluations"), "numerics", versions)
        warn_of_other_numerics(rows, stacklevel=3)
        return frame

    return with_further_columns


# Not a decorator: the fingerprints of the claims' rules cover the function without these columns.
table = _with_further_columns(table)


def _count_diverged(lines: list[dict[str, Any]], rows: list[ResultRow]) -> None:
    """Set all metrics of diverged runs to the worst value of their task, for the metrics that their data set has."""
    names_by_dataset: dict[str, dict[str, None]] = defaultdict(dict)
    for line, row in zip(lines, rows, strict=True):
        names_by_dataset[line["dataset"]] |= dict.fromkeys(_metrics(row))
    for line, row in zip(lines, rows, strict=True):
        if not line["diverged"]:
            continue
        task, recipe = line["task"], row["spec"]["recipe"]
        main = main_metric(task)
        for name in (main.name, *names_by_dataset[line["dataset"]], "valid"):
            metric = main if name == "valid" else metric_named(name)
            line[name] = worst_value(task, metric, recipe)


def _settings(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that a spec determines."""
    recipe, schedule = spec["recipe"], spec["schedule"]
    text = _recipe_text(recipe)
    start, stop = _deficit_window(schedule)
    from_recipe = ("task", "dataset", "model", "q_min", "n_cycles", "lr")
    return {
        "arm": spec["arm"],
        "savings": savings_of(spec["arm"]),
        "seed": spec["seed"],
        "scale": spec["scale"],
        "preset": spec["preset"],
        "q_max": spec["q_max"],
        "q_grad": spec["q_grad"],
        **{name: recipe[name] for name in from_recipe},
        "recipe": _recipe_text_key(text),
        "recipe_but_aggregation": _recipe_text_key(text, "aggregation"),
        "recipe_but_cycles": _recipe_text_key(text, "n_cycles"),
        "recipe_but_fanout": _recipe_text_key(text, "fanout", "aggregation"),
        "recipe_but_length": _recipe_text_key(
            text, "steps", "milestones", "evaluate_every"
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


def _deficit_window(schedule: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return start and stop of a deficit; (0, 0) for no window, (None, None) for several or another schedule."""
    windows = schedule.get("windows")
    if windows is None or len(windows) > 1:
        return None, None
    if not windows:
        return 0, 0
    start, stop = windows[0]
    return start, stop


def _outcome(row: ResultRow) -> dict[str, Any]:
    """Return the columns of a row other than those of its spec and its metrics."""
    nan = float("nan")
    provenance, bitops = row["provenance"], row.get("bitops", {})
    losses = row.get("loss") or [nan]
    is_external = EXTERNAL_FAILURE.search(row.get("error", "")) is not None
    has_own_error = row["status"] == "failed" and not is_external
    return {
        "relative_cost": row["relative_cost"],
        "noise_exposure": row["noise_exposure"],
        "status": row["status"],
        "key": row["key"],
        "title": row.get("title", ""),
        "error": row.get("error", ""),
        "device": row.get("device", ""),
        "data_checksum": row.get("data_checksum", ""),
        "store": row.get("store", ""),
        "diverged": row["status"] == "diverged" or has_own_error,
        "share_at_q_min": _share_at_q_min(row),
        "seconds": row.get("seconds", nan),
        "steps": row.get("steps"),
        "bitops": bitops.get("paper", nan),
        "bitops_per_op": bitops.get("per_op", nan),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "started": provenance["started"],
        "commit": provenance["commit"],
        "dirty": provenance["dirty"],
        "torch": provenance.get("versions", {}).get("torch", ""),
        "evaluations": row.get("evaluations", []),
    }


def _metrics(row: ResultRow) -> dict[str, float | None]:
    """Return the test metrics of a row by column name, and the main metric on held-out data as "valid"."""
    main = main_metric(row["spec"]["recipe"]["task"]).name
    suffixes = {"final": "", "best_valid": "_best_valid", "best_test": "_best_test"}
    values: dict[str, float | None] = {}
    for m in row.get("metrics", []):
        if m["split"] == "test":
            bits_suffix = "" if m["precision"] == "q_max" else "_current"
            values[f"{m['name']}{suffixes[m['when']]}{bits_suffix}"] = m["value"]
            continue
        place = (m["name"], m["split"], m["when"], m["precision"])
        if place == (main, "valid", "final", "q_max"):
            values["valid"] = m["value"]
    return values


def tuned(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs at the best learning rate of their arm, for recipes with several rates.

    The choice is made per arm by the mean of the main metric over seeds on the validation set; the test set is not
    used. A rate at which a smaller share of the runs diverged takes precedence, whatever the metric. A rate without any
    valid run is not chosen. All runs of recipes with one learning rate are returned.

    Paper: section 4.4 (the learning rate of every schedule is chosen on held-out data).
    """
    arm = ["task", "recipe", "arm", "q_max", "preset", "scale"]
    better = [main_metric(task).better for task in runs["task"]]
    scored = runs.assign(
        score=runs["valid"] * better, lost=runs["diverged"].where(runs["valid"].notna())
    )
    means = (
        scored.astype({"lost": "float64"})
        .groupby([*arm, "lr"])[["lost", "score"]]
        .mean()
        .reset_index()
    )
    # The smallest rate comes first, so it wins ties, and arms without any valid run; NaN is sorted to the end.
    best = means.sort_values(
        ["lost", "score"], ascending=[True, False], kind="stable"
    ).drop_duplicates(arm)
    is_best = pd.MultiIndex.from_frame(runs[[*arm, "lr"]]).isin(
        pd.MultiIndex.from_frame(best[[*arm, "lr"]])
    )
    return runs[is_best | (runs["learning_rates"] == 1)]


def _place(store: Path) -> str:
    """Return the path of a store relative to the project's folder; the last two names of any other path."""
    if store.is_relative_to(ROOT):
        return store.relative_to(ROOT).as_posix()
    return "/".join(store.parts[-2:])


def recipe_key(recipe: dict[str, Any], *but: str) -> str:
    """Return a short name of a recipe without some fields.

    Recipes that differ only in a learning rate to be chosen have the same name.
    """
    return _recipe_text_key(_recipe_text(recipe), *but)


def _recipe_text(recipe: dict[str, Any]) -> str:
    return json.dumps(recipe, sort_keys=True)


@lru_cache(maxsize=8192)  # thousands of runs share a few recipes
def _recipe_text_key(text: str, *but: str) -> str:
    """Return the ``recipe_key`` of a recipe from its ``_recipe_text``."""
    recipe = json.loads(text)
    left_out = {*but, "lr"} if len(recipe.get("learning_rates", ())) > 1 else set(but)
    fields = {name: value for name, value in recipe.items() if name not in left_out}
    return hashlib.sha256(_recipe_text(fields).encode()).hexdigest()[:8]


def _share_at_q_min(row: ResultRow) -> float:
    """Return the share of steps at the experiment's q_min; for static precision 1 at q_min, else 0."""
    schedule = row["spec"]["schedule"]
    if schedule["kind"] == "static":
        return float(schedule["q_max"] == row["spec"]["recipe"]["q_min"])
    return row["share_at_q_min"]
