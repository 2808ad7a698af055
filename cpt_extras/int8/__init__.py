"""Products on codes of 8 bits: the same grids and schedules as simulated, in integers where that is exact."""
