"""Graphs, sums over neighbours and graph convolutions in plain torch.  Paper: section 4.3.

The problem: the paper trains a GCN and a GraphSAGE with the sum over neighbours in float32 (FP-Agg) or quantised
(Q-Agg), on graphs of up to 124 million edges.

The design: a ``Graph`` (graph.py) holds edges sorted by destination, and their transpose for the backward pass; csr.py
sums over them. functional.py has the three functions that a graph convolution is made of: ``project``,
``neighbour_sum``, ``scale_and_add_bias``. A function mode sees them, so that ``quantization.graph_handlers`` can
quantise them; layers.py builds ``GraphConv`` and ``SAGEConv`` from them.

The trade-offs: features that never change (``Graph.set_constant``) are summed once and not at every step; edge weights
and attention over edges are left to other libraries.
"""
