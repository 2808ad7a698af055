"""Preregistered questions of this project (``docs/preregistration.md``), one package each.

``experiments.grids.STUDIES`` lists the packages by name. In each, ``arms`` defines the runs (``GRIDS``) and ``outcome``
the answers: ``answers(runs)`` for lists and docs/reproducing, ``sections(runs)`` for the report. H7 and H10 also have
``EXTENDED_GRIDS``: the same arms at learning rates that were tuned further after the answers were known.
"""
