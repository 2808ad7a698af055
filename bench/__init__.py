"""Benchmarks and checks of this project."""

PACKAGES = ("cpt_core", "cpt_extras", "cpt_lab", "cpt_lessons")  # of this project
