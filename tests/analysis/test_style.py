"""Figures with names of the user's own."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.cbook import is_math_text

from cpt_core.analysis import quality_cost
from cpt_core.analysis.predictors import predictors_figure
from cpt_core.analysis.runs import committed
from cpt_core.teaching.pictures import pictures_with_boxes
from cpt_core.training.precision_range import PrecisionRange


@pytest.mark.parametrize("name", [r"$\frac$", "a$b", r"\$\frac$", "{$}_^%&#~$"])
def test_names_of_the_users_are_no_formulas(name):
    runs = committed("image_digits").query("model == 'mlp6' and q_min == 3").assign(title=f"own images ({name})")
    drawn = quality_cost.figure_3(runs, xs=("relative_cost",))
    boxes = pictures_with_boxes([np.zeros((8, 8, 3), np.uint8)], {"boxes": [[((1, 1, 5, 5), name)]]})
    tested = PrecisionRange(2, "", "", (2, 8), (1.0,), ((0.5, 0.5),), ((1.0, 1.0),), "reset", 0.8, 9, f"own ({name})")
    strengths = pd.DataFrame([("relative_cost", 0.5, 0.4, 0.6)], columns=["predictor", "strength", "low", "high"])
    compared = predictors_figure({f"own images ({name})": strengths})
    for figure in (drawn, boxes, tested.figure(), compared):
        figure.canvas.draw()
    assert not is_math_text(drawn.get_suptitle())
    assert f"own images ({name})".replace("$", r"\$") in drawn.get_suptitle()
