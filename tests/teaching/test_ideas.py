"""Pictures of notebooks 06 and 11, and the runs that notebook 06 makes of its parameters."""

import numpy as np
import pytest
import torch

from cpt_core.schedules.profiles import SUITE
from cpt_lessons import ideas
from cpt_lessons.language import language_runs
from cpt_lessons.parameters import Parameters


def test_the_step_of_an_lstm_shows_what_is_rounded():
    figure = ideas.lstm_step()
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words.count("q") == 2
    assert {"q(W)", "q(U)", "q(b)"} <= set(words)
    assert "rounded to q bits" in figure.description()


def test_ranges_of_steps_draw_the_error_of_both_roundings():
    hidden = torch.linspace(-1, 1, 24).reshape(4, 2, 3)
    own, one = hidden + 0.1, hidden - torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None, None]
    left, right = ideas.ranges_of_steps(hidden, own, one).axes
    assert right.lines[0].get_ydata() == pytest.approx([0.1] * 4)
    assert right.lines[1].get_ydata() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [line.get_ydata()[0] for line in left.lines] == [-1, 1]


def test_a_bisection_shows_what_was_tried_on_the_curve():
    powers = np.array([0.25, 1, 4])
    (ax,) = ideas.bisection(powers, [0.9, 0.5, 0.1], [1, 0.5], budget=0.6).axes
    assert ax.lines[2].get_ydata() == pytest.approx([0.5, 0.7])  # halfway in the logarithm
    assert set(ax.lines[1].get_ydata()) == {0.6}
    assert [text.get_text() for text in ax.texts] == ["1", "2"]


@pytest.mark.parametrize(
    ("scale", "pairs", "counts"),
    [
        ("smoke", "templates", (4, 1, 2)),
        ("smoke", "", (4, 1, 0)),
        ("demo", "templates", (42, 3, 9)),
        ("paper", "xnli", (66, 3, 198)),
    ],
)
def test_runs_of_the_language_notebook(scale, pairs, counts, tmp_path, capsys):
    dataset = "ptb" if scale == "paper" else "pydoc"
    values = {
        "scale": scale,
        "dataset": dataset,
        "pairs": pairs,
        "preset": "ours",
        "schedules": list(SUITE),
        "seeds": [],
    }
    text, six, on_pairs = language_runs(Parameters(values, tmp_path / "none.jsonl"))
    assert (len(text), len(six), len(on_pairs)) == counts
    assert {(s.arm, s.q_max, s.q_grad) for s in six} == {("static 6", 6, 6)}
    assert ("ShortCycleWarning: RR: 2 cycles" in capsys.readouterr().out) == (scale == "demo")  # said, not raised
    values["schedules"], values["seeds"] = ["CR"], [7]
    text, *_ = language_runs(Parameters(values, tmp_path / "none.jsonl"))
    assert {s.seed for s in text} == {7}
    assert {s.arm for s in text if not s.arm.startswith("static")} == {"CR"}
