"""Solutions of the exercises of 17_an_lstm_at_few_bits.ipynb: one way of many."""

import math

from cpt_lab.analysis import quality_cost, run_table
from cpt_lessons import exercises


# 1. The exponential undoes the logarithm of the mean loss: where all words had the probability 1 / n, it gives n.
def perplexity(probabilities):
    """Return the perplexity of a text."""
    return math.exp(-sum(math.log(p) for p in probabilities) / len(probabilities))


# 2. Each of the four gates multiplies the input and the hidden state with a matrix of its own. For 800 and 800 these
#    are 5,120,000.
def products(inputs, units):
    """Return the multiplications of an LSTM for a word."""
    return 4 * units * (inputs + units)


# 3. The difference is taken seed by seed, so that what a seed brings to both of them cancels. Three seeds leave the
#    interval wide.
eight = run_table.committed("language_pydoc").query("q_max == 8")
worse = quality_cost.paired_difference(eight, "static 4", "static 8", metric="loss")

exercises.check("17.1", perplexity)
