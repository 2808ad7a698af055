"""Solutions of the exercises of 04_object_detection.ipynb: one way of many."""

from statistics import stdev

from cpt_lessons import exercises

T = {2: 12.706, 3: 4.303, 4: 3.182}


# 1. stdev divides by n - 1.
def half_width(differences):
    """Return half the width of the 95 % interval of a mean difference."""
    n = len(differences)
    return T[n] * stdev(differences) / n**0.5


# 2 and 3 have their answers below them in the notebook.

exercises.check("04.1", half_width)
