"""What there is to run and what it takes, before anything is spent.

>>> frame = plan("digits/mlp6")  # doctest: +SKIP
"""

import math
import time
from functools import cache
from statistics import median

import pandas as pd
from numpy.typing import ArrayLike

from cpt_core.schedules import cost
from cpt_core.validation import check_choice, suggest_names
from cpt_extras.formats.ladder import LADDERS
from cpt_extras.progress import progress_bar
from cpt_lab.experiments.grids import Selection, find_grids
from cpt_lab.experiments.schema import SCALES
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.step_timing import Calibration, cached_timing, measure
from cpt_lab.training.device import DEVICES, device_name, resolve_device

CURVE_BYTES = 8  # of a step in the curve, and of a run besides: its row and its log (both measured, generously)
RUN_BYTES = 20_000


def plan(
    name: str | None = None,
    scale: str | None = None,
    *,
    device: str = "auto",
    measured: bool = False,
    selection: Selection = Selection(),  # noqa: B008 - it is frozen
) -> pd.DataFrame:
    """Return one line per grid: what is done, what is missing, and what the missing part takes here.

    Args:
        name: of a grid or an artefact; None takes all.
        scale: None takes the paper's where a grid has it, else demo.
        measured: take a few steps of every model (seconds each, kept for the next time); without, what was kept counts.
        selection: other values for the parameters of the grids, and which of their runs count.

    Returns:
        Columns grid, artefact, scale, runs, done, failed, missing; bitops of all runs (convention "paper"); hours of
        the missing runs, one after the other on one CPU core or GPU; disk in MB for the missing runs and the two
        checkpoints of one; age of the measurement in days; note. Hours come from stored rows of this device where
        there are any, else from the measured steps, which leave evaluation and reading images out. What was neither
        stored nor measured is NaN.

    Raises:
        ValueError: for an unknown name, a scale that none of the grids has, and what a grid does not take.
    """
    found = find_grids(name)
    check_choice("device", device, DEVICES)
    scales = [s for s in SCALES if any(s in grid.scales for grid in found.values())]
    if scale not in (None, *scales):
        raise ValueError(
            f"no grid{f' of {name}' if name else ''} has scale {scale!r}; {suggest_names(scale, scales)}"
        )
    rows_of = cache(
        lambda store: {row["key"]: row for row in stores.load_rows(store)}
    )  # grids share stores
    lines, keys = [], set()
    selected = selection.specs(found, scale)
    bar = progress_bar(
        "measuring", selected.items(), progress=None if measured else False, leave=False
    )
    for key, specs in bar:
        grid, at = found[key], specs[0].scale
        keys |= {spec.key for spec in specs}
        rows = rows_of(stores.store_path(at, specs[0].recipe.task))
        status = [
            rows[spec.key]["status"] if spec.key in rows else None for spec in specs
        ]
        missing = [spec for spec, s in zip(specs, status, strict=True) if s is None]
        done, failed = (
            sum(s in ("ok", "diverged") for s in status),
            status.count("failed"),
        )
        line = {
            "grid": key,
            "artefact": grid.artefact,
            "scale": at,
            "runs": len(specs),
            "done": done,
        }
        line |= {"failed": failed, "missing": len(missing)}
        bar.set_postfix_str(key)
        try:  # the specs of a grid share their recipe
            known = (
                measure(specs[0], device)
                if measured
                else cached_timing(specs[0], device)
            )
            line |= _price(known, specs, missing, list(rows.values()), device)
        except RuntimeError as error:
            line["note"] = str(error)
        lines.append(line)
    columns = "grid artefact scale runs done failed missing bitops hours disk age note".split()
    frame = pd.DataFrame(lines, columns=columns)
    types = (
        dict.fromkeys(columns[3:7], "Int64")
        | dict.fromkeys(columns[7:11], "float64")
        | {"note": "string"}
    )
    frame = frame.astype(types).fillna({"done": 0, "failed": 0, "note": ""})
    frame.attrs["shared"] = int(frame.runs.sum()) - len(keys)
    return frame


