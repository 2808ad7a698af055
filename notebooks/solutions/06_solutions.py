"""Solutions of the exercises of 06_language.ipynb: one way of many."""

import math

from cpt_core.teaching import exercises

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


exercises.check("06.1", missing)
exercises.check("06.2", products)
exercises.check("06.3", knows_nothing)
exercises.check("06.4", perplexity)
