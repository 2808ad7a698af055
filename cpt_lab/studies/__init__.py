"""Questions of our own, asked before their runs (``docs/preregistration.md``): a folder each, imported by nobody.

A study is opened by its name in ``experiments.grids.STUDIES``. ``arms`` has ``GRIDS``, its runs. ``outcome`` has
``answers(runs)`` for lists and docs/reproducing, ``sections(runs)`` for the report.
"""
