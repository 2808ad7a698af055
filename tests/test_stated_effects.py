"""Effects that the templates of docs/reproducing state: look-up, ranges and counts."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from book.stated_effects import StatedEffects
from cpt_lab.analysis.effects import Effect
from cpt_lab.analysis.estimates import Estimate
from cpt_lab.paths import ROOT


def estimate(description, *values):
    return Estimate(description, "points", np.array(values))


@pytest.fixture
def stated():
    effects = StatedEffects()
    effects.add(
        "H99",
        [
            estimate("a, x minus y", 1.9, 2.0, 2.1),
            estimate("b, x minus y", 4.2, 4.3, 4.4),
            estimate("c, x minus y", -1.0, 0.1, 0.0),
            estimate("d, x minus y", -3.1, -3.0, -2.9),
        ],
    )
    return effects


def test_stated_effect_has_text_of_estimate(stated):
    expected = estimate("", 1.9, 2.0, 2.1).text()
    assert stated.find("H99", "a, x minus y").text() == expected
    assert expected == "+2.00 [+1.75, +2.25] points"


def test_stated_effect_of_claim_has_unit_and_seeds():
    def interval_at(alpha):
        return 0.6, 0.38, 0.83

    effect = Effect("MLP, 3 to 8 bits", "demo", interval_at, 5, "", "digits/mlp6")
    claim = SimpleNamespace(id="small")
    stated = StatedEffects()
    stated.add_claims([SimpleNamespace(claim=claim, effects=[(effect, "")])])
    text = stated.find("small", "digits/mlp6 3-8").text_with_seeds("points")
    assert text == "+0.60 [+0.38, +0.83] points (n = 5)"


def test_stated_effects_refuse_unknown_names(stated):
    with pytest.raises(KeyError):
        stated.find("H99", "a, x minus")
    with pytest.raises(KeyError, match="no effect of H99 matches"):
        stated.select("H99", "a, x")


def test_stated_effects_refuse_second_meaning_of_name(stated):
    stated.add("H99", [estimate("a, x minus y", 1.9, 2.0, 2.1)])
    with pytest.raises(ValueError, match="got two"):
        stated.add("H99", [estimate("a, x minus y", 1.9, 2.0, 2.2)])


def test_effect_group_counts_significant_effects(stated):
    group = stated.select("H99", ".*, x minus y")
    assert (group.num_above, group.num_below, len(group)) == (2, 1, 4)


@pytest.mark.parametrize(
    ("pattern", "sizes"), [("[ab].*", "2.0 to 4.3"), ("a.*", "2.0"), ("d.*", "3.0")]
)
def test_effect_group_sizes_are_absolute_means(stated, pattern, sizes):
    assert stated.select("H99", pattern).sizes() == sizes


def test_effect_group_refuses_range_over_zero(stated):
    with pytest.raises(ValueError, match="one sign"):
        stated.select("H99", "[ad].*").sizes()


@pytest.mark.parametrize("name", ["results.md.j2", "small-studies.md.j2"])
def test_templates_have_no_typed_intervals(name):
    """Take every interval in the prose of rendered pages from stored rows."""
    text = (ROOT / "book" / name).read_text(encoding="utf-8")
    assert re.findall(r"[-+]?\d*\.?\d+(?: \S+)? \[[-+]?\d*\.?\d+, .*?\]", text) == []
