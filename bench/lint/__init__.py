"""Rules of the repository that no general linter knows: imports, pages, notebooks and installation files.

A check is a function that takes a `Repository` and yields a `Problem` for every place that breaks its rule. `make lint`
runs all of them after ruff and mypy, prints `file:line: problem` for each, and fails if there is any:

    python -m bench.lint              all checks
    python -m bench.lint links        those whose name contains a word

The checks read texts only: they run no cell and train nothing. `tests/test_lint.py` plants a fault for each of them,
in memory, and expects the check to report it. Rules that ruff has (in ruff.toml) are not repeated here.
"""
