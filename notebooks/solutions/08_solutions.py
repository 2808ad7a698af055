"""Solutions of the exercises of 08_choosing_a_schedule.ipynb: one way of many."""

from cpt_lessons import exercises


# 1. Static 8 has the highest cost; everything whose accuracy is close enough to it qualifies.
def cheapest(trainings, margin):
    """Return the lowest cost whose accuracy is within the margin of static 8."""
    _, full = max(trainings)
    return min(cost for cost, accuracy in trainings if accuracy >= full - margin)


# 2 has its answer below it in the notebook.

exercises.check("08.1", cheapest)
