"""Verification of stored rows: run their specs again and compare the results with the rows.

``sample`` picks rows of a store, ``verify`` runs them again and yields one ``Finding`` per row, ``compare`` holds the
rule. If everything that computes a run (processor, instructions, threads, libraries, kernels) is as in the row, every
bit must be equal. A new commit is no excuse; rows made with other numerics (``cpt_core.numerics``) are not compared.

On another machine, what rounding cannot change must be equal (``EXACT_FIELDS``); the first loss may differ by
``FIRST_LOSS`` or by the standard deviation between seeds, and the final metric by a multiple of that deviation.
docs/reproducing/repeating.md gives the reasons.
"""

import json
import random
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, stdev
from typing import Any, NamedTuple

import torch

from cpt_core.numerics import NUMERICS
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_core.validation import check_int
from cpt_extras.kernels import gemm_backend
from cpt_lab.data.files import DataNotFoundError, check_data
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.schema import Metric
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.numerics import is_comparable, name_numerics, numerics_of
from cpt_lab.paths import results_dir
from cpt_lab.provenance import commit, version
from cpt_lab.sweeps.process import unless_set
from cpt_lab.sweeps.result_row import EXACT_FIELDS, ResultRow
from cpt_lab.sweeps.row_format import load_rows
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.tasks.base import load_task_class

# Relative difference of the first loss: twice the largest that was measured between machines. The standard deviation
# between seeds is allowed where it is larger.
FIRST_LOSS = 0.1
SPREADS = 5  # difference of the final metric, in standard deviations between seeds
# Difference of the final metric where a store has too few seeds: absolute for accuracy and mAP (shares of 1).
BAND = 0.05
RELATIVE_METRICS = ("perplexity",)  # ``BAND`` is a share of the stored value
MIN_BAND_SHARE = 0.1  # share of ``BAND`` that is always allowed: a few test examples
MAX_LISTED_NUMBERS = 3  # numbers that a finding names
MIN_DEGREES_OF_FREEDOM = (
    3  # below, the standard deviation between seeds says too little
)
REPRODUCED_VERDICTS = ("bit for bit", "within tolerance")
VERDICTS = (*REPRODUCED_VERDICTS, "not comparable", "NOT REPRODUCED")


@dataclass(frozen=True)
class Sample:
    """Rows of a store that are to be run again."""

    store: Path
    rows: list[ResultRow]  # all rows of the store that did not fail
    picked: list[ResultRow]  # the rows to run again
    missing: str = ""  # why this machine cannot run them, such as missing data; or ""


@dataclass(frozen=True)
class Finding:
    """Verdict on one row that was run again; ``str`` gives the line to print."""

    row: ResultRow  # as stored
    verdict: str  # one of ``VERDICTS``
    differs: tuple[
        str, ...
    ] = ()  # parts of the machine or software that are not as in the row
    said: tuple[str, ...] = ()  # the numbers that decided the verdict, in words

    @property
    def reproduced(self) -> bool:
        """True if the rerun confirms the row."""
        return self.verdict in REPRODUCED_VERDICTS

    def __str__(self) -> str:
        spec = self.row["spec"]
        numbers = f": {', '.join(self.said)}" if self.said else ""
        differences = f"; differs in: {', '.join(self.differs)}" if self.differs else ""
        return f"{self.row['key']} {spec['arm']} seed {spec['seed']}: {self.verdict}{numbers}{differences}"


class Tolerance(NamedTuple):
    """Largest accepted difference of a number, and the rule that gave it."""

    difference: float
    reason: str


class Comparison(NamedTuple):
    """Result of comparing numbers within a tolerance."""

    is_within: bool
    sentences: tuple[str, ...]  # one per number


def sample(store: Path, rows: int = 5, seed: int = 0, cheapest: bool = False) -> Sample:
    """Pick finished rows of a store at random, or those that took the least time.

    Args:
        store: file of result rows.
        rows: number of rows to pick; all of them if the store has fewer.
        seed: seed of the random choice.
        cheapest: pick the rows that took the least time instead.

    Raises:
        ValueError: when the store has no finished row.
    """
    check_int("rows", rows, 1)
    check_int("seed", seed, 0)
    if not Path(store).is_file():
        raise FileNotFoundError(f"there is no file {store}")
    finished = [row for row in load_rows(store) if row["status"] != "failed"]
    if not finished:
        raise ValueError(f"{store} has no finished row")

    def order(row: ResultRow) -> tuple[float, str]:
        return (row["seconds"] if cheapest else 0.0), row["key"]

    ordered = sorted(finished, key=order)
    count = min(rows, len(ordered))
    picked = ordered[:count] if cheapest else random.Random(seed).sample(ordered, count)

    reasons = [_reason_not_runnable(row) for row in picked]
    unique_reasons = dict.fromkeys(filter(None, reasons))
    return Sample(Path(store), finished, picked, "; ".join(unique_reasons))


