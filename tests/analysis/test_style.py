"""Style of figures: labels without overlap, readable text, integer bit ticks and literal user names."""

import itertools
import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.cbook import is_math_text
from matplotlib.colors import to_rgb
from matplotlib.text import Text

import cpt_core as cpt
from cpt_extras.figures import PIXELS_PER_INCH
from cpt_extras.search.range_test_result import PrecisionRange
from cpt_lab.analysis import quality_cost, schedules, style
from cpt_lab.analysis.figures import figure_3, figure_6, figure_7, figure_8
from cpt_lab.analysis.rounding import error_over_training
from cpt_lab.analysis.run_table import load
from cpt_lab.paths import results_dir
from cpt_lessons import detection, diagrams, graphs, images, teaching_figures

pytestmark = pytest.mark.slow

PAGE = Path(quality_cost.__file__).with_name("page.html.j2").read_text(encoding="utf-8")
THEMES = re.findall(r":root \{(.*?)\}", PAGE, re.DOTALL)
BOTH = ("relative_cost", "noise_exposure")


def kept(name):
    return load(results_dir() / f"{name}.jsonl")


@cache
def digits():
    return kept("image_digits").query("model == 'mlp6' and q_min == 3")


@cache
def facebook():
    return kept("graph_facebook").query(
        "model == 'gcn' and aggregation == 'fp' and q_max == 8"
    )


@cache
def crowd():
    """Return runs whose schedules have equal cost and nearly equal quality."""
    runs = digits()
    static = runs["savings"] == "static"
    runs = runs.assign(
        accuracy=runs["accuracy"].where(static | (runs["seed"] == 0), 0.8)
    )
    return runs.assign(**{x: runs[x].where(static, runs[x].median()) for x in BOTH})


def uncontrolled(runs):
    """Return runs of the arms of table 1: early deficits, windows and one clean training."""
    shortest = runs["total_steps"].min()
    controls = (runs["stop"] == 0) & (runs["total_steps"] > shortest)
    return runs[~controls & (runs["stop"] < runs["total_steps"])]


def precision_range(name="digits"):
    return PrecisionRange(
        2, "", "", (2, 8), (1.0,), ((0.5, 0.5),), ((1.0, 1.0),), "reset", 0.8, 9, name
    )


RECORDED = pd.DataFrame(
    {
        "step": [0, 1, 2],
        "role": "input",
        "level": [2, 3, 3],
        "snr_db": [9.0, 12.0, 13.0],
    }
)
FIGURES = {
    "figure 2": lambda: schedules.figure_2(total_steps=800),
    "figure 3": lambda: figure_3(digits(), xs=BOTH, front=True),
    "figure 6": lambda: figure_6(facebook(), xs=BOTH, front=True),
    "figure 7": lambda: figure_7(kept("language_pydoc").query("q_max == 8"), xs=BOTH),
    "many arms of one cost": lambda: figure_3(crowd(), xs=BOTH),
    "both aggregations": lambda: figure_6(
        kept("graph_facebook").query("model == 'gcn' and q_min == 2")
    ),
    "figure 8": lambda: figure_8(kept("deficit_facebook")),
    "figure 8 without controls": lambda: figure_8(uncontrolled(kept("deficit_digits"))),
    "cost and noise": schedules.jensen_figure,
    "number lines": teaching_figures.number_lines,
    "slopes": diagrams.slopes,
    "random rounding": diagrams.random_rounding,
    "three matmuls": lambda: diagrams.three_matmuls(12, 16),
    "accuracy by cost": lambda: teaching_figures.by_cost(
        {"static 8": 1.0, "CR": 0.57}, {"static 8": [0.9, 0.92], "CR": [0.91]}
    ),
    "seeds": lambda: images.seed_by_seed(digits(), "CR", "RR"),
    "overlaps": lambda: detection.overlaps(
        (10, 10, 40, 50), [(10, 10, 42, 42), (24, 24, 56, 56)]
    ),
    "precision and recall": lambda: detection.precision_recall([True, False, True], 3),
    "star": lambda: graphs.star([(0, 1), (1, 2), (1, 3)], [1.0, 10.0, 100.0, 1000.0]),
    "rounding": lambda: error_over_training(RECORDED, "snr_db"),
    "profiles": schedules.profiles_figure,
    "prices": lambda: schedules.price_figure(
        cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=800)
    ),
    "range test": lambda: precision_range().figure(),
}


@cache
def drawn(name):
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    return figure


def words_of(figure):
    """Return the visible texts of a figure and their boxes, without ticks outside the limits."""
    outside = set()
    for ax in (ax for parent in figure.axes for ax in (parent, *parent.child_axes)):
        for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not min(limits) <= tick.get_loc() <= max(limits):
                    outside |= {tick.label1, tick.label2}
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t not in outside]
    return [(t, t.get_window_extent()) for t in texts if t.get_text().strip()]


