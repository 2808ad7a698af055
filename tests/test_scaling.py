"""Work of public functions: linear in the input, counted rather than timed."""

import warnings

import pytest

from bench.scaling import CASES, CONSTANT, MAX_RATIO, make_call
from bench.work import Work, count_work, ratios
from book.public_names import reference

COVERED = {name for case in CASES.values() for name in case.covers.split()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.weekly
def test_work_grows_at_most_linearly(name, tmp_path):
    case = CASES[name]
    with warnings.catch_warnings(action="ignore"):
        make_call(case, case.n, tmp_path / "first")()  # imports, caches, kernels
        work = [count_work(make_call(case, n, tmp_path)) for n in (case.n, 4 * case.n)]
    found = ratios(*work)
    assert {kind: ratio for kind, ratio in found.items() if ratio > MAX_RATIO} == {}, (
        work
    )


def test_scaling_cases_cover_every_public_name():
    """Add a new function to ``CASES``, or to ``CONSTANT`` with the reason."""
    assert COVERED | CONSTANT.keys() == set(reference("cpt_core"))
    assert COVERED & CONSTANT.keys() == set()
    assert all(CONSTANT.values())


def squares(n):
    return sum(1 for i in range(n) for j in range(n))


@pytest.mark.slow
def test_count_work_finds_loops_memory_and_files(tmp_path):
    """Find quadratic loops in one line, quadratic memory, and a file reread for every entry."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(20_000))
    quadratic = {
        "lines": squares,
        "memory": lambda n: bytearray(n * n * 40),
        "bytes_read": lambda n: [
            path.read_bytes()[: n * n] for _ in range(n * n // 1000)
        ],
    }
    for kind, call in quadratic.items():
        small, large = (count_work(lambda n=n, call=call: call(n)) for n in (100, 400))
        assert ratios(small, large)[kind] > 14


@pytest.mark.slow
def test_count_work_is_deterministic():
    assert count_work(lambda: squares(50))[:2] == count_work(lambda: squares(50))[:2]


def test_ratios_omit_negligible_growth():
    assert ratios(Work(10, 0, 0, 0), Work(200, 0, 0, 0)) == {}
    assert ratios(Work(1000, 0, 0, 0), Work(7000, 0, 0, 0)) == {"lines": 7.0}
