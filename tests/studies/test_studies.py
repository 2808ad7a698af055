"""Study folders: found by their names, with preregistered grids and stored rows."""

import re
import subprocess
from functools import cache

import pandas as pd
import pytest

from cpt_lab.analysis import preregistered
from cpt_lab.analysis.run_table import load, table
from cpt_lab.experiments import grids
from cpt_lab.paths import ROOT, results_dir
from cpt_lab.studies.h7.arms import STUDY as H7
from cpt_lab.studies.h10.arms import STUDY as H10

DOCUMENT = (ROOT / "docs/preregistration.md").read_text("utf-8")
ASKED = [name for study in grids.studies("arms") for name in study.GRIDS]


def test_study_folders_have_known_grids():
    folders = {
        p.parent.name for p in (ROOT / "cpt_lab" / "studies").glob("*/__init__.py")
    }
    assert folders == set(grids.STUDIES)
    assert len(ASKED) == len(set(ASKED))
    assert set(ASKED) == {
        name for name in grids.QUESTIONS if not name.startswith("execution/")
    }


@cache
def stored(name):
    return load(results_dir() / f"{name.replace('-', '_')}.jsonl", every_rate=True)


@pytest.mark.parametrize(
    "study", sorted({name.split("/")[0] for name in grids.QUESTIONS})
)
def test_study_runs_equal_stored_runs(study):
    """Compare key by key: schedules, recipes and seeds as preregistered."""
    asked = {
        name: grids.grid_specs(name)
        for name in grids.QUESTIONS
        if name.split("/")[0] == study
    }
    assert sorted(s.key for specs in asked.values() for s in specs) == sorted(
        stored(study)["key"]
    )
    for name, specs in asked.items():
        assert grids.find_grids(study)[name].artefact == study
        if name in ASKED and "-rates/" not in name:
            told = re.findall(
                rf"run {name} +# (\d+) runs| {name} +(\d+) runs", DOCUMENT
            )
            assert ["".join(count) for count in told] == [str(len(specs))]


@pytest.mark.parametrize("study", [H7, H10], ids=lambda study: study.name)
def test_study_rates_are_chosen_on_separate_runs(study):
    assert (
        f"{len(stored(f'{study.name}-rates'))} runs that choose learning rates"
        in DOCUMENT
    )
    assert not set(stored(study.name)["seed"]) & set(
        stored(f"{study.name}-rates")["seed"]
    )


def started(store):
    """Return the start times of the runs of a committed store."""
    return pd.to_datetime(stored(store)["started"], utc=True, format="ISO8601")


@pytest.mark.parametrize(
    "store", ["h1", "h2", "h3", "h4", "h5", "h6", "h7", "h7_rates", "h10", "h10_rates"]
)
def test_study_preregistration_is_older_than_its_rows(store):
    """Require the document before its rows, and chosen learning rates before the test runs."""
    begun = started(store)
    if store in (H7.name, H10.name):
        of = [stored(name)["dataset"] for name in (store, f"{store}_rates")]
        assert (
            begun.groupby(of[0]).min() > started(f"{store}_rates").groupby(of[1]).max()
        ).all()
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True
    )
    if (
        shallow.stdout.strip() != "false"
    ):  # the first commit there looks as if it had written everything
        pytest.skip("no whole history here")
    places = ["PREREGISTRATION.md", "docs/preregistration.md"]
    heading = f"-S## {store.partition('_')[0].upper()} "
    told = subprocess.run(
        [*git, "log", "-m", heading, "--format=%ct", "--", *places],
        capture_output=True,
        text=True,
    )
    assert begun.min() > pd.Timestamp(int(told.stdout.split()[-1]), unit="s", tz="UTC")


def test_study_answers_are_inconclusive_without_runs():
    found = preregistered.all_answers(table([]))
    assert [
        a.question for a in found
    ] == "H1 H2 H3 H4a H4b H5 H6a H6b H6c H7a H7b H7c H8a H8b H10a H10b H10c".split()
    assert all(a.outcome.startswith("open: ") and not a.primary for a in found)
    assert {a.outcome for a in found if a.question == "H6a"} == {"open: 0 of 744 runs"}
    for study in grids.studies("outcome"):
        assert not list(study.sections(table([])))
