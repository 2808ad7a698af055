"""Page of the small studies, its generator, and the rule for bold effects."""

import itertools
import re
from functools import partial

import pytest
from scipy.stats import ttest_1samp

from bench import evaluation_bits, rising_vs_falling, roles
from book import small_studies


def test_small_studies_page_is_up_to_date():
    assert small_studies.PAGE.read_text() == small_studies.page(), (
        "run: python -m book.small_studies"
    )


@pytest.mark.parametrize(
    ("effects", "table"),
    [
        (small_studies.allocation_effects, small_studies.allocation_table),
        (partial(small_studies.order_effects, [True]), small_studies.order_table),
    ],
    ids=["allocation", "order"],
)
def test_small_studies_bold_follows_holm(effects, table):
    """Set in bold what stays below .05 in Holm's steps, which leave out an effect that is significant alone."""
    by_p = sorted(effects().values(), key=lambda e: ttest_1samp(e.values, 0).pvalue)
    p_values = [ttest_1samp(effect.values, 0).pvalue for effect in by_p]
    steps = [p < 0.05 / (len(p_values) - i) for i, p in enumerate(p_values)]
    num_significant = steps.index(False)
    assert 0 < num_significant < sum(p < 0.05 for p in p_values)
    cells = [str(cell) for cell in table().to_numpy().ravel()]
    bold = [cell.strip("*") for cell in cells if cell.startswith("**")]
    assert sorted(bold) == sorted(e.text() for e in by_p[:num_significant])


def test_small_studies_use_every_planned_run():
    for name, module, tasks in (
        ("roles", roles, roles.TASKS),
        ("rising_vs_falling", rising_vs_falling, rising_vs_falling.RECIPES),
    ):
        rows = small_studies.read_results(name)["rows"]
        arms = {row["arm"] for row in rows}
        runs = [(row["task"], row["arm"], row["seed"]) for row in rows]
        assert sorted(runs) == sorted(itertools.product(tasks, arms, module.SEEDS))
    rows = small_studies.read_results("evaluated_at")["rows"]
    runs = [(row["task"], row["seed"], row["trained"]) for row in rows]
    planned = (evaluation_bits.TASKS, evaluation_bits.SEEDS, evaluation_bits.BITS)
    assert sorted(runs) == sorted(itertools.product(*planned))


def test_adaptive_bits_cost_what_static_bits_cost():
    for runs in small_studies.read_results("adaptive")["tasks"].values():
        for run in runs:
            assert run["costs"]["static"] == pytest.approx(run["cost"], rel=1e-3)


def test_small_studies_page_states_effects_of_float32():
    page = small_studies.page()
    stated = re.search(r"changes at most ([\d.]+) points, or ([\d.]+) %", page)
    changes = small_studies.float32_changes()
    assert [float(x) for x in stated.groups()] == pytest.approx(
        [changes["points"], changes["%"]], abs=0.05
    )
