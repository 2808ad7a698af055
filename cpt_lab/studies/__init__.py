"""Preregistered questions of this project (``docs/preregistration.md``), one package each.

``experiments.grids.STUDIES`` lists the packages by name. In each, ``arms`` defines the runs (``GRIDS``) and ``outcome``
the answers: ``answers(runs)`` for lists and docs/reproducing, ``sections(runs)`` for the report.
"""
