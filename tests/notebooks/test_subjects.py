"""What notebooks run of their subjects, and draw of what ran; all other figures, nbval compares."""

import numpy as np
import pytest

from cpt_core.inspecting.measured import MeasuredCost, Spent
from cpt_core.schedules import cost
from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import schedules
from cpt_lab.analysis.runs import committed
from cpt_lessons import choosing, demonstrations, detection, diagrams, graphs, language, pictures


@pytest.mark.parametrize(
    ("hits", "objects"),
    [([True, True, False, True, False, False], 4), ([False, True, True], 2), ([False], 3), ([True, False, True], 2)],
)
def test_average_precision_is_the_area_under_the_best_precisions(hits, objects):
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    wanted = sum(max(precisions[i:]) for i, hit in enumerate(hits) if hit) / objects
    (ax,) = detection.precision_recall(hits, objects).axes
    assert ax.get_title().endswith(f" {wanted:.3f}")


def test_overlap_by_hand():
    assert detection.overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)


@pytest.mark.slow
def test_runs_of_notebook_04():
    smoke, demo = (detection.experiment(scale, "digit-scenes", [], [], "ours") for scale in ("smoke", "demo"))
    assert [s.arm for s in smoke] == ["ER", "static 8"]
    assert [(s.arm, s.seed) for s in demo] == [(arm, seed) for arm in ("RR", "static 4") for seed in range(4)]
    assert {s.key for s in demo if s.seed < 2} < set(committed("detection_scenes").key)
    given = ("voc2012", [], [], "authors")  # what is not named is all of it: the backbone may be missing
    assert {s.arm for s in detection.experiment("paper", *given)} == {*SUITE, "static 6", "static 8"}
    assert {s.seed for s in detection.experiment("demo", "digit-scenes", ["CR"], [7], "ours")} == {7}


def test_runs_of_notebook_05(capsys):
    smoke = graphs.experiment("smoke", "digits-graph", "", list(SUITE), [], "ours")
    assert capsys.readouterr() == ("", "")  # smoke runs show nothing, so their short cycles are not told
    demo = graphs.experiment("demo", "digits-graph", "", list(SUITE), [], "ours")
    assert "ShortCycleWarning: RR: 4 cycles" in capsys.readouterr().out  # said, not raised
    assert {s.arm for s in smoke if s.recipe.aggregation == "quantized"} == {"CR", "static 2", "static 8"}
    assert (len(smoke), len(demo)) == (15, 99)  # what both figures need runs once
    assert {s.seed for s in graphs.experiment("demo", "digits-graph", "", list(SUITE), [7], "ours")} == {7}


def test_words_that_stand_inside_figures_where_nbval_does_not_look():
    titles = [ax.get_title().split()[0].strip(",:") for ax in schedules.figure_2(total_steps=800).axes if ax.lines]
    assert titles == list(SUITE)
    (ax,) = graphs.star([(0, 2), (1, 2)], [1.0, 10.0, 100.0]).axes
    assert ax.get_title() == "Node 2 adds up what its 2 neighbours send, and its own"
    words = [text.get_text() for text in language.lstm_step().axes[0].texts]
    assert words.count("q") == 2
    assert {"q(W)", "q(U)", "q(b)"} <= set(words)
    figure = diagrams.three_products(5, 6)
    assert figure.get_supxlabel().endswith(f"= {cost.step_cost(5, 6)}")
    bits = [sorted(int(t.get_text().split()[-2]) for t in ax.texts if "bits" in t.get_text()) for ax in figure.axes]
    assert bits == [[5, 5], [5, 6], [5, 6]]
    (ax,) = choosing.bisection(np.array([0.25, 1, 4]), [0.9, 0.5, 0.1], [1, 0.5], budget=0.6).axes
    assert [text.get_text() for text in ax.texts] == ["1", "2"]


def test_the_data_of_the_plain_loops():
    data = graphs.digits()
    assert (data.features.shape, data.classes, len(data.train)) == ((1797, 64), 10, 50)
    learn, test, signs = language.characters()
    assert learn.shape[1] == test.shape[1] == 20
    assert len(learn) > 35 * 100
    assert int(max(learn.max(), test.max())) < signs


@pytest.mark.parametrize(
    ("scale", "pairs", "counts"),
    [("smoke", "templates", [5, 2]), ("smoke", "", [5]), ("demo", "templates", [51, 15]), ("paper", "xnli", [66, 198])],
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


def test_a_step_over_its_bits_relative_to_one():
    steps = {q: Spent(took, kept, 1.0) for q, took, kept in ((3, 2.0, 10), (8, 4.0, 10), (16, 5.0, 40))}
    (ax,) = pictures.promise_and_machine(MeasuredCost("a machine", 8, "paper", steps, {})).axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert drawn["bit operations"] == pytest.approx([57 / 192, 1, 512 / 192])
    assert drawn["seconds"] == [0.5, 1, 1.25]
    assert drawn["memory for the backward pass"] == [1, 1, 4]
    assert all(line.get_xdata().tolist() == [3, 8, 16] for line in ax.lines)


def test_held_out_images_are_in_no_batch_and_none_is_missing():
    _, loader, *_ = demonstrations.tiny_problem(seed=3)
    images, labels = demonstrations.held_out(seed=3)
    seen = {x.numpy().tobytes() for batch, _ in loader for x in batch}
    assert len(images) == len(labels) == 1797 - 40 * 32
    assert not seen & {x.numpy().tobytes() for x in images}