def _reason_not_runnable(row: ResultRow) -> str:
    """Return why this machine cannot run a row, without trying; "" if it can."""
    spec = _spec(row)
    try:
        check_data(spec.recipe)
        load_task_class(spec)
    except (DataNotFoundError, ImportError) as error:
        return str(error)
    if row["device"] != "cpu" and not torch.cuda.is_available():
        return (
            f"{row['key']} ran on {row['device']}, and torch sees no CUDA device here"
        )
    return ""


def verify(sample: Sample) -> Iterator[Finding]:
    """Run the picked rows of a store again, one after the other, and yield a finding for each."""
    # A store may hold a part of the runs of a committed one: the tolerance then comes from all seeds of both.
    rows_by_key = {}
    for path in results_dir().glob("*.jsonl"):
        for row in load_rows(path):
            if row["status"] != "failed":
                rows_by_key[row["key"]] = row
    rows_by_key |= {row["key"]: row for row in sample.rows}
    rows = list(rows_by_key.values())

    for row in sample.picked:
        if is_comparable(row):
            yield compare(row, run_again(row), rows)
        else:
            yield _not_comparable(row)


def _not_comparable(row: ResultRow) -> Finding:
    """Return the finding for a row of other numerics, which is not run again."""
    reason = f"made with {name_numerics(numerics_of(row))}, today's is {NUMERICS}"
    return Finding(row, "not comparable", said=(reason,))


def summary(findings: list[Finding]) -> str:
    """Return the number of findings per verdict, and the code that ran them.

    Such as "4 bit for bit, 1 within tolerance by commit 0123456".
    """
    verdicts = [finding.verdict for finding in findings]
    counts = [
        f"{verdicts.count(verdict)} {verdict}"
        for verdict in VERDICTS
        if verdict in verdicts
    ]

    checkout = commit()
    code = "a package without a commit"
    if checkout["commit"]:
        code = f"commit {checkout['commit'][:7]}"
    changes = ", with changes" if checkout["dirty"] else ""
    return f"{', '.join(counts) or 'nothing'} by {code}{changes}"


def run_again(row: ResultRow) -> ResultRow:
    """Run the spec of a row in a new process, with the row's threads, device and, where possible, kernels.

    A row of the reference kernels is run with them. A row of C++ or Triton kernels is run with those where they are
    available, or with what ``CPT_KERNELS`` names. The library of float32 matmuls follows the same rule, with
    ``CPT_PRODUCTS``.
    """
    provenance = row["provenance"]
    threads = provenance.get("machine", {}).get("threads", 1)
    device = "cpu" if row["device"] == "cpu" else "cuda"
    with (
        tempfile.TemporaryDirectory(prefix="verify") as folder,
        unless_set(_environment(provenance)),
    ):
        (rerun,) = run_grid(
            [_spec(row)],
            Path(folder) / "again.jsonl",
            workers=1,
            threads=threads,
            device=device,
            progress=False,
        )
    return rerun


def _spec(row: ResultRow) -> RunSpec:
    """Return the spec of a row, without the warning that was given when the row was made."""
    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        return RunSpec.from_dict(row["spec"])


