"""Study folders, their grids and stored rows, arms of H1 and H5, and prices of arms."""

import json
import re
import subprocess
from functools import cache

import numpy as np
import pandas as pd
import pytest
from helpers import refused

from bench import sensitivities
from cpt_lab.analysis import preregistered
from cpt_lab.analysis.estimates import Estimate
from cpt_lab.analysis.run_table import committed, load, table
from cpt_lab.experiments import grids
from cpt_lab.experiments.spec import NotMeasuredError
from cpt_lab.paths import ROOT, results_dir
from cpt_lab.studies import prices
from cpt_lab.studies.h5 import arms as h5_arms
from cpt_lab.studies.h5.arms import CASES, allocated, stored_sensitivity
from cpt_lab.studies.h7.arms import EXTENDED_STUDY as EXTENDED_H7
from cpt_lab.studies.h7.arms import STUDY as H7
from cpt_lab.studies.h10.arms import EXTENDED_STUDY as EXTENDED_H10
from cpt_lab.studies.h10.arms import STUDY as H10
from cpt_lab.studies.h11.arms import STUDY as H11
from cpt_lab.studies.h13.arms import STUDY as H13
from tests.studies.test_outcomes import sensitivity

DOCUMENT = (ROOT / "docs/preregistration.md").read_text("utf-8")
ASKED = [name for study in grids.studies("arms") for name in study.GRIDS]
EXTENDED = [
    name
    for study in grids.studies("arms")
    for name in getattr(study, "EXTENDED_GRIDS", ())
]


def test_study_folders_have_known_grids():
    folders = {
        p.parent.name for p in (ROOT / "cpt_lab" / "studies").glob("*/__init__.py")
    }
    assert folders == set(grids.STUDIES)
    assert len(ASKED + EXTENDED) == len(set(ASKED + EXTENDED))
    assert set(ASKED + EXTENDED) == {
        name for name in grids.QUESTIONS if not name.startswith("execution/")
    }


# studies whose runs are not complete
RUNNING: set[str] = set()


def store_of(name):
    """Return the study in whose files the rows of a grid are: "h7" for "h7-extended/digits"."""
    return name.split("/")[0].replace("-extended", "")


def is_stored(name):
    return (results_dir() / f"{name.replace('-', '_')}.jsonl").exists()


def known_specs(name):
    """Return the runs of a grid; None if they depend on rows of a running study that are not stored."""
    try:
        return grids.grid_specs(name)
    except NotMeasuredError:
        assert store_of(name) in RUNNING
        return None


def test_running_studies_are_not_answered():
    """Take a study from ``RUNNING`` when its last row is stored."""
    for answer in preregistered.all_answers(committed()):
        is_running = answer.question.lower()[:3] in RUNNING
        assert answer.outcome.startswith("not finished: ") == is_running, (
            answer.question
        )


@cache
def stored(name):
    return load(results_dir() / f"{name.replace('-', '_')}.jsonl", every_rate=True)


@pytest.mark.slow
@pytest.mark.parametrize("study", sorted({store_of(name) for name in grids.QUESTIONS}))
def test_study_runs_equal_stored_runs(study):
    """Compare key by key: schedules, recipes and seeds as preregistered."""
    asked = {
        name: specs
        for name in grids.QUESTIONS
        if store_of(name) == study and (specs := known_specs(name)) is not None
    }
    keys = {s.key for specs in asked.values() for s in specs}
    stored_keys = list(stored(study)["key"]) if is_stored(study) else []
    assert len(stored_keys) == len(set(stored_keys))
    if study.partition("-")[0] in RUNNING:
        assert set(stored_keys) <= keys
    else:
        assert set(stored_keys) == keys
    for name, specs in asked.items():
        artefact = name.split("/")[0]
        assert grids.find_grids(artefact)[name].artefact == artefact
        if name in ASKED + EXTENDED and "-rates/" not in name:
            told = re.findall(
                rf"run {name} +# (\d+) runs| {name} +(\d+) runs", DOCUMENT
            )
            assert ["".join(count) for count in told] == [str(len(specs))]


def started(store):
    """Return the start times of the runs of a committed store, by key."""
    runs = stored(store).set_index("key")
    return pd.to_datetime(runs["started"], utc=True, format="ISO8601")


@pytest.mark.parametrize(
    "store",
    [
        name.replace("-", "_")
        for name in dict.fromkeys(name.split("/")[0] for name in ASKED)
        if is_stored(name)
    ],
)
def test_study_preregistration_is_older_than_its_rows(store):
    """Require the document to be older than its rows."""
    begun = started(store)
    told = committed_at(f"## {store.partition('_')[0].upper()} ")
    assert begun.min() > told


def committed_at(heading):
    """Return when a heading of the document was first committed; skip in a shallow clone."""
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True
    )
    if (
        shallow.stdout.strip() != "false"
    ):  # the first commit there looks as if it had written everything
        pytest.skip("no whole history here")
    places = ["PREREGISTRATION.md", "docs/preregistration.md"]
    told = subprocess.run(
        [*git, "log", "-m", f"-S{heading}", "--format=%ct", "--", *places],
        capture_output=True,
        text=True,
    )
    return pd.Timestamp(int(told.stdout.split()[-1]), unit="s", tz="UTC")


def starts_of(study, method, case):
    """Return the start times of the stored runs of a task: "rates" choose its learning rates, "runs" are its test."""
    store = {"rates": f"{study.name}_rates", "runs": study.name}[method]
    try:
        specs = getattr(study, method)(case)
    except NotMeasuredError:
        return pd.Series(dtype="datetime64[ns, UTC]")
    begun = started(store)
    return begun[begun.index.isin([spec.key for spec in specs])]


