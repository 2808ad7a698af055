"""Proof over models and functions that were written elsewhere: ``python -m bench.third_party``, about 8 minutes.

- modules.py: every layer of torch's own ``module_db``.
- functions.py: every function of torch's own ``op_db``.
- invariances.py, foreign_models.py: what does not move in float32 must not move at 4 and 8 bits.
- suites.py: tests of transformers and timm, run on converted models.

Each part returns rows, plain dictionaries with an ``outcome``. The counts are stored in data/results/third_party.json,
from which the site makes its page.
"""
