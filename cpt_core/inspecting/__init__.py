"""Look at a model and its training: which products ran quantised, what rounding did, what a step took."""
