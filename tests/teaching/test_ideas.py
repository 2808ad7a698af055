"""Pictures of notebooks 06 and 11, and the runs of notebook 06."""

import numpy as np
import pytest

from cpt_core.schedules.profiles import SUITE
from cpt_lessons import ideas, language


def test_the_step_of_an_lstm_shows_what_is_rounded():
    figure = ideas.lstm_step()
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words.count("q") == 2
    assert {"q(W)", "q(U)", "q(b)"} <= set(words)
    assert "rounded to q bits" in figure.description()


def test_a_bisection_shows_what_was_tried_on_the_curve():
    powers = np.array([0.25, 1, 4])
    (ax,) = ideas.bisection(powers, [0.9, 0.5, 0.1], [1, 0.5], budget=0.6).axes
    assert ax.lines[2].get_ydata() == pytest.approx([0.5, 0.7])  # halfway in the logarithm
    assert set(ax.lines[1].get_ydata()) == {0.6}
    assert [text.get_text() for text in ax.texts] == ["1", "2"]


@pytest.mark.parametrize(
    ("scale", "pairs", "counts"),
    [("smoke", "templates", [5, 2]), ("smoke", "", [5]), ("demo", "templates", [45, 9]), ("paper", "xnli", [66, 198])],
)
def test_runs_of_the_language_notebook(scale, pairs, counts, capsys):
    dataset = "ptb" if scale == "paper" else "pydoc"
    text, *on_pairs = language.experiment(scale, dataset, pairs, SUITE, [], "ours")
    assert [len(text), *map(len, on_pairs)] == counts
    six = {(s.arm, s.q_grad) for s in text if s.q_max == 6}
    assert ("static 6", 6) in six
    assert len(six) == (11 if scale == "paper" else 1)
    assert ("ShortCycleWarning: RR: 2 cycles" in capsys.readouterr().out) == (scale == "demo")  # said, not raised
    text, *_ = language.experiment(scale, dataset, pairs, ["CR"], [7], "ours")
    assert {s.seed for s in text} == {7}
    assert {s.arm for s in text if not s.arm.startswith("static")} == {"CR"}
