"""Tests of figure captions that name schedules ending below q_max."""

import pytest

from cpt_lab.analysis import captions
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs
from tests.helpers import row_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


def caption_of(**given):
    specs = designs.quality_cost("demo", "digits", seeds=[0], **given)
    return captions.caption(table([row_of(spec, 0.8) for spec in specs]))


def test_caption_names_schedules_below_q_max():
    words = caption_of(steps=64, n_cycles=4, q_min=2)
    assert "RR, RTV, RTH end at 6 bits, as their cycles are short" in words


def test_caption_omits_schedules_reaching_q_max():
    assert "end at" not in caption_of()


def test_caption_reports_early_ends_per_q_max():
    words = caption_of(steps=64, n_cycles=4, q_min=2, q_max=[6, 8])
    assert "end at 6 bits at q_max 8" in words
    assert "end at 4 bits at q_max 6" in words
