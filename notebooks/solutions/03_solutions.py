"""Solutions of the exercises of 03_image_classification.ipynb: one way of many."""

import math
from itertools import pairwise

from cpt_lessons import exercises


# 1. Over log2 of the cost, a step of 1 is a doubling. The least-squares slope is the covariance over the variance.
def slope(costs, accuracies):
    """Return the points of accuracy per doubling of the cost."""
    x = [math.log2(cost) for cost in costs]
    mean_x, mean_y = sum(x) / len(x), sum(accuracies) / len(x)
    covariance = sum(
        (a - mean_x) * (b - mean_y) for a, b in zip(x, accuracies, strict=True)
    )
    return covariance / sum((a - mean_x) ** 2 for a in x)


# 2. The line joins the two static trainings next to the cost, so they are sorted by cost first.
def gain(cost, accuracy, static):
    """Return the accuracy gained over static precision of equal cost."""
    points = sorted(static)
    for (c0, a0), (c1, a1) in pairwise(points):
        if c0 <= cost <= c1:
            return accuracy - (a0 + (a1 - a0) * (cost - c0) / (c1 - c0))
    raise ValueError(f"no static precision costs less, or none more, than {cost}")


# 3 has its answer below it in the notebook.

exercises.check("03.1", slope)
exercises.check("03.2", gain)
