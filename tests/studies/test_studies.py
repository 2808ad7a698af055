"""A study is a folder that names itself; the rest of the laboratory opens it by its name."""

import re
import subprocess

import pandas as pd
import pytest

from cpt_lab.analysis import preregistered
from cpt_lab.analysis.runs import load, table
from cpt_lab.experiments import grids
from cpt_lab.paths import ROOT, results_dir
from cpt_lab.studies.h7.arms import STUDY as H7
from cpt_lab.studies.h10.arms import STUDY as H10

DOCUMENT = (ROOT / "docs/preregistration.md").read_text("utf-8")
ASKED = [name for study in grids.studies("arms") for name in study.GRIDS]


def test_every_folder_is_a_study_and_its_grids_are_known():
    folders = {p.parent.name for p in (ROOT / "cpt_lab" / "studies").glob("*/__init__.py")}
    assert folders == set(grids.STUDIES)
    assert len(ASKED) == len(set(ASKED))
    assert set(ASKED) == {name for name in grids.QUESTIONS if not name.startswith("execution/")}


@pytest.mark.parametrize("name", [name for name in ASKED if "-rates/" not in name])
def test_a_question_has_the_runs_and_the_seeds_that_the_document_names(name):
    specs = grids.grid_specs(name)
    assert len({s.key for s in specs}) == len(specs)
    assert re.findall(rf"run {name} +# (\d+) runs| {name} +(\d+) runs", DOCUMENT) in (
        [(str(len(specs)), "")], [("", str(len(specs)))]
    )  # fmt: skip
    seeds, first = {s.seed for s in specs}, {"h7": 300, "h10": 400}.get(name.split("/")[0], 100)
    assert seeds == set(range(first, first + len(seeds)))
    runs = pd.DataFrame([(s.arm, s.recipe, s.seed) for s in specs], columns=["arm", "recipe", "seed"])
    assert all(set(part["seed"]) == seeds for _, part in runs.groupby(["arm", "recipe"], sort=False))
    assert grids.find_grids(name.split("/")[0])[name].artefact == name.split("/")[0]


@pytest.mark.parametrize("study", [H7, H10], ids=lambda study: study.name)
def test_rates_are_chosen_on_runs_of_their_own(study):
    rates = [s for name in ASKED if name.startswith(f"{study.name}-rates/") for s in grids.grid_specs(name)]
    assert f"{len(rates)} runs that choose learning rates" in DOCUMENT
    assert {s.seed for s in rates} == set(study.tuning)
    assert not set(study.tuning) & {study.first + i for case in study.cases.values() for i in range(case.seeds)}


def started(store):
    """When the runs of a committed store were."""
    return pd.to_datetime(load(results_dir() / store, every_rate=True)["started"], utc=True, format="ISO8601")


@pytest.mark.parametrize("store", ["h1", "h2", "h3", "h4", "h5", "h6", "h7", "h7_rates", "h10", "h10_rates"])
def test_the_document_is_older_than_its_rows_and_the_rates_than_their_test(store):
    begun = started(f"{store}.jsonl")
    for study in (H7, H10):
        if store == study.name:
            assert begun.min() > started(study.file).max()
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":  # the first commit there looks as if it had written everything
        pytest.skip("no whole history here")
    places = ["PREREGISTRATION.md", "docs/preregistration.md"]
    heading = f"-S## {store.partition('_')[0].upper()} "
    told = subprocess.run([*git, "log", "-m", heading, "--format=%ct", "--", *places], capture_output=True, text=True)
    assert begun.min() > pd.Timestamp(int(told.stdout.split()[-1]), unit="s", tz="UTC")


def test_every_study_answers_before_anything_ran():
    found = preregistered.all_answers(table([]))
    assert [a.question for a in found] == "H1 H2 H3 H4a H4b H5 H6a H6b H6c H7a H7b H7c H8a H8b H10a H10b H10c".split()
    assert all(a.word.startswith("open: ") and not a.primary for a in found)
    assert {a.word for a in found if a.question == "H6a"} == {"open: 0 of 744 runs"}
    for study in grids.studies("outcome"):
        assert not list(study.sections(table([])))
