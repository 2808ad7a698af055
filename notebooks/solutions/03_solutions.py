"""Solutions of the exercises of 03_image_classification.ipynb: one way of many."""

from cpt_lab.analysis.runs import committed
from cpt_lessons import exercises

# 1. If quality does not suffer at q_min, the cheapest.
group = "large"

# 2. (5^2 + 2 * 5 * 8) / 192 = 0.547; 6 bits cost 0.688.
largest = 5


# 3. Nobody who costs no more is better.
def front(runs):
    """Return for every (cost, accuracy) whether no other run costs no more and is more accurate."""
    return [not any(c <= cost and a > accuracy for c, a in runs) for cost, accuracy in runs]


# 4. Rows of the notebook's section 3.
network = committed("image_digits").query("model == 'mlp6' and q_min == 3")
means = 100 * network.groupby("arm").accuracy.mean()
below = means["static 8"] - means["RR"]


# 6. What a seed brings to both of them cancels, so a seed that only one has must not count.
def paired(a, b):
    """Return the mean difference over the seeds of both."""
    both = a.keys() & b.keys()
    return sum(a[seed] - b[seed] for seed in both) / len(both)


exercises.check("03.1", group)
exercises.check("03.2", largest)
exercises.check("03.3", front)
exercises.check("03.4", below)
exercises.check("03.6", paired)