def _environment(provenance: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables that make a run compute as a row was computed."""
    variables = {}
    if provenance.get("kernels") == "reference":
        variables["CPT_KERNELS"] = "reference"

    library = _matmul_library(provenance)
    if library == "torch" or gemm_backend.has_onednn_matmul():
        variables["CPT_PRODUCTS"] = library

    if _has_fixed_sum_order(provenance):
        variables["CPT_DETERMINISTIC"] = "1"
    return variables


def _has_fixed_sum_order(provenance: dict[str, Any]) -> bool:
    """Return whether a run on a GPU added its numbers in a fixed order."""
    switches = provenance.get("machine", {}).get("switches", {})
    return bool(switches.get("CPT_DETERMINISTIC") == "1")


def _matmul_library(provenance: dict[str, Any]) -> str:
    """Return the library of float32 matmuls; torch's own for rows without a name (older ones, and those of a GPU)."""
    return str(provenance.get("products", "torch"))


# --- comparison -----------------------------------------------------------------------------------
def compare(row: ResultRow, found: ResultRow, rows: list[ResultRow]) -> Finding:
    """Compare a stored row with the row of its rerun.

    Args:
        row: the stored row.
        found: the row of the rerun.
        rows: rows of the store and the committed ones; the spread between their seeds gives the tolerance.
    """
    if found["status"] == "failed":
        last_line = found["error"].strip().splitlines()[-1]
        return Finding(row, "NOT REPRODUCED", said=(f"the run failed: {last_line}",))
    if not is_comparable(row):
        return _not_comparable(row)

    differences = tuple(_execution_differences(row, found))
    stored, rerun = numbers(row), numbers(found)
    changed = [name for name in stored | rerun if stored.get(name) != rerun.get(name)]
    if not changed:
        return Finding(row, "bit for bit", differences)
    if not differences:
        return Finding(
            row, "NOT REPRODUCED", said=_list_numbers(changed, stored, rerun)
        )

    exact = [name for name in changed if name.split()[0] in EXACT_FIELDS]
    if row["status"] == "diverged" and "steps" in exact:
        exact.remove("steps")  # a run may diverge some steps earlier or later
    if exact:
        sentences = _list_numbers(exact, stored, rerun)
        return Finding(row, "NOT REPRODUCED", differences, sentences)

    is_within, sentences = _compare_within_tolerance(row, found, rows)
    verdict = "within tolerance" if is_within else "NOT REPRODUCED"
    return Finding(row, verdict, differences, sentences)


def numbers(row: ResultRow) -> dict[str, Any]:
    """Return all numbers of a row that a rerun must give again, by printable names; early rows have fewer."""
    values = dict[str, Any](row)
    by_name = {name: values.get(name) for name in EXACT_FIELDS if name != "bitops"}
    for convention, bitops in row.get("bitops", {}).items():
        by_name[f"bitops {convention}"] = bitops

    losses = row.get("loss", [])
    for i, value in enumerate(losses, 1):
        by_name[f"loss {i} of {len(losses)}"] = value

    for metric in row.get("metrics", []):
        name = f"{metric['split']} {metric['name']} {metric['when']} at {metric['precision']}"
        by_name[name] = metric["value"]
        by_name[f"step and bits of {name}"] = (metric["step"], metric["bits"])

    for evaluation in row.get("evaluations", []):
        place = f"at {evaluation['precision']} after step {evaluation['step']}"
        for split, values in evaluation.items():
            if isinstance(values, dict):
                for name, value in values.items():
                    by_name[f"{split} {name} {place}"] = value
    return by_name


def _list_numbers(
    names: list[str], stored: dict[str, Any], rerun: dict[str, Any]
) -> tuple[str, ...]:
    """Return sentences about the first numbers that differ, and the count of the others."""
    sentences = [
        f"{name} is {rerun.get(name)}, stored {stored.get(name)}"
        for name in names[:MAX_LISTED_NUMBERS]
    ]
    if len(names) > MAX_LISTED_NUMBERS:
        sentences.append(f"and {len(names) - MAX_LISTED_NUMBERS} more numbers")
    return tuple(sentences)


def _execution_differences(row: ResultRow, rerun: ResultRow) -> Iterator[str]:
    """Yield what computes a run and is not as in the row, or is not known of the row."""
    old, new = row["provenance"], rerun["provenance"]
    yield from _machine_differences(old, new)
    yield from _software_differences(old, new)

    if row["device"] != rerun["device"]:
        yield "device"
    elif row["device"] != "cpu":
        both_fixed = _has_fixed_sum_order(old) and _has_fixed_sum_order(new)
        if not both_fixed:
            yield "order of sums (a GPU chooses it)"

    # Only libraries that the row names count: one that its run had not imported had no part in it.
    for name, old_version in old.get("versions", {}).items():
        if name != "cpt-core" and old_version != version(name):
            yield name


def _machine_differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield the properties of the machine in which two provenances differ."""
    if "machine" not in old:
        yield "machine (the row names none)"
        return
    for name in dict.fromkeys([*old["machine"], *new["machine"]]):
        if old["machine"].get(name) != new["machine"].get(name):
            yield name


def _software_differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield code, Python, kernels, CUDA and matmul library where two provenances differ."""
    if old.get("dirty") is not False:
        yield "code (the row's tree had changes, or no commit)"

    for name in ("python", "kernels", "cuda"):
        if name in old and old[name] != new.get(name):
            yield name

    if _matmul_library(old) != _matmul_library(new):
        yield "products"


# --- tolerance on another machine -----------------------------------------------------------------
def _compare_within_tolerance(
    row: ResultRow, rerun: ResultRow, rows: list[ResultRow]
) -> Comparison:
    """Compare the first loss and the final metric of a row with its rerun."""
    is_within = True
    sentences = []
    if row.get("loss") and rerun["loss"]:
        stored_loss = row["loss"][0]
        difference = abs(rerun["loss"][0] / stored_loss - 1)
        spread = _spread_between_seeds(row, rows, _first_loss) or 0.0
        tolerance = max(
            Tolerance(FIRST_LOSS, ""),
            Tolerance(
                abs(spread / stored_loss), ": a standard deviation between seeds"
            ),
        )
        is_within &= difference <= tolerance.difference
        sentences.append(
            f"first loss off by {difference:.2%} ({tolerance.difference:.0%} allowed{tolerance.reason})"
        )

    stored_value, value = final(row), final(rerun)
    if stored_value is not None and value is not None:
        tolerance = allowed(row, rows)
        is_within &= abs(value - stored_value) <= tolerance.difference
        sentences.append(
            f"{_main_metric(row).name} is {value:.4f}, stored {stored_value:.4f} "
            f"({tolerance.difference:.4f} allowed: {tolerance.reason})"
        )
    return Comparison(is_within, tuple(sentences))


def _first_loss(row: ResultRow) -> float | None:
    """Return the mean loss of the first part of a run; None without losses."""
    losses = row.get("loss")
    return losses[0] if losses else None


def _main_metric(row: ResultRow) -> Metric:
    return EXPERIMENTS[row["spec"]["recipe"]["task"]].metric


def final(row: ResultRow) -> float | None:
    """Return the main metric of a row: final, at q_max bits, on the test set; None for a run that diverged."""
    value = None
    for metric in row["metrics"]:
        place = (metric["split"], metric["when"], metric["precision"])
        if metric["name"] == _main_metric(row).name and place == (
            "test",
            "final",
            "q_max",
        ):
            value = metric["value"]
    return value


def allowed(row: ResultRow, rows: list[ResultRow]) -> Tolerance:
    """Return how far the final metric of a rerun on another machine may be from the row's.

    Two machines differ at most as two seeds do. The difference between two seeds has ``sqrt(2)`` times the standard
    deviation between seeds, so ``SPREADS`` of these deviations are 3.5 deviations of the difference. At least
    ``MIN_BAND_SHARE`` of ``BAND`` is allowed; with too few seeds, all of ``BAND``.
    """
    band = BAND
    if _main_metric(row).name in RELATIVE_METRICS:
        band = BAND * abs(final(row) or 0.0)

    spread = _spread_between_seeds(row, rows, final)
    if spread is None:
        return Tolerance(band, "without seeds to compare")
    return Tolerance(
        max(MIN_BAND_SHARE * band, SPREADS * spread),
        f"{SPREADS} standard deviations between seeds",
    )


def _spread_between_seeds(
    row: ResultRow,
    rows: list[ResultRow],
    value_of: Callable[[ResultRow], float | None],
) -> float | None:
    """Return the standard deviation of a value between seeds; None with fewer than three degrees of freedom.

    It is the deviation of the row's arm, or the median over the arms of its recipe where that is larger: few seeds
    may have made the former too small.
    """
    values_by_arm = defaultdict(list)
    for candidate in rows:
        if candidate["spec"]["recipe"] != row["spec"]["recipe"]:
            continue
        if numerics_of(candidate) != numerics_of(row):
            continue
        value = value_of(candidate)
        if value is not None:
            values_by_arm[_arm_key(candidate)].append(value)

    degrees_of_freedom = sum(len(values) - 1 for values in values_by_arm.values())
    if degrees_of_freedom < MIN_DEGREES_OF_FREEDOM:
        return None

    spread_by_arm = {
        arm: stdev(values) for arm, values in values_by_arm.items() if len(values) > 1
    }
    return max(median(spread_by_arm.values()), spread_by_arm.get(_arm_key(row), 0.0))


def _arm_key(row: ResultRow) -> str:
    """Return a key that runs share which differ in nothing but their seed."""
    spec_without_seed = {
        name: value for name, value in row["spec"].items() if name != "seed"
    }
    return json.dumps(spec_without_seed, sort_keys=True)
