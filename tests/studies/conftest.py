"""Fixtures of the tests of studies."""

from dataclasses import replace
from functools import cache

import pytest

from cpt_lab.studies import tuned
from cpt_lab.studies.h7 import arms
from tests.studies.study_rows import rate_lines

SOLVED = cache(arms.min_noise_schedule)  # the schedules stay the same


@pytest.fixture
def rated(tmp_path, monkeypatch):
    """Return a function that gives a study six seeds and the rows that select its settings."""

    def write(study, qualities):
        for case, c in study.cases.items():
            monkeypatch.setitem(study.cases, case, replace(c, seeds=6))
        (tmp_path / study.file).write_text("".join(rate_lines(study, qualities)))
        return tmp_path / study.file

    monkeypatch.setattr(tuned, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(arms, "min_noise_schedule", SOLVED)
    return write
