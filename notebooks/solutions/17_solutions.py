"""Solutions of the exercises of 17_an_lstm_at_few_bits.ipynb: one way of many."""

import math

from cpt_lab.analysis import quality_cost, run_table
from cpt_lessons import exercises


# 1. Perplexity is the exponential of the mean loss: n, if all words had the probability 1 / n.
def perplexity(probabilities):
    """Return the perplexity of a text."""
    return math.exp(-sum(math.log(p) for p in probabilities) / len(probabilities))


# 2. Each of the four gates has a matrix for the input and one for the hidden state. For 800 and 800 these are
#    5,120,000 multiplications.
def products(inputs, units):
    """Return the multiplications of an LSTM for a word."""
    return 4 * units * (inputs + units)


# 3. Differences are taken seed by seed, so the common effect of a seed cancels. With three seeds the interval is wide.
eight = run_table.committed("language_pydoc").query("q_max == 8")
worse = quality_cost.paired_difference(eight, "static 4", "static 8", metric="loss")

exercises.check("17.1", perplexity)
