"""What notebooks say of their own runs."""

import pandas as pd
import pytest

from cpt_core.teaching.runs import comparable, ran


@pytest.fixture
def runs():
    columns = {"arm": ["CR", "CR", "RR"], "seed": [0, 1, 0], "scale": "demo", "diverged": False, "seconds": 0.8}
    return pd.DataFrame(columns)


def test_what_ran_is_said_in_a_line(runs, capsys):
    ran(runs)
    ran(runs[:1].assign(diverged=True))
    ran(runs[:0])
    assert capsys.readouterr().out.splitlines() == [
        "3 runs, 2 arms, 2 seeds, none diverged: 2 s of training",
        "1 run, 1 arm, 1 seed, 1 diverged: 1 s of training",
        "nothing to run",
    ]


def test_smoke_runs_are_not_compared(runs, capsys):
    assert comparable(runs, "an order")
    assert capsys.readouterr().out == ""
    assert not comparable(runs.assign(scale="smoke"), "an order")
    assert capsys.readouterr().out == 'smoke scale: not a result. With scale = "demo" this cell prints an order\n'
