"""Checks of models and functions of other libraries: ``python -m bench.third_party``, about 8 minutes.

- databases.py: every layer of torch's own ``module_db`` and every function of its ``op_db``.
- invariances.py, foreign_models.py: outputs that do not change in float32 must not change at 4 and 8 bits.
- suites.py: tests of transformers, run on converted models.

Each part returns rows, plain dictionaries with an ``outcome``. The counts are stored in data/results/third_party.json,
from which the site makes its page.
"""
