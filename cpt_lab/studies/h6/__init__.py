"""H6: the paper's schedules on ladders of other number formats."""
