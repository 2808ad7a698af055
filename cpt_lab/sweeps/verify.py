"""Do stored rows repeat?  Their specs are run again, and what comes out is compared with what was stored.

Where what computes a run (processor, instructions, threads, libraries, kernels) is that of the row, every bit must be.
The commit excuses nothing, but a row of other numerics (``cpt_core.numerics``) is not compared. Elsewhere what rounding
cannot change is to agree exactly (``EXACT``), the first loss to ``FIRST_LOSS`` or as far as seeds do, and the final
metric as far as seeds do: docs/reproducing/repeating.md says why.
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
from typing import Any

import torch

from cpt_core.numerics import NUMERICS
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_core.validation import check_int
from cpt_extras.kernels import gemm_backend
from cpt_lab.data.files import DataNotFoundError, check_data
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.numerics import is_comparable, name_numerics, numerics_of
from cpt_lab.paths import results_dir
from cpt_lab.provenance import commit, version
from cpt_lab.sweeps.process import unless_set
from cpt_lab.sweeps.row_format import Row, load_rows
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.tasks.base import task_of

FIRST_LOSS = 0.1  # relative: twice what was seen; or a standard deviation between seeds, where it is more
SPREADS = 5  # standard deviations between seeds
BAND = 0.05  # for the final metric where a store has too few seeds: of accuracy or mAP (shares of 1), or relative
RELATIVE = ("perplexity",)  # metrics whose band is a share of the stored value
LEAST = 0.1  # of BAND: allowed in any case, a few test examples
VERDICTS = ("bit for bit", "within tolerance", "not comparable", "NOT REPRODUCED")
EXACT = (
    "key",
    "status",
    "relative_cost",
    "noise_exposure",
    "share_at_q_min",
    "data_checksum",
    "steps",
    "bitops",
)


@dataclass(frozen=True)
class Sample:
    """Rows of a store that are to be run again."""

    store: Path
    rows: list[Row]  # all its rows that did not fail
    picked: list[Row]  # those to be run again
    missing: str = (
        ""  # why they cannot be run here, such as data that is not there; or ""
    )


@dataclass(frozen=True)
class Finding:
    """What became of a row that was run again; print it."""

    row: Row  # as stored
    verdict: str  # one of ``VERDICTS``
    differs: tuple[
        str, ...
    ] = ()  # of what computes a run, what is not as the row has it; it is why bits may differ
    said: tuple[str, ...] = ()  # the numbers that decided

    @property
    def reproduced(self) -> bool:
        """Whether the row stands."""
        return self.verdict in VERDICTS[:2]

    def __str__(self) -> str:
        spec = self.row["spec"]
        said = f": {', '.join(self.said)}" if self.said else ""
        differs = f"; differs in: {', '.join(self.differs)}" if self.differs else ""
        return f"{self.row['key']} {spec['arm']} seed {spec['seed']}: {self.verdict}{said}{differs}"


def sample(store: Path, rows: int = 5, seed: int = 0, cheapest: bool = False) -> Sample:
    """Pick so many rows of a store at random, or those that took the least time; of fewer, all.

    Rows that failed are not picked: ValueError where no other is there.
    """
    check_int("rows", rows, 1)
    check_int("seed", seed, 0)
    if not Path(store).is_file():
        raise FileNotFoundError(f"there is no file {store}")
    finished = [row for row in load_rows(store) if row["status"] != "failed"]
    if not finished:
        raise ValueError(f"{store} has no finished row")
    ordered = sorted(
        finished, key=lambda row: ((row["seconds"] if cheapest else 0.0), row["key"])
    )
    count = min(rows, len(ordered))
    picked = ordered[:count] if cheapest else random.Random(seed).sample(ordered, count)
    reasons = dict.fromkeys(reason for row in picked if (reason := _missing(row)))
    return Sample(Path(store), finished, picked, "; ".join(reasons))


def _missing(row: Row) -> str:
    """Say why a row cannot be run here, at a glance; "" when it can."""
    spec = _spec(row)
    try:
        check_data(spec.recipe)
        task_of(spec)
    except (DataNotFoundError, ImportError) as error:
        return str(error)
    if row["device"] != "cpu" and not torch.cuda.is_available():
        return (
            f"{row['key']} ran on {row['device']}, and torch sees no CUDA device here"
        )
    return ""


def verify(sample: Sample) -> Iterator[Finding]:
    """Run the picked rows of a store again, one after the other, and say of each what became of it."""
    # those under data/results: a store that is a part of one of them takes its tolerance from all seeds there
    kept = [
        row
        for path in results_dir().glob("*.jsonl")
        for row in load_rows(path)
        if row["status"] != "failed"
    ]
    rows = list({row["key"]: row for row in [*kept, *sample.rows]}.values())
    for row in sample.picked:
        yield (
            compare(row, run_again(row), rows)
            if is_comparable(row)
            else _not_comparable(row)
        )


def _not_comparable(row: Row) -> Finding:
    """Return the finding of a row of other numerics, which is not run again."""
    return Finding(
        row,
        "not comparable",
        said=(f"made with {name_numerics(numerics_of(row))}, today's is {NUMERICS}",),
    )


def summary(findings: list[Finding]) -> str:
    """Return how many rows came out how, such as "4 bit for bit, 1 within tolerance", and the code that ran them."""
    counts = {
        verdict: sum(f.verdict == verdict for f in findings) for verdict in VERDICTS
    }
    here = commit()
    code = (
        f"commit {here['commit'][:7]}"
        if here["commit"]
        else "a package without a commit"
    )
    changes = ", with changes" if here["dirty"] else ""
    return f"{', '.join(f'{n} {verdict}' for verdict, n in counts.items() if n) or 'nothing'} by {code}{changes}"


def run_again(row: Row) -> Row:
    """Run the spec of a row in a process of its own, with the row's threads, device and, where it can be, kernels.

    Kernels: a row of the plain backend gets it; one of C++ or Triton gets them where they are there, or what
    ``CPT_KERNELS`` names. So with the library of float32 products, and ``CPT_PRODUCTS``.
    """
    where = row["provenance"]
    threads, device = (
        where.get("machine", {}).get("threads", 1),
        "cpu" if row["device"] == "cpu" else "cuda",
    )
    with (
        tempfile.TemporaryDirectory(prefix="verify") as folder,
        unless_set(_variables(where)),
    ):
        store = Path(folder) / "again.jsonl"
        (found,) = run_grid(
            [_spec(row)],
            store,
            workers=1,
            threads=threads,
            device=device,
            progress=False,
        )
    return found


def _spec(row: Row) -> RunSpec:
    with warnings.catch_warnings(
        action="ignore", category=ShortCycleWarning
    ):  # said when the row was made
        return RunSpec.from_dict(row["spec"])


def _variables(where: dict[str, Any]) -> dict[str, str]:
    """Return the variables of the environment that make a run compute as a row was computed."""
    wanted = {"CPT_KERNELS": "reference"} if where.get("kernels") == "reference" else {}
    library = _library(where)
    wanted |= (
        {"CPT_PRODUCTS": library}
        if library == "torch" or gemm_backend.is_there()
        else {}
    )
    wanted |= {"CPT_DETERMINISTIC": "1"} if _in_fixed_order(where) else {}
    return wanted


def _in_fixed_order(where: dict[str, Any]) -> bool:
    return bool(
        where.get("machine", {}).get("switches", {}).get("CPT_DETERMINISTIC") == "1"
    )


def _library(where: dict[str, Any]) -> str:
    """The library of float32 products; torch's own in rows that name none, which are older or of a GPU."""
    return str(where.get("products", "torch"))


