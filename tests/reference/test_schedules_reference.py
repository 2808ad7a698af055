import csv
import itertools
import warnings

import pytest

from cpt_core.schedules import cost
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import Schedule, ShortCycleWarning


def rows_of(path):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows, f"{path} is empty"
    return rows


def schedule_of(row, cycle_rule) -> Schedule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShortCycleWarning)  # the references hold short cycles on purpose
        return make_schedule(
            row["schedule"],
            q_min=int(row["q_min"]),
            q_max=int(row["q_max"]),
            total_steps=int(row["total_steps"]),
            n_cycles=int(row["n_cycles"]),
            cycle_rule=cycle_rule,
        )


def by_run(rows):
    keys = ("schedule", "q_min", "q_max", "total_steps", "n_cycles", "cycle_len")
    return itertools.groupby(rows, key=lambda row: tuple(row[k] for k in keys))


@pytest.mark.parametrize("cycle_rule", ["exact", "floor"])
def test_bits_and_values_of_every_step(reference_dir, cycle_rule):
    wrong, checked = [], 0
    for run, group in by_run(rows_of(reference_dir / "schedules.csv")):
        rows = list(group)
        total, n, length = (int(rows[0][k]) for k in ("total_steps", "n_cycles", "cycle_len"))
        if length != total // n or (cycle_rule == "exact" and total % n):
            continue  # a run of another rule
        schedule = schedule_of(rows[0], cycle_rule)
        values, bits = schedule.values(), schedule.bits()
        for row in rows:
            t = int(row["step"])
            checked += 1
            good = bits[t] == schedule(t) == int(row["bits"])
            good &= values[t] == schedule.value(t) == pytest.approx(float(row["real_value"]), abs=1e-9)
            if not good:
                wrong.append((*run, t, row["bits"], row["real_value"], int(bits[t]), values[t]))
    assert checked
    assert wrong == []


def test_cost_of_every_experiment(reference_dir):
    wrong, checked = [], 0
    for row in rows_of(reference_dir / "bitops.csv"):
        assert int(row["cycle_len"]) == int(row["total_steps"]) // int(row["n_cycles"])
        schedule = schedule_of(row, "floor")
        q_grad = int(row["q_grad"])
        macs = float(row["flops_per_step"])
        found = {
            "rel_to_static": schedule.relative_cost(q_grad=q_grad),
            "total_bitops": cost.total_bitops(macs, schedule.bits(), q_grad),
            "mean_bits": schedule.bits().mean(),
            "mean_cost": cost.step_cost(schedule.bits(), q_grad).mean() / cost.FULL_PRECISION**2,
        }
        checked += 1
        wrong += [
            (*(row[k] for k in ("experiment", "variant", "schedule", "q_min", "q_max", name)), value)
            for name, value in found.items()
            if value != pytest.approx(float(row[name]), rel=1e-5)
        ]
    assert checked
    assert wrong == []