@pytest.mark.parametrize("study", [H7, H10, H11, H13], ids=lambda study: study.name)
def test_learning_rates_are_chosen_before_test_runs(study):
    for case in study.cases:
        rates, runs = starts_of(study, "rates", case), starts_of(study, "runs", case)
        assert len(rates)
        if runs.empty:
            assert study.name in RUNNING
        else:
            assert runs.min() > rates.max()


@pytest.mark.parametrize(
    ("study", "extended"),
    [(H7, EXTENDED_H7), (H10, EXTENDED_H10)],
    ids=["h7", "h10"],
)
def test_extended_rates_are_chosen_before_their_test_runs(study, extended):
    """Require the document before the rows at rates outside the first grids, and these before their test runs."""
    told = committed_at("## Extended learning rates of H7 and H10")
    for case in study.cases:
        rates, runs = (
            starts_of(extended, method, case).drop(
                starts_of(study, method, case).index, errors="ignore"
            )
            for method in ("rates", "runs")
        )
        assert (rates > told).all()
        if len(runs):
            assert runs.min() > rates.max()


@pytest.mark.slow
def test_study_answers_are_inconclusive_without_runs():
    found = preregistered.all_answers(table([]))
    assert [a.question for a in found] == (
        "H1 H2 H3 H4a H4b H5 H6a H6b H6c H7a H7b H7c H8a H8b H10a H10b H10c H11a H11b H12a H12b "
        "H13a H13b H13c"
    ).split()
    assert all(a.outcome.startswith("not finished: ") and not a.primary for a in found)
    assert {a.outcome for a in found if a.question == "H6a"} == {
        "not finished: 0 of 744 runs"
    }
    for study in grids.studies("outcome"):
        assert not list(study.sections(table([])))


# --- arms ------------------------------------------------------------------------------------------


def test_h5_sensitivities_command_stores_input_of_schedules(tmp_path, monkeypatch):
    """Measure with the case's recipe and bits, on unused seeds from 50 on; add a second case."""
    calls = []

    def measure(r, **given):
        calls.append((r, given["base"], list(given["seeds"])))
        return sensitivity(r.steps, given["base"])

    for module in (h5_arms, sensitivities):
        monkeypatch.setattr(module, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(sensitivities, "recipe_sensitivity", measure)
    stored_sensitivity.cache_clear()
    for case in ("facebook", "digits"):
        monkeypatch.setattr("sys.argv", ["sensitivities", "--only", case])
        sensitivities.main()
    assert calls[0] == (CASES["facebook"].recipe, 3, list(range(50, 58)))
    assert list(
        json.loads((tmp_path / h5_arms.SENSITIVITY_FILE).read_text())["cases"]
    ) == [
        "digits",
        "facebook",
    ]
    assert stored_sensitivity("digits") == sensitivity(600)
    assert stored_sensitivity("facebook") == sensitivity(64, 3)
    stored_sensitivity.cache_clear()


def test_h5_arms_without_sensitivity_name_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(h5_arms, "results_dir", lambda: tmp_path)
    stored_sensitivity.cache_clear()
    refused("no sensitivity of 'digits'; measure it: ", allocated, "digits")
    refused("unknown case 'mnist'", allocated, "mnist")


# --- prices ----------------------------------------------------------------------------------------


def by_hand(parts):
    """Return shares of 8/8 by a * b, max(a, b)^2 and tensor-core rate; ``parts`` are (weight, forward, gradient)."""
    functions = (
        lambda a, b: a * b,
        lambda a, b: max(a, b) ** 2,
        lambda a, b: 0.5 if max(a, b) <= 4 else 1.0,
    )
    for price in functions:
        spent = sum(share * (price(f, f) + 2 * price(f, g)) for share, f, g in parts)
        yield spent / (3 * price(8, 8))


ARMS = {
    "4/4": [(1, 4, 4)],
    "4/6": [(1, 4, 6)],
    "5/4": [(1, 5, 4)],
    "forward late": [(0.8, 4, 4), (0.2, 8, 4)],
    "forward spread": [(0.8, 4, 4), (0.2, 8, 4)],
    "gradients late": [(0.5, 4, 4), (0.5, 4, 8)],
    "8/8": [(1, 8, 8)],
}


@pytest.mark.parametrize("case", ["digits", "digits-mx"])
def test_prices_of_switches_equal_hand_computation(case):
    found = prices.prices(H10, case).set_index("arm")
    assert list(found.columns) == list(prices.PRICES)
    for arm in set(ARMS) & set(found.index):
        assert found.loc[arm].tolist() == pytest.approx(
            list(by_hand(ARMS[arm])), abs=1e-3
        ), arm
    assert {"4/6", "forward late", "8/8"} <= set(found.index)


def test_verdicts_hold_where_winner_is_not_dearer():
    def compared(values, ratio):
        effect = Estimate("a minus b", "points", np.array(values), 1.0)
        ratios = dict.fromkeys(prices.PRICES, ratio)
        return prices.Comparison("H0", "a", "b", ratios, [effect])

    better, worse, alike = [1.0, 1.1, 0.9], [-1.0, -1.1, -0.9], [1.0, -1.0, 0.1]
    for values, ratio, holds in (
        (better, 0.5, True),
        (better, 1.01, True),
        (better, 1.1, False),
        (worse, 0.5, False),
        (worse, 1.1, True),
        (alike, 1.01, True),
        (alike, 0.9, False),
        (alike, 1.1, False),
    ):
        assert compared(values, ratio).holds(prices.BITOPS) == holds
