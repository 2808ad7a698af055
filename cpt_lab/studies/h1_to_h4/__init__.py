"""Schedules of one cost, static precision at equal cost, dates of deficits, gradients, hubs: H1 to H4."""
