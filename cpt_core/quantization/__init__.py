"""Quantised training of any model: quantisers, layers, conversion in place, scheduler.  Paper: figure 1."""
