"""``python -m cpt_lab`` is ``cpt``."""

from cpt_lab import main

main()
