"""Forecast of a sweep: runs done and missing per grid, with bit operations, hours and disk space of the missing ones.

``plan`` returns the table, ``text`` prints it. Hours come from stored rows of this device, else from timed steps
(``step_timing``).

>>> frame = plan("digits/mlp6")  # doctest: +SKIP
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import pandas as pd
from numpy.typing import ArrayLike

from cpt_core.schedules import cost
from cpt_core.validation import check_choice, suggest_names
from cpt_extras.formats.ladder import FormatLadder
from cpt_extras.progress import progress_bar
from cpt_lab.experiments.grids import Grid, Selection, find_grids
from cpt_lab.experiments.schema import SCALES
from cpt_lab.experiments.spec import NotMeasuredError, RunSpec
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.step_timing import Calibration, cached_timing, measure
from cpt_lab.training.device import DEVICES, device_name, resolve_device

CURVE_BYTES = 8  # per step, in the curve of a run (measured, rounded up)
RUN_BYTES = 20_000  # row and log of a run (measured, rounded up)


def plan(
    name: str | None = None,
    scale: str | None = None,
    *,
    device: str = "auto",
    measured: bool = False,
    selection: Selection = Selection(),  # noqa: B008 - it is frozen
) -> pd.DataFrame:
    """Return one line per grid: runs done and missing, and the time and disk space of the missing ones here.

    Args:
        name: name of a grid or an artefact; None takes all.
        scale: None takes the scale of the paper where a grid has it, else demo.
        device: "auto", "cpu" or "cuda", for the hours.
        measured: time a few steps of every model (seconds each, stored for the next time); else stored times are used.
        selection: other values for the parameters of the grids, and filters of their runs.

    Returns:
        Columns grid, artefact, scale, runs, done, failed, missing; bitops of all runs (convention "paper"); hours of
        the missing runs, one after the other on one CPU core or GPU; disk in MB for the missing runs and the two
        checkpoints of one; age of the measurement in days; note. Hours come from stored rows of this device where
        there are any, else from the measured steps, which leave evaluation and reading images out. What was neither
        stored nor measured is NaN. Grids whose runs depend on rows that are not stored have a note that says so.

    Raises:
        ValueError: for an unknown name, a scale that none of the grids has, and what a grid does not take.
    """
    grid_by_name = find_grids(name)
    check_choice("device", device, DEVICES)
    scales = [
        s for s in SCALES if any(s in grid.scales for grid in grid_by_name.values())
    ]
    if scale not in (None, *scales):
        of_name = f" of {name}" if name else ""
        raise ValueError(
            f"no grid{of_name} has scale {scale!r}; {suggest_names(scale, scales)}"
        )
    waiting: dict[str, str] = {}
    try:
        selected = selection.specs(grid_by_name, scale)
    except NotMeasuredError:
        waiting = _waiting_grids(grid_by_name)
        known = {key: grid for key, grid in grid_by_name.items() if key not in waiting}
        selected = selection.specs(known, scale)

    lines, keys = [], set()
    bar = progress_bar(
        "measuring", selected.items(), progress=None if measured else False, leave=False
    )
    row_cache: dict[Path, dict[str, ResultRow]] = {}  # grids share stores
    for key, specs in bar:
        bar.set_postfix_str(key)
        keys |= {spec.key for spec in specs}
        store = stores.store_path(specs[0].scale, specs[0].recipe.task)
        if store not in row_cache:
            row_cache[store] = {row["key"]: row for row in stores.load_rows(store)}
        rows = row_cache[store]

        missing = [spec for spec in specs if spec.key not in rows]
        failed = [
            spec
            for spec in specs
            if spec.key in rows and rows[spec.key]["status"] == "failed"
        ]
        line = {
            "grid": key,
            "artefact": grid_by_name[key].artefact,
            "scale": specs[0].scale,
            "runs": len(specs),
            "done": len(specs) - len(missing) - len(failed),
            "failed": len(failed),
            "missing": len(missing),
        }
        try:  # of the first recipe of a grid; most have one
            if measured:
                timing: Calibration | None = measure(specs[0], device)
            else:
                timing = cached_timing(specs[0], device)
            line |= _price(timing, specs, missing, list(rows.values()), device)
        except RuntimeError as error:
            line["note"] = str(error)
        lines.append(line)
    for key, reason in waiting.items():
        grid = grid_by_name[key]
        lines.append(
            {
                "grid": key,
                "artefact": grid.artefact,
                "scale": grid.scales[0],
                "note": reason,
            }
        )
    order = list(grid_by_name)
    lines.sort(key=lambda line: order.index(str(line["grid"])))
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


def _waiting_grids(grids: Mapping[str, Grid]) -> dict[str, str]:
    """Return why the runs of grids are not known yet, by name; grids whose runs are known are left out."""
    waiting = {}
    for key, grid in grids.items():
        try:
            grid.make(grid.scales[0])
        except NotMeasuredError as error:
            waiting[key] = str(error)
    return waiting


def _price(
    timing: Calibration | None,
    specs: list[RunSpec],
    missing: list[RunSpec],
    rows: list[ResultRow],
    device: str,
) -> dict[str, float]:
    """Return bit operations, hours and disk space of a grid, as far as known; 0 hours if no run is missing."""
    step_seconds = timing.seconds_per_step if timing else math.nan
    run_seconds = [
        _seconds(spec, rows, device) or step_seconds * spec.recipe.steps
        for spec in missing
    ]
    line = {"hours": sum(run_seconds) / 3600}
    if timing is None:
        return line

    bitops = 0.0
    for spec in specs:
        formats = spec.recipe.formats
        bits = (formats if isinstance(formats, FormatLadder) else formats.weight).bits
        static = total_bitops(
            timing.macs, [bits(spec.q_max)] * spec.recipe.steps, bits(spec.q_max)
        )
        bitops += static * spec.relative_cost
    curves = sum(CURVE_BYTES * spec.recipe.steps + RUN_BYTES for spec in missing)
    checkpoints = 2 * timing.checkpoint if missing else 0
    disk = math.ceil((curves + checkpoints) / 1e6)
    return {
        **line,
        "bitops": bitops,
        "disk": disk,
        "age": (time.time() - timing.measured) / 86400,
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
    """Return the median time of the stored runs of a recipe on this kind of device; None without any."""
    name = device_name(resolve_device(device, spec))
    recipe = spec.to_dict()["recipe"]
    times = [
        row["seconds"]
        for row in rows
        if row["status"] == "ok"
        and row.get("device") == name
        and row["spec"]["recipe"] == recipe
    ]
    return median(times) if times else None


def _format_hours(hours: float) -> str:
    """Return hours with one decimal, or three below one hour."""
    return f"{hours:.1f}" if hours >= 1 else f"{hours:.3f}"


def text(frame: pd.DataFrame) -> str:
    """Return a plan as text, with totals."""
    formatters = {
        "bitops": "{:.2e}".format,
        "hours": _format_hours,
        "disk": "{:,.0f} MB".format,
    }
    lines = [
        frame.drop(columns="age")
        .to_string(index=False, na_rep="", formatters=formatters)
        .replace("<NA>", "    "),  # pandas has no other way for missing integers
        "",
        f"grids: {len(frame)}; {frame.runs.sum():,} runs: {frame.done.sum():,} done, {frame.failed.sum():,} failed, "
        f"{frame.missing.sum():,} missing",
    ]
    if shared := frame.attrs["shared"]:
        lines.append(
            f"{shared} of them are runs of another grid, too; each is done once"
        )
    timed, measured = frame[frame.hours.notna()], frame[frame.age.notna()]
    never_measured = (frame.age.isna() & (frame.note == "")).sum()
    if len(timed):
        missing = int(timed.missing.sum())
        not_timed = int(frame.missing.sum()) - missing
        rest = f", without {not_timed:,} that have no times" if not_timed else ""
        lines.append(
            f"{missing:,} missing runs of {len(timed)} of {len(frame)} grids one after the other here: "
            f"{timed.hours.sum():,.1f} hours{rest} (training steps; evaluation and reading images come on "
            "top unless runs of this device are stored)"
        )
    if len(measured):
        lines += [
            f"disk for {len(measured)} of {len(frame)} grids: {measured.disk.sum():,.0f} MB; their steps were "
            f"measured here, the oldest {measured.age.max():.1f} days ago",
            "bitops: bit operations in units of one 32 x 32-bit product, convention 'paper', all runs of a grid",
        ]
    if never_measured:
        lines.append(
            f"grids never measured here: {never_measured}; plan --measure finds their bit operations, hours and disk"
        )
    return "\n".join(lines)
