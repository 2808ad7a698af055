"""Arms of studies H1 to H4: costs and shared properties of the twelve schedules."""

import numpy as np
import pytest
from scipy.stats import rankdata

from cpt_core.schedules import cost
from cpt_lab.experiments import grids
from cpt_lab.studies.h1_to_h4 import arms


def test_grids_list_questions_after_paper_grids():
    assert list(grids.find_grids()) == [*grids.GRIDS, *grids.QUESTIONS]
    assert set(grids.find_grids("h4")) == {"h4/gradients", "h4/aggregation"}
    assert {s.seed for s in grids.grid_specs("h1/characters", seeds=[3])} == {3}
    with pytest.raises(
        ValueError, match=r"no grid 'h9'; the nearest of \d+ are h7, h6, h5"
    ):
        grids.find_grids("h9")


def test_h1_twelve_schedules_have_equal_cost():
    """Use twelve schedules of equal cost with uncorrelated noise, low-bit share and date."""
    schedules = arms.equal_cost_schedules()
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
    date = np.array([arms.mean_noise_time(s) for s in schedules])
    assert share.min() > 0
    assert share.max() / share.min() > 10
    assert np.ptp(date) > 0.3
    x = np.array([np.log(noise), share, date])
    for correlations in (np.corrcoef(x), np.corrcoef(rankdata(x, axis=1))):
        assert np.abs(correlations[~np.eye(3, dtype=bool)]).max() < 0.2
