"""Which products switch to more bits, shortly before the learning rate falls: H10."""
