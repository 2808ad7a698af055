"""H1 to H4: schedules of one cost, static precision of equal cost, dates of deficits, gradients and hubs."""
