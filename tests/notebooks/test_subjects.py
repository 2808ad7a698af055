"""What notebooks draw and run of their subjects."""

import numpy as np
import pytest

from cpt_core.inspecting.measured import MeasuredCost, Spent
from cpt_core.schedules import cost
from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis.runs import committed
from cpt_lessons import choosing, demonstrations, detection, diagrams, graphs, images, language, pictures


@pytest.fixture(scope="module")
def digits():
    return committed("image_digits").query("model == 'mlp6' and q_min == 3")


def test_seed_by_seed_draws_a_line_per_seed_and_their_mean(digits):
    left, right = images.seed_by_seed(digits, "CR", "RR").axes
    accuracy = 100 * digits.pivot_table(index="seed", columns="arm", values="accuracy")
    lines = [line.get_ydata().tolist() for line in left.lines]
    assert lines == pytest.approx(accuracy[["CR", "RR"]].to_numpy())
    drawn = [line for line in right.lines if len(line.get_ydata()) == len(accuracy)]
    assert sorted(drawn[0].get_ydata()) == pytest.approx(sorted(accuracy.CR - accuracy.RR))
    (mean,) = right.containers[0].lines[0].get_ydata()
    assert mean == pytest.approx((accuracy.CR - accuracy.RR).mean())


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


def test_the_star_says_what_its_middle_adds_up():
    (ax,) = graphs.star([(0, 2), (1, 2)], [1.0, 10.0, 100.0]).axes
    assert ax.get_title() == "Node 2 adds up what its 2 neighbours send, and its own"


def test_the_data_of_the_plain_loops():
    data = graphs.digits()
    assert (data.features.shape, data.classes, len(data.train)) == ((1797, 64), 10, 50)
    learn, test, signs = language.characters()
    assert learn.shape[1] == test.shape[1] == 20
    assert len(learn) > 35 * 100
    assert int(max(learn.max(), test.max())) < signs


def test_slopes_are_0_nearly_everywhere_or_near_1():
    q, (left, right) = 3, diagrams.slopes().axes
    wide, narrow, _ = (line.get_ydata() for line in right.lines)
    assert np.median(narrow) == 0
    assert 0 < (narrow > 2).mean() < 0.05  # at the jumps
    assert np.abs(wide - 1).max() <= 2 / (2**q - 1) + 1e-9  # the bound of the notebook: s / 2h
    assert len(set(np.round(left.lines[1].get_ydata(), 9))) == 2**q
    for line in left.lines[2:]:  # a difference is drawn from stair to stair
        (x0, x1), (y0, y1) = line.get_data()
        assert abs((y1 - y0) / (x1 - x0) - 1) <= 2 / (2**q - 1) / (x1 - x0) + 1e-9


def test_at_random_the_mean_is_the_value_and_to_nearest_a_stair():
    nearest, random = (
        {line.get_label(): line.get_data() for line in ax.lines} for ax in diagrams.random_rounding().axes
    )
    x, mean = random["mean of the results"]
    assert np.abs(mean - x).max() < 0.08  # five times the deviation of the mean of 1000 draws
    x, mean = nearest["mean of the results"]
    assert mean.tolist() == np.rint(x).tolist()


@pytest.mark.parametrize(("q", "q_grad"), [(2, 8), (5, 6)])
def test_products_have_the_bits_of_their_operands_and_the_cost_of_a_step(q, q_grad):
    figure = diagrams.three_products(q, q_grad)
    assert figure.get_supxlabel().endswith(f"= {cost.step_cost(q, q_grad)}")
    bits = [sorted(int(t.get_text().split()[-2]) for t in ax.texts if "bits" in t.get_text()) for ax in figure.axes]
    assert bits == [[q, q], [q, q_grad], [q, q_grad]]
    said = figure.description().split("; ")
    assert said[1] == (
        f"error product: output gradients of {q_grad} bits times weights of {q} bits, cost {q * q_grad}, gives input "
        "gradients in float32"
    )
    assert [words.split(" product")[0] for words in said] == ["forward", "error", "weight gradient"]


def test_the_step_of_an_lstm_shows_what_is_rounded():
    figure = language.lstm_step()
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words.count("q") == 2
    assert {"q(W)", "q(U)", "q(b)"} <= set(words)
    assert "rounded to q bits" in figure.description()


def test_a_bisection_shows_what_was_tried_on_the_curve():
    powers = np.array([0.25, 1, 4])
    (ax,) = choosing.bisection(powers, [0.9, 0.5, 0.1], [1, 0.5], budget=0.6).axes
    assert ax.lines[2].get_ydata() == pytest.approx([0.5, 0.7])  # halfway in the logarithm
    assert set(ax.lines[1].get_ydata()) == {0.6}
    assert [text.get_text() for text in ax.texts] == ["1", "2"]


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
