"""Experiments of the paper and of this project: what is trained, how it is run, and what the results show.

An experiment passes through six subpackages, each of which imports only those before it:

- ``experiments``: data sets, recipes and grids as plain data; a ``RunSpec`` describes one training run completely.
- ``data``: loading and checking of data sets, with a report of what was read, left out or changed.
- ``tasks``: model, loss and evaluation of image classification, graphs, language, entailment and detection.
- ``training``: one run from its spec to its metrics, with checkpoints that continue bit for bit.
- ``sweeps``: many runs in parallel processes, and the stores of their result rows.
- ``analysis``: tables, figures and tests of the paper's claims, from result rows alone.

``studies`` holds this project's own questions, with the rules that were fixed before their runs. The key of a run is
the hash of its spec: two machines that train the same run write rows with one key, and nothing is trained twice.
``commands`` is the command line, ``cpt``; run ``cpt doctor`` to see what this machine can do.
"""

import cpt_lab.former_names  # noqa: F401 - the former module names go on importing


def main() -> None:
    """Run a command of ``cpt``, or say which extra it needs."""
    import sys

    from cpt_extras.optional_libraries import explain_missing_extra

    try:
        with explain_missing_extra("lab"):
            from cpt_lab.commands import main as run
    except ImportError as missing:
        sys.exit(f"error: {missing}")
    run()