# --- what is compared -----------------------------------------------------------------------------
def compare(row: Row, found: Row, rows: list[Row]) -> Finding:
    """Compare a stored row with what its spec gives now, ``found``.

    ``rows``: of the store and those committed; they tell how far seeds differ.
    """
    if found["status"] == "failed":
        return Finding(
            row,
            "NOT REPRODUCED",
            said=(f"the run failed: {found['error'].strip().splitlines()[-1]}",),
        )
    if not is_comparable(row):
        return _not_comparable(row)
    differs = tuple(_differing(row, found))
    stored, now = numbers(row), numbers(found)
    wrong = [name for name in stored | now if stored.get(name) != now.get(name)]
    if not wrong:
        return Finding(row, "bit for bit", differs)
    if not differs:
        return Finding(row, "NOT REPRODUCED", said=_told(wrong, stored, now))
    # a run that diverged may do so some steps earlier or later
    exact = [
        n
        for n in wrong
        if n.split()[0] in EXACT and not (n == "steps" and row["status"] == "diverged")
    ]
    if exact:
        return Finding(row, "NOT REPRODUCED", differs, _told(exact, stored, now))
    within, said = _close(row, found, rows)
    return Finding(
        row, "within tolerance" if within else "NOT REPRODUCED", differs, said
    )


def numbers(row: Row) -> dict[str, Any]:
    """Return all that must repeat of a row, by names to print; early rows hold less."""
    out: dict[str, Any] = {name: row.get(name) for name in EXACT if name != "bitops"}
    out |= {
        f"bitops {convention}": value
        for convention, value in row.get("bitops", {}).items()
    }
    losses = row.get("loss", [])
    out |= {f"loss {i} of {len(losses)}": value for i, value in enumerate(losses, 1)}
    for m in row.get("metrics", []):
        name = f"{m['split']} {m['name']} {m['when']} at {m['precision']}"
        out |= {name: m["value"], f"step and bits of {name}": (m["step"], m["bits"])}
    for e in row.get("evaluations", []):
        for split, values in e.items():
            if isinstance(values, dict):
                at = f"at {e['precision']} after step {e['step']}"
                out |= {f"{split} {name} {at}": value for name, value in values.items()}
    return out


