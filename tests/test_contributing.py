"""CONTRIBUTING.md: the files, names and commands that it mentions exist; `make lint` checks it with all other texts."""

from bench.lint.pages import check_contributing
from bench.lint.repository import Repository


def test_contributing_mentions_existing_names():
    assert list(check_contributing(Repository())) == []
