"""Reference tables of the authors' code: bits, real values and BitOps of schedules."""

import csv
import itertools

import pytest
from helpers import quietly

from cpt_core.schedules import cost
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_lab.sweeps.forecast import total_bitops


def rows_of(path):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows, f"{path} is empty"
    return rows


def schedule_of(row, cycle_rule) -> Schedule:
    given = {
        name: int(row[name]) for name in ("q_min", "q_max", "total_steps", "n_cycles")
    }
    return quietly(
        make_schedule, row["schedule"], **given, cycle_rule=cycle_rule
    )  # short cycles are there on purpose


def by_run(rows):
    keys = ("schedule", "q_min", "q_max", "total_steps", "n_cycles", "cycle_len")
    return itertools.groupby(rows, key=lambda row: tuple(row[k] for k in keys))


def rules_of(row):
    """Return the cycle rules that give the cycle length of a run's rows."""
    total, n, length = (int(row[k]) for k in ("total_steps", "n_cycles", "cycle_len"))
    lengths = {
        "exact": total / n,
        "floor": total // n,
        "floor_plus_one": total // n + 1,
    }
    return [rule for rule, found in lengths.items() if found == length]


def test_schedule_bits_and_values_match_reference(reference_dir):
    wrong = []
    for run, group in by_run(rows_of(reference_dir / "schedules.csv")):
        rows = list(group)
        rules = rules_of(rows[0])
        assert rules, f"{run}: no rule gives cycles of that length"
        for rule in rules:
            schedule = schedule_of(rows[0], rule)
            values, bits = schedule.values(), schedule.bits()
            for row in rows:
                t = int(row["step"])
                good = bits[t] == schedule(t) == int(row["bits"])
                good &= values[t] == pytest.approx(float(row["real_value"]), abs=1e-9)
                if not good:
                    wrong.append(
                        (
                            rule,
                            *run,
                            t,
                            row["bits"],
                            row["real_value"],
                            int(bits[t]),
                            values[t],
                        )
                    )
    assert wrong == []


def test_schedule_cost_matches_reference(reference_dir):
    wrong = []
    for row in rows_of(reference_dir / "bitops.csv"):
        assert int(row["cycle_len"]) == int(row["total_steps"]) // int(row["n_cycles"])
        schedule = schedule_of(row, "floor")
        q_grad = int(row["q_grad"])
        macs = float(row["flops_per_step"])
        found = {
            # the authors' baseline has the gradients of the run
            "rel_to_static": schedule.relative_cost(q_grad)
            / StaticSchedule(schedule.q_max, 1).relative_cost(q_grad),
            "total_bitops": total_bitops(macs, schedule.bits(), q_grad),
            "mean_bits": schedule.bits().mean(),
            "mean_cost": cost.step_cost(schedule.bits(), q_grad).mean()
            / cost.FULL_PRECISION**2,
        }
        wrong += [
            (
                *(
                    row[k]
                    for k in (
                        "experiment",
                        "variant",
                        "schedule",
                        "q_min",
                        "q_max",
                        name,
                    )
                ),
                value,
            )
            for name, value in found.items()
            if value != pytest.approx(float(row[name]), rel=1e-5)
        ]
    assert wrong == []
