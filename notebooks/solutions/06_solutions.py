"""Solutions of the exercises of 06_language.ipynb: one way of many."""

import math

from cpt_lab.analysis import quality_cost
from cpt_lab.analysis.runs import committed
from cpt_lessons import exercises

# 1. The sum in the line of 2 bits is 0.937.
missing = 1 - 0.937


# 2. Four gates, each with a matrix for the input and one for the hidden state: 5,120,000 for 800 and 800.
def products(inputs, units):
    """Return the multiplications of an LSTM for a word."""
    return 4 * units * (inputs + units)


# 3. As many as there are words.
knows_nothing = 10_000


# 4. The exponential of the mean cross entropy.
def perplexity(probabilities):
    """Return the perplexity of a text."""
    return math.exp(-sum(math.log(p) for p in probabilities) / len(probabilities))


# 5. The difference of the two arms for every seed that both have, then the mean.
eight = committed("language_pydoc").query("q_max == 8")
worse = quality_cost.paired_difference(eight, "RR", "static 3", metric="loss").mean()


# 6. Every token with every token, twice: four times as much for a text of twice the length.
def attention(tokens, width):
    """Return the multiplications of the two products of attention."""
    return 2 * tokens**2 * width


exercises.check("06.1", missing)
exercises.check("06.2", products)
exercises.check("06.3", knows_nothing)
exercises.check("06.4", perplexity)
exercises.check("06.5", worse)
exercises.check("06.6", attention)
