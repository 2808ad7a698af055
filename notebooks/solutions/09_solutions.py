"""Solutions of the exercises of 09_comparing_two_trainings.ipynb: one way of many."""

from cpt_lessons import exercises


# 1. The common effect of a seed cancels in the difference. A seed that only one training has does not cancel, so leave
#    it out.
def paired(a, b):
    """Return the mean difference over the seeds of both."""
    common_seeds = a.keys() & b.keys()
    return sum(a[seed] - b[seed] for seed in common_seeds) / len(common_seeds)


# 2. The more accurate of two trainings of one cost beats the other, and so does the cheaper of two of one accuracy.
#    Trainings that are alike in both do not beat each other, so no training beats itself.
def front(trainings):
    """Return for every (cost, accuracy) whether no other training beats it."""

    def is_beaten(cost, accuracy):
        return any(
            (c < cost and a >= accuracy) or (c <= cost and a > accuracy)
            for c, a in trainings
        )

    return [not is_beaten(cost, accuracy) for cost, accuracy in trainings]


# 3 and 4 have their answers below them in the notebook.

exercises.check("09.1", paired)
exercises.check("09.2", front)