def _told(
    names: list[str], stored: dict[str, Any], now: dict[str, Any], most: int = 3
) -> tuple[str, ...]:
    said = [
        f"{name} is {now.get(name)}, stored {stored.get(name)}" for name in names[:most]
    ]
    return (
        *said,
        *([f"and {len(names) - most} more numbers"] if len(names) > most else []),
    )


def _differing(row: Row, found: Row) -> Iterator[str]:
    """Yield what computes a run and is not as the row has it, or is not known.

    Libraries are those that the row names: what it had not imported had no part in it.
    """
    then, now = row["provenance"], found["provenance"]
    if "machine" not in then:
        yield "machine (the row names none)"
    else:
        names = dict.fromkeys([*then["machine"], *now["machine"]])
        yield from (
            name
            for name in names
            if then["machine"].get(name) != now["machine"].get(name)
        )
    if then.get("dirty") is not False:
        yield "code (the row's tree had changes, or no commit)"
    yield from (
        name
        for name in ("python", "kernels", "cuda")
        if name in then and then[name] != now.get(name)
    )
    if _library(then) != _library(now):
        yield "products"
    if row["device"] != found["device"]:
        yield "device"
    elif row["device"] != "cpu" and not (
        _in_fixed_order(then) and _in_fixed_order(now)
    ):
        yield "order of sums (a GPU chooses it)"
    yield from (
        name
        for name, old in then.get("versions", {}).items()
        if name != "cpt-core" and old != version(name)
    )


# --- what is allowed where bits cannot be asked for -----------------------------------------------
def _close(row: Row, found: Row, rows: list[Row]) -> tuple[bool, tuple[str, ...]]:
    """Whether the first loss and the final metric are as near as can be asked, and the words for it."""
    within, said = True, []
    if row.get("loss") and found["loss"]:
        stored, now = row["loss"][0], found["loss"][0]
        off, seeds = (
            abs(now / stored - 1),
            _spread(row, rows, lambda r: (r.get("loss") or [None])[0]) or 0.0,
        )
        most, why = max(
            (FIRST_LOSS, ""),
            (abs(seeds / stored), ": a standard deviation between seeds"),
        )
        within &= off <= most
        said.append(f"first loss off by {off:.2%} ({most:.0%} allowed{why})")
    stored, now = final(row), final(found)
    if stored is not None and now is not None:
        most, why = allowed(row, rows)
        within &= abs(now - stored) <= most
        metric = EXPERIMENTS[row["spec"]["recipe"]["task"]].metric.name
        said.append(
            f"{metric} is {now:.4f}, stored {stored:.4f} ({most:.4f} allowed: {why})"
        )
    return within, tuple(said)


def final(row: Row) -> float | None:
    """Return the main metric of a row: final, at q_max bits, on the test set; None of a run that diverged."""
    wanted = (
        EXPERIMENTS[row["spec"]["recipe"]["task"]].metric.name,
        "test",
        "final",
        "q_max",
    )
    of = {
        (m["name"], m["split"], m["when"], m["precision"]): m["value"]
        for m in row["metrics"]
    }
    return of.get(wanted)


def allowed(row: Row, rows: list[Row]) -> tuple[float, str]:
    """Return how far the final metric of a row may be from that of its rerun on another machine, and by what rule.

    Two machines part as two seeds do, at most: then the difference has ``sqrt(2)`` times the standard deviation
    between seeds (``_spread``), and ``SPREADS`` of these deviations are 3.5 of its own; at least ``LEAST`` of ``BAND``
    is allowed. Where seeds cannot tell, it is ``BAND``.
    """
    relative = EXPERIMENTS[row["spec"]["recipe"]["task"]].metric.name in RELATIVE
    band = BAND * (abs(final(row) or 0.0) if relative else 1.0)
    if (spread := _spread(row, rows, final)) is None:
        return band, "without seeds to compare"
    return max(
        LEAST * band, SPREADS * spread
    ), f"{SPREADS} standard deviations between seeds"


def _spread(
    row: Row, rows: list[Row], value: Callable[[Row], float | None]
) -> float | None:
    """Return the standard deviation of a value between seeds, or None where fewer than three degrees of freedom tell.

    It is that of the row's arm, or the median over the arms of its recipe where few seeds made the former smaller.
    """
    arms = defaultdict(list)
    for other in rows:
        alike = other["spec"]["recipe"] == row["spec"]["recipe"] and numerics_of(
            other
        ) == numerics_of(row)
        if alike and (at := value(other)) is not None:
            arms[_arm(other)].append(at)
    if sum(len(values) - 1 for values in arms.values()) < 3:
        return None
    spread = {arm: stdev(values) for arm, values in arms.items() if len(values) > 1}
    return max(median(spread.values()), spread.get(_arm(row), 0.0))


def _arm(row: Row) -> str:
    """What runs that differ in nothing but their seed have in common."""
    return json.dumps(
        {name: value for name, value in row["spec"].items() if name != "seed"},
        sort_keys=True,
    )
