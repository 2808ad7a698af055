"""Graphs, sums over neighbours, graph convolutions in float32, sampled neighbourhoods.  Paper: section 4.3."""
