"""Graphs, sums over neighbours and graph convolutions in float32.  Paper: section 4.3."""
