"""Style debt of ruff.toml: only existing violations are listed."""

from bench.style_debt import find_violations, format_debt, listed_debt, split_config


def test_style_debt_lists_only_violations():
    """If this fails, run `python -m bench.style_debt`."""
    assert sorted(listed_debt() - find_violations()) == []


def test_style_debt_is_sorted():
    assert split_config()[1] == format_debt(listed_debt())
