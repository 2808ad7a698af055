"""H10: matmuls that switch to more bits shortly before the learning rate falls."""
