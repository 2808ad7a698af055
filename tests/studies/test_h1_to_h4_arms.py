"""The runs of H1 to H4: costs, what the twelve schedules share, what is crossed with what."""

import numpy as np
import pytest
from scipy.stats import rankdata

from cpt_core.schedules import cost
from cpt_lab.experiments import grids
from cpt_lab.studies.h1_to_h4 import arms
from tests.helpers import price


def test_questions_stay_out_of_the_lists_of_the_paper():
    assert not set(grids.QUESTIONS) & set(grids.find_grids())
    assert set(grids.find_grids("h4")) == {"h4/gradients", "h4/aggregation"}
    assert {s.seed for s in grids.grid_specs("h1/characters", seeds=[3])} == {3}
    with pytest.raises(ValueError, match=r"no grid 'h9'; the nearest of \d+ are h7, h6, h5"):
        grids.find_grids("h9")


def test_the_twelve_schedules_have_one_cost_and_differ_in_nothing_together():
    schedules = arms.twelve()
    assert len(schedules) == 12
    bits = np.array([s.bits() for s in schedules])
    assert bits.shape == (12, 160)
    assert {int(cost.step_cost(b, 8).sum()) for b in bits} == {round(0.55 * 192 * 160)}
    assert (bits[:, -16:] == 8).all()
    for half in (bits[:, :80], bits[:, 80:]):
        assert (np.diff(half) >= 0).all()
        assert (half[:, -8:] == 8).all()
    noise = np.array([s.noise_exposure() for s in schedules])
    assert (np.diff(noise) > 0).all()
    assert noise[-1] / noise[0] > 3.4
    share = (bits == 2).mean(1)
    date = np.array([arms.noise_date(s) for s in schedules])
    assert share.min() > 0
    assert share.max() / share.min() > 10
    assert np.ptp(date) > 0.3
    x = np.array([np.log(noise), share, date])
    for correlations in (np.corrcoef(x), np.corrcoef(rankdata(x, axis=1))):
        assert np.abs(correlations[~np.eye(3, dtype=bool)]).max() < 0.2


def test_the_date_of_noise():
    early, late = arms.twelve()[4], arms.twelve()[5]
    weights = [4.0**-b for b in early.bits().tolist()]
    by_hand = sum(w * (t + 0.5) / 160 for t, w in enumerate(weights)) / sum(weights)
    assert arms.noise_date(early) == pytest.approx(by_hand)
    assert arms.noise_date(late) > 2 * arms.noise_date(early)


@pytest.mark.parametrize("steps", [120, 160])
@pytest.mark.parametrize("bits", [5, 3])
def test_the_least_noisy_cyclic_schedule_costs_what_static_costs_and_cycles(bits, steps):
    schedule = arms.least_noisy(bits, steps)
    assert price(schedule.bits()) == pytest.approx(price([bits]), rel=1e-3)
    assert schedule.bits()[-1] == 8
    assert schedule.bits().min() < bits
    assert schedule.noise_exposure() > 4.0 ** (8 - bits)  # as it must be: noise is convex in the bits
    assert schedule.noise_exposure() < 3 * 4.0 ** (8 - bits)


def test_deficits_recover_for_equally_long_and_have_controls():
    specs = arms.deficit_dates(seeds=[100])
    assert len(specs) == 30
    for rule in arms.LR_RULES:
        low = [s for s in specs if s.recipe.lr_rule == rule and s.schedule.windows]
        assert [s.schedule.windows for s in low] == [((start, start + 16),) for start in (0, 12, 24, 36, 48)]
        assert {s.recipe.steps - s.schedule.windows[0][1] for s in low} == {32}
        controls = [s for s in specs if s.recipe.lr_rule == rule and not s.schedule.windows]
        assert [s.recipe for s in controls] == [s.recipe for s in low]


def test_gradients_and_aggregation_cross_what_they_compare():
    found = {(int(s.schedule(0)), s.q_grad) for s in arms.gradients(seeds=[100])}
    assert found == {(8, 8), (8, 6), (6, 8), (6, 6)}
    both = {(int(s.schedule(0)), s.recipe.aggregation) for s in arms.aggregation_by_degree(seeds=[100])}
    assert both == {(q, kind) for q in (8, 4, 3) for kind in ("fp", "quantized")}
