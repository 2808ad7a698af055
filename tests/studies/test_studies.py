"""A study is a folder that names itself; the rest of the laboratory opens it by its name."""

from cpt_lab.analysis import preregistered
from cpt_lab.analysis.runs import table
from cpt_lab.experiments import grids
from cpt_lab.paths import ROOT


def test_every_folder_is_a_study_and_its_grids_are_known():
    folders = {p.parent.name for p in (ROOT / "cpt_lab" / "studies").glob("*/__init__.py")}
    assert folders == set(grids.STUDIES)
    named = [name for study in grids.studies("arms") for name in study.GRIDS]
    assert len(named) == len(set(named))
    assert set(named) == {name for name in grids.QUESTIONS if not name.startswith("execution/")}


def test_every_study_answers_before_anything_ran():
    found = preregistered.all_answers(table([]))
    assert [a.question for a in found] == "H1 H2 H3 H4a H4b H5 H6a H6b H6c H7a H7b H7c H8a H8b".split()
    assert all(a.word.startswith("open: ") and not a.primary for a in found)
    assert {a.word for a in found if a.question == "H6a"} == {"open: 0 of 744 runs"}
    for study in grids.studies("outcome"):
        assert not list(study.sections(table([])))
