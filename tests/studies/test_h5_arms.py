"""Arms of study H5: schedules from stored sensitivities only, identified by the keys of their rows."""

import json

from helpers import refused

from bench import sensitivities
from cpt_extras.search.sensitivity_result import Sensitivity
from cpt_lab.studies.h5 import arms
from cpt_lab.studies.h5.arms import CASES, allocated, stored_sensitivity


def made_up(steps, base=4):
    spans = tuple((steps * i // 8, steps * (i + 1) // 8) for i in range(8))
    return Sensitivity(
        "made up",
        "accuracy",
        base,
        steps,
        spans,
        (("body.0", "body.2"), ("body.4",)),
        (300, 20),
        (50, 51),
        (0.8, 0.8),
        ((0.01,) * 7 + (0.05,),) * 2,
        ((0.02, 0.02),) * 2,
    )


def test_h5_sensitivities_command_stores_input_of_schedules(tmp_path, monkeypatch):
    """Measure with the case's recipe and bits, on unused seeds from 50 on; add a second case."""
    calls = []

    def measure(r, **given):
        calls.append((r, given["base"], list(given["seeds"])))
        return made_up(r.steps, given["base"])

    for module in (arms, sensitivities):
        monkeypatch.setattr(module, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(sensitivities, "recipe_sensitivity", measure)
    stored_sensitivity.cache_clear()
    for case in ("facebook", "digits"):
        monkeypatch.setattr("sys.argv", ["sensitivities", "--only", case])
        sensitivities.main()
    assert calls[0] == (CASES["facebook"].recipe, 3, list(range(50, 58)))
    assert list(
        json.loads((tmp_path / arms.SENSITIVITY_FILE).read_text())["cases"]
    ) == [
        "digits",
        "facebook",
    ]
    assert stored_sensitivity("digits") == made_up(600)
    assert stored_sensitivity("facebook") == made_up(64, 3)
    stored_sensitivity.cache_clear()


def test_h5_arms_without_sensitivity_name_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "results_dir", lambda: tmp_path)
    stored_sensitivity.cache_clear()
    refused("no sensitivity of 'digits'; measure it: ", allocated, "digits")
    refused("unknown case 'mnist'", allocated, "mnist")
