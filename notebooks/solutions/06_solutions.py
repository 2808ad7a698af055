"""Solutions of the exercises of 06_language.ipynb: one way of many."""

from cpt_lessons import exercises


# 1. The forward matmul has q by q bits, the two backward matmuls have q by q_max bits.
def training_bitops(macs, bits, q_max):
    """Return the bit operations of a training, in units of a multiplication of 32 by 32 bits."""
    return macs * sum(q * q + 2 * q * q_max for q in bits) / 32**2


# 2 and 3 have their answers below them in the notebook.

exercises.check("06.1", training_bitops)
