"""Solutions of the exercises of 07_critical_periods.ipynb: one way of many."""

from cpt_lessons import exercises


# 1. The deficit comes before the normal training, whose decay counts from its own first step.
def decay_steps(deficit, normal):
    """Return the steps at which the learning rate is divided by ten."""
    return [deficit + normal / 2, deficit + 3 * normal / 4]


# 2 and 3 have their answers below them in the notebook.

exercises.check("07.1", decay_steps)
