"""What the paper runs: data sets, settings and metric of every task, designs of experiments, grids.  No torch."""
