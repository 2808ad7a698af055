"""Experiments of the paper: data sets, recipes and metric of every task, designs, grids.  Needs no torch."""
