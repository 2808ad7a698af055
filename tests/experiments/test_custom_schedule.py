"""Custom schedules added as in CONTRIBUTING: unchanged grids and figures of the paper."""

import json
import sys

import pytest
from helpers import run_command

from cpt_core.schedules.profiles import PROFILES, SCHEDULES, SUITE, SuiteEntry
from cpt_lab.analysis.schedules import figure_2
from cpt_lab.experiments.grids import find_grids, grid_specs

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)

# Run before anything else of the package is imported: the same as editing the file.
ADD = """
from dataclasses import dataclass
from cpt_core.schedules import profiles

@dataclass(frozen=True)
class Parabola(profiles.Profile):
    def growth(self, x):
        return x**2

profiles.PROFILES["parabola"] = Parabola
profiles.SCHEDULES["PR"] = profiles.SuiteEntry("parabola")
"""
ASK = """
import json
import cpt_core as cpt
from cpt_lab.experiments import grids
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import RunSpec, run_spec, savings_of

spec = run_spec(recipe("demo"), "PR", q_max=8, seed=0)
chosen = grids.grid_specs("digits/mlp6", seeds=[0]) + [spec]
print(json.dumps({
    "keys": {name: [s.key for s in grids.grid_specs(name)] for name in NAMES},
    "round trip": RunSpec.from_dict(spec.to_dict()) == spec,
    "bits": [int(spec.schedule.bits()[i]) for i in (0, -1)],
    "cost": cpt.make_schedule("PR", q_min=3, q_max=8, total_steps=64_000).relative_cost(),
    "savings": savings_of("PR"),
    "kept": [s.arm for s in grids.select(chosen, savings=["own"])],
}))
"""


@pytest.fixture(scope="module")
def told():
    names = [*list(find_grids("figure_3"))[:2], "ptb/lstm", "digits/equal_cost"]
    code = f"{ADD}\nNAMES = {names!r}\n{ASK}"
    return json.loads(run_command(sys.executable, "-W", "ignore", "-c", code))


def test_custom_schedule_keeps_paper_grids(told):
    for name, keys in told["keys"].items():
        assert keys == [spec.key for spec in grid_specs(name)], name
    assert [len(keys) for keys in told["keys"].values()][:3] == [66, 66, 66]


def test_figure_2_shows_ten_paper_schedules(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "PR", SuiteEntry("linear"))
    assert len(figure_2(total_steps=80).axes) == 10


def test_custom_schedule_runs_as_separate_arm(told):
    assert (told["round trip"], told["bits"], told["savings"], told["kept"]) == (
        True,
        [3, 8],
        "own",
        ["PR"],
    )
    assert 0.3 < told["cost"] < 0.6  # a parabola stays low


def test_suite_contains_only_paper_schedules():
    assert len(SUITE) == 10
    assert {name: SCHEDULES[name] for name in SUITE} == SUITE
    assert {
        entry.savings for name, entry in SCHEDULES.items() if name not in SUITE
    } <= {"own"}
    assert {entry.profile for entry in SCHEDULES.values()} <= set(PROFILES)
