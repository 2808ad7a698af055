"""Figures and data of the subject modules that nbval does not compare."""

import numpy as np
import pytest

from cpt_core.schedules import cost
from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import schedules
from cpt_lessons import (
    demonstrations,
    detection,
    diagrams,
    evidence_figures,
    graphs,
    language,
    teaching_figures,
)


@pytest.mark.parametrize(
    ("hits", "objects"),
    [
        ([True, True, False, True, False, False], 4),
        ([False, True, True], 2),
        ([False], 3),
        ([True, False, True], 2),
    ],
)
def test_precision_recall_title_shows_average_precision(hits, objects):
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    wanted = sum(max(precisions[i:]) for i, hit in enumerate(hits) if hit) / objects
    (ax,) = detection.precision_recall(hits, objects).axes
    assert ax.get_title().endswith(f" {wanted:.3f}")


def test_overlap_matches_hand_value():
    assert detection.overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)


def test_notebook_figures_have_expected_labels():
    titles = [
        ax.get_title().split()[0].strip(",:")
        for ax in schedules.figure_2(total_steps=800).axes
        if ax.lines
    ]
    assert titles == list(SUITE)
    (ax,) = graphs.star([(0, 2), (1, 2)], [1.0, 10.0, 100.0]).axes
    assert ax.get_title() == "Node 2 adds up what its 2 neighbours send, and its own"
    words = [text.get_text() for text in language.lstm_step().axes[0].texts]
    assert words.count("q") == 2
    assert {"q(W)", "q(U)", "q(b)"} <= set(words)
    figure = diagrams.three_matmuls(5, 6)
    assert figure.get_supxlabel().endswith(f"= {cost.step_cost(5, 6)}")
    bits = [
        sorted(
            int(t.get_text().split()[-2]) for t in ax.texts if "bits" in t.get_text()
        )
        for ax in figure.axes
    ]
    assert bits == [[5, 5], [5, 6], [5, 6]]
    (ax,) = evidence_figures.bisection(
        np.array([0.25, 1, 4]), [0.9, 0.5, 0.1], [1, 0.5], budget=0.6
    ).axes
    assert [text.get_text() for text in ax.texts] == ["1", "2"]


def test_plain_loop_data_have_expected_shapes():
    data = graphs.digits()
    assert (data.features.shape, data.classes, len(data.train)) == ((1797, 64), 10, 50)
    learn, test, signs = language.characters()
    assert learn.shape[1] == test.shape[1] == 20
    assert len(learn) > 35 * 100
    assert int(max(learn.max(), test.max())) < signs


def test_promise_and_machine_normalises_to_8_bits():
    seconds, saved_bytes = {3: 2.0, 8: 4.0, 16: 5.0}, {3: 10, 8: 10, 16: 40}
    (ax,) = teaching_figures.promise_and_machine(seconds, saved_bytes, q_grad=8).axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert drawn["bit operations"] == pytest.approx([57 / 192, 1, 512 / 192])
    assert drawn["seconds"] == [0.5, 1, 1.25]
    assert drawn["memory for the backward pass"] == [1, 1, 4]
    assert all(line.get_xdata().tolist() == [3, 8, 16] for line in ax.lines)


def test_held_out_images_complement_training_batches():
    _, loader, *_ = demonstrations.tiny_problem(seed=3)
    images, labels = demonstrations.held_out(seed=3)
    seen = {x.numpy().tobytes() for batch, _ in loader for x in batch}
    assert len(images) == len(labels) == 1797 - 40 * 32
    assert not seen & {x.numpy().tobytes() for x in images}
