"""Training of one run: set-up, loop, evaluation, checkpoints, and the precision range test.  Paper: section 4."""