def _price(
    found: Calibration | None,
    specs: list[RunSpec],
    missing: list[RunSpec],
    rows: list[ResultRow],
    device: str,
) -> dict[str, float]:
    """What is known of bit operations, hours, disk; the last two are 0 where no run is missing."""
    a_step = found.seconds_per_step if found else math.nan
    taken = [
        _seconds(spec, rows, device) or a_step * spec.recipe.steps for spec in missing
    ]
    line = {"hours": sum(taken) / 3600}
    if found is None:
        return line
    bitops = 0.0
    for spec in specs:
        bits = LADDERS[spec.recipe.ladder].bits
        static = total_bitops(
            found.macs, [bits(spec.q_max)] * spec.recipe.steps, bits(spec.q_max)
        )
        bitops += static * spec.relative_cost
    curves = sum(CURVE_BYTES * spec.recipe.steps + RUN_BYTES for spec in missing)
    disk = math.ceil((curves + (2 * found.checkpoint if missing else 0)) / 1e6)
    return {
        **line,
        "bitops": bitops,
        "disk": disk,
        "age": (time.time() - found.measured) / 86400,
    }


def total_bitops(macs: float, bits: ArrayLike, q_grad: ArrayLike) -> float:
    """Return the BitOps of a run: ``macs * sum_t (q_t**2 + 2 q_t q_grad) / 32**2``.

    Args:
        macs: forward multiply-accumulates of ONE training step (the whole batch).
        bits: forward bits of every step, shape (steps,).
        q_grad: gradient bits, a scalar or one per step.

    Returns:
        BitOps in units of one full-precision MAC (32 x 32 bits). It is a count, not a time.

    Paper: section 4.1.
    Differs: the "GBitOps" printed in the paper's text are this number divided by 1e13.
    """
    return float(
        macs * int(cost.step_cost(bits, q_grad).sum()) / cost.FULL_PRECISION**2
    )


def _seconds(spec: RunSpec, rows: list[ResultRow], device: str) -> float | None:
    """Median time of the stored runs of a recipe on this kind of device."""
    here = device_name(resolve_device(device, spec))
    recipe = spec.to_dict()["recipe"]
    alike = (
        row
        for row in rows
        if row.get("device") == here and row["spec"]["recipe"] == recipe
    )
    times = [row["seconds"] for row in alike if row["status"] == "ok"]
    return median(times) if times else None


def text(frame: pd.DataFrame) -> str:
    """Return a plan as text, with totals."""
    forms = {
        "bitops": "{:.2e}".format,
        "hours": lambda hours: f"{hours:.1f}" if hours >= 1 else f"{hours:.3f}",
        "disk": "{:,.0f} MB".format,
    }
    lines = [
        frame.drop(columns="age").to_string(index=False, na_rep="", formatters=forms),
        "",
        f"grids: {len(frame)}; {frame.runs.sum():,} runs: {frame.done.sum():,} done, {frame.failed.sum():,} failed, "
        f"{frame.missing.sum():,} missing",
    ]
    if shared := frame.attrs["shared"]:
        lines.append(
            f"{shared} of them are runs of another grid, too; each is done once"
        )
    known, measured = frame[frame.hours.notna()], frame[frame.age.notna()]
    new = (frame.age.isna() & (frame.note == "")).sum()
    if len(known):
        lines.append(
            f"missing runs of {len(known)} grids one after the other here: {known.hours.sum():,.1f} hours (training "
            "steps; evaluation and reading images come on top unless runs of this device are stored)"
        )
    if len(measured):
        lines += [
            f"disk for {len(measured)} grids: {measured.disk.sum():,.0f} MB; their steps were measured here, the "
            f"oldest {measured.age.max():.1f} days ago",
            "bitops: bit operations in units of one 32 x 32-bit product, convention 'paper', all runs of a grid",
        ]
    if new:
        lines.append(
            f"grids never measured here: {new}; plan --measure finds their bit operations, hours and disk"
        )
    return "\n".join(lines)
