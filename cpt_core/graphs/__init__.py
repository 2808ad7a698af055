"""Graphs, sums over neighbours and graph convolutions in plain torch.  Paper: section 4.3.

The problem: the paper trains a GCN and a GraphSAGE with the sum over neighbours in float32 (FP-Agg) or quantised
(Q-Agg), on graphs of up to 124 million edges.

A layer computes H' = A (H W) + b, or (A H) W + b if that has fewer features to sum: A is the adjacency matrix, scaled
by degrees, and H are the features of the nodes. Quantisation rounds H and W, in Q-Agg also the operand of the sum.

The design:

- graph.py: a ``Graph`` holds edges sorted by destination, and their transpose for the backward pass.
- csr.py: the sum over in-neighbours as one operator, a matmul with a sparse matrix of ones.
- functional.py: ``project``, ``neighbour_sum`` and ``scale_and_add_bias``, of which a graph convolution is composed. A
  function mode can intercept them, which is how ``quantization.graph_handlers`` quantises them.
- layers.py: ``GraphConv`` and ``SAGEConv``, with the parameter names of DGL's layers.

The trade-offs: the layers run without DGL and take its graphs and those of PyTorch Geometric, but have no edge weights
and no attention over edges. Sums of features that never change (``Graph.set_constant``) are computed once and not at
every step.
"""
