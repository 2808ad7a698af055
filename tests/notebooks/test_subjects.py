"""What notebooks 03 to 06 draw and count of their subjects."""

import pytest

from cpt_lab.analysis.runs import committed
from cpt_lessons import detection, graphs, images, language


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
    assert detection.average_precision(hits, objects) == pytest.approx(wanted)


def test_overlap_by_hand():
    assert detection.overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)


ALL = ["LR", "LT", "CR", "CT", "RR", "RTV", "RTH", "ER", "ETV", "ETH"]


def test_runs_of_notebook_04():
    smoke, demo = (detection.experiment(scale, "digit-scenes", [], [], "ours") for scale in ("smoke", "demo"))
    assert [s.arm for s in smoke] == ["ER", "static 8"]
    assert [(s.arm, s.seed) for s in demo] == [(arm, seed) for arm in ("RR", "static 4") for seed in range(4)]
    assert {s.key for s in demo if s.seed < 2} < set(committed("detection_scenes").key)
    given = ("voc2012", [], [], "authors")  # what is not named is all of it: the backbone may be missing
    assert {s.arm for s in detection.experiment("paper", *given)} == {*ALL, "static 6", "static 8"}
    assert {s.seed for s in detection.experiment("demo", "digit-scenes", ["CR"], [7], "ours")} == {7}


def test_runs_of_notebook_05(capsys):
    smoke, demo = (graphs.experiment(scale, "digits-graph", "", ALL, [], "ours") for scale in ("smoke", "demo"))
    assert "ShortCycleWarning: RR: 2 cycles" in capsys.readouterr().out  # said, not raised
    assert {s.arm for s in smoke if s.recipe.aggregation == "quantized"} == {"CR", "static 2", "static 8"}
    assert (len(smoke), len(demo)) == (15, 93)  # what both figures need runs once
    assert {s.seed for s in graphs.experiment("demo", "digits-graph", "", ALL, [7], "ours")} == {7}


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
