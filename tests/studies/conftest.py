"""Fixtures of the tests of studies."""

from dataclasses import replace
from functools import cache

import pytest

from cpt_lab.studies import tuned
from cpt_lab.studies.h7 import arms
from tests.studies.study_rows import rate_lines


@pytest.fixture(scope="module")
def rated(tmp_path_factory):
    """Return a function that gives a study six seeds and the rows that select its settings."""
    folder = tmp_path_factory.mktemp("rates")
    with pytest.MonkeyPatch.context() as patch:

        def write(study, qualities):
            for case, c in study.cases.items():
                patch.setitem(study.cases, case, replace(c, seeds=6))
            (folder / study.file).write_text("".join(rate_lines(study, qualities)))
            return folder / study.file

        patch.setattr(tuned, "results_dir", lambda: folder)
        patch.setattr(
            arms, "min_noise_schedule", cache(arms.min_noise_schedule)
        )  # solved once: the schedules stay the same
        tuned.held_out.cache_clear()
        yield write
    tuned.held_out.cache_clear()
