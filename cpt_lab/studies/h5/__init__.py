"""Bits where they matter, by measured sensitivities, against static precision of equal cost: H5."""
