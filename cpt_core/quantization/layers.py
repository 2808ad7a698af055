"""Names that layers of all kinds share."""

PASSES = ("forward", "error", "weight")  # y = x w;  dx = dy w;  dw = x dy
ONE_RANGE = ("per_tensor", "per_sample_mean")  # grids with one range for a whole tensor
