"""H12: whether the date of a deficit matters, by the decay of the learning rate."""
