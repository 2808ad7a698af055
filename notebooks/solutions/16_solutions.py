"""Solutions of the exercises of 16_a_graph_convolution_at_few_bits.ipynb: one way of many."""

import cpt_core as cpt
from cpt_lessons import exercises


# 1. Every node rounds its own features before it sends them, so each row has its own range. The sum itself is not
#    rounded again: its error is the sum of the errors of its terms.
def q_agg(messages, bits):
    """Return the sum over neighbours as Q-Agg computes it."""
    return cpt.quantize(messages, bits, "graph_aggregation").sum(0)


# 2. messages = torch.randn(16, 4096)
#    error = cpt.quantize(messages, 4, "graph_aggregation") - messages
#    error.mean(0).norm() / error[0].norm() is about 0.22. Errors of opposite sign cancel, so the mean of 16 independent
#    errors is about a quarter of one.

# 3. Compare the change of the mean with the standard deviation of five seeds: a smaller change may be chance.

exercises.check("16.1", q_agg)