def luminance(color):
    """Return the relative luminance of a colour, as WCAG 2.2 defines it."""
    r, g, b = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in to_rgb(color)
    )
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a, b):
    """Return the contrast ratio of two colours, from 1 to 21, as WCAG 2.2 defines it."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


CROWDED = (
    "figure 3",
    "figure 6",
    "figure 7",
    "many arms of one cost",
    "both aggregations",
    "figure 8",
    "figure 8 without controls",
    "cost and noise",
    "slopes",
    "random rounding",
    "three matmuls",
)


@pytest.mark.parametrize("name", CROWDED)
def test_figure_texts_do_not_overlap(name):
    figure = drawn(name)
    words = words_of(figure)
    pairs = itertools.combinations(words, 2)
    over = [(a.get_text(), b.get_text()) for (a, p), (b, q) in pairs if p.overlaps(q)]
    assert over == []
    page = figure.bbox.padded(2)
    for text, box in words:
        assert page.containsx(box.x0), text.get_text()
        assert page.containsx(box.x1), text.get_text()


@pytest.mark.parametrize(
    ("name", "runs_of"),
    [("figure 3", digits), ("figure 6", facebook), ("many arms of one cost", crowd)],
)
def test_figure_labels_every_arm_once(name, runs_of):
    runs = runs_of()
    arms = sorted(set(runs["arm"][runs["savings"] != "static"]))
    for ax in drawn(name).axes:
        names = [t.get_text() for t in ax.texts if not t.get_text().isdigit()]
        assert sorted(names) == arms


@pytest.mark.parametrize("name", FIGURES)
def test_figure_meets_contrast_and_size_limits(name):
    figure = drawn(name)
    for text, _ in words_of(figure):
        is_in_square = text.get_color() == "white"  # bits in their squares
        ground = style.COLORS["static"] if is_in_square else "white"
        assert contrast(text.get_color(), ground) >= 4.5, text.get_text()
        assert text.get_fontsize() >= style.SMALL_FONT_SIZE, text.get_text()
    width = float(re.search(r"max-width: (\d+)rem", PAGE)[1]) * 16 - 32
    assert figure.get_tightbbox().width * PIXELS_PER_INCH <= width  # of a page
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        if re.search(r"^bits|\(bits\)|^level", axis.get_label_text()):
            ticks = list(axis.get_ticklocs())
            assert ticks == [round(tick) for tick in ticks] != []  # bits are whole
    description = figure.description()
    assert len(description) > 20
    assert "\n" not in description


def test_text_colors_match_marker_hues():
    """Require contrast of texts, and differences of lightness, which colour-blind readers see."""
    profiles, static = style.PROFILE_COLORS, style.COLORS["static"]
    assert style.TEXT.keys() == style.COLORS.keys()
    assert style.PROFILE_TEXT.keys() == profiles.keys()
    assert profiles.keys() == quality_cost.PROFILE_NAMES.keys()
    words = (*style.TEXT.values(), *style.PROFILE_TEXT.values(), style.MUTED_COLOR)
    assert all(contrast(color, "white") >= 4.5 for color in words)
    squares = quality_cost.STATIC_COLORS  # with bits in white
    assert all(contrast("white", color) >= 4.5 for color in squares)
    assert len({*profiles.values(), static}) == 6
    assert min(map(luminance, profiles.values())) > 5 * luminance(static)


def test_caption_lies_below_legend():
    with style.subplots(figsize=(4, 3)) as (figure, ((ax,),)):
        ax.set_xlabel("steps")
        for i in range(9):
            ax.plot([0, 1], [0, i], label=f"a rather long name of line {i}")
        style.legend_below(figure, ax)
        style.write_caption(
            figure,
            "so many words of a caption that one line of the figure does not hold them all",
        )
    figure.draw_without_rendering()
    (legend,), (caption,) = figure.legends, figure.texts
    box = legend.get_window_extent()
    assert figure.get_figheight() > 3
    assert caption.get_window_extent().y0 >= 0
    assert caption.get_window_extent().y1 <= box.y0
    assert box.y1 <= ax.get_tightbbox().y0  # of labels and ticks
    assert box.x0 >= 0
    assert "\n" in caption.get_text()


def test_report_themes_have_readable_contrast():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", part)) for part in THEMES)
    named = ("text", "link", "bad", "quiet")
    assert set(re.findall(r"\bcolor: ([^;]+);", PAGE)) == {
        f"var(--{name})" for name in named
    }
    for theme in (light, light | dark):
        assert all(contrast(theme[name], theme["page"]) >= 4.5 for name in named)
    assert contrast(dark["page"], light["page"]) > 10


@pytest.mark.parametrize("name", [r"$\frac$", "a$b", "{$}_^%&#~$"])
def test_figure_disables_math_in_user_names(name):
    figure = quality_cost.figure_3(digits().assign(title=f"own images ({name})"))
    tested = precision_range(f"own ({name})").figure()
    for drawing in (figure, tested):
        drawing.canvas.draw()
    (caption,) = (text for text in figure.texts if "own images" in text.get_text())
    assert not caption.get_parse_math()
    assert f"own images ({name})" in caption.get_text()
    title = tested.get_suptitle()
    assert not is_math_text(title) or not tested._suptitle.get_parse_math()
