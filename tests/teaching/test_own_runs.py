"""What notebooks say of their own runs."""

import pandas as pd
import pytest

from cpt_lab.analysis import quality_cost
from cpt_lab.analysis.runs import committed
from cpt_lessons.own_runs import brief, compared, ran, titled, told


@pytest.fixture
def runs():
    columns = {
        "arm": ["CR", "CR", "RR"],
        "seed": [0, 1, 0],
        "scale": "demo",
        "savings": "",
        "diverged": False,
        "seconds": 0.8,
    }
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


def test_what_ran_is_compared(capsys):
    rows = committed("image_digits").query("model == 'mlp6' and q_min == 3")
    compared(rows[rows.arm.isin(["RR", "static 4"])], [("RR", "static 4"), ("CR", "static 5"), ("large", "static 4")])
    ran_, rr, large = capsys.readouterr().out.splitlines()
    assert ran_.startswith("20 runs, 2 arms, 10 seeds, none diverged")
    assert rr == "RR minus static 4: +0.00 [-1.74, +1.74] points, n = 10: cannot be told from 0"
    assert large.startswith("large minus static 4: +0.00 ")


def test_smoke_runs_are_held_against_their_bands(capsys):
    rows = committed("image_digits").query("model == 'mlp6' and q_min == 3 and seed == 0 and arm in ('ER', 'CR')")
    smoke = rows.assign(scale="smoke")
    compared(smoke.assign(accuracy=0.88), [("ER", "CR")])
    _, reason, inside = capsys.readouterr().out.splitlines()
    assert reason == 'smoke scale, nothing to compare; scale = "demo" prints the differences of ER and CR, drawn too'
    assert inside == "smoke accuracy of ER: within the range of 12 earlier seeds"
    with pytest.raises(AssertionError, match="outside its band"):
        compared(smoke.assign(accuracy=0.1), [])
    compared(smoke.assign(accuracy=0.1, dataset="my-images/"), [])


def test_what_all_lines_of_a_table_say_is_said_once(capsys):
    silent = {"": "H1", "paper": "not in the paper", "failed": 0}
    brief(pd.DataFrame({"arm": ["CR", "RR"], "n": 10, "cost": [0.6, 0.4], "diverged": 0, **silent}))
    brief(pd.DataFrame({"arm": ["CR", "RR"], "n": [10, 9], **silent}))
    brief(pd.DataFrame({"arm": ["CR", "RR"], "failed": 1}))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [["arm", "cost"], ["CR", "0.6"], ["RR", "0.4"]]
    assert " ".join(lines[3]) == "in every line: n 10; diverged 0"
    assert lines[4:7] == [["arm", "n"], ["CR", "10"], ["RR", "9"]]
    assert " ".join(lines[-1]) == "in every line: failed 1"


def test_beyond_smoke_scale_a_table_per_aggregation_is_told(capsys):
    gcn = committed("graph_facebook").query("model == 'gcn' and arm in ['static 2', 'static 8']")
    told(gcn.assign(scale="smoke"), gcn)
    first, second, *tables = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("23 runs, 2 arms, 8 seeds, none diverged")
    assert [line.split()[0] for line in tables if line.startswith("static ")] == ["static"] * 4


def test_a_figure_has_its_finding_for_its_title():
    figure = quality_cost.figure_3(committed("graph_facebook").query("model == 'gcn' and aggregation == 'fp'"))
    assert "Static bits do as well." in titled(figure, "Static bits do as well.").description()
