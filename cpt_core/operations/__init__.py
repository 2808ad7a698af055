"""Handlers of functions of torch that few models use."""
