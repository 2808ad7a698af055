"""One training run: set-up, loop, evaluation, checkpoint; and the precision range test.  Paper: section 4."""
