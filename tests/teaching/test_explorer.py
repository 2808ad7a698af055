"""The explorer's mathematics in V8, the engine of a browser, against cpt_core; and what its page holds."""

import json
import random
import re
import warnings

import pytest
from py_mini_racer import MiniRacer

import cpt_core as cpt
from cpt_core.schedules.schedule import FLOAT32, ShortCycleWarning
from cpt_lab.analysis.runs import committed
from cpt_lessons import explorer

SETTINGS = 200


@pytest.fixture(scope="module")
def engine():
    context = MiniRacer()
    context.eval(explorer.MATHEMATICS.read_text(encoding="utf-8"))
    context.eval(f"const {{ explore, rint }} = scheduleMath({json.dumps(explorer.constants())})")
    context.eval("""function answer(settings) {
      try {
        const { bits, ...found } = explore(settings);
        return JSON.stringify({ ...found, bits: Array.from(bits) });
      } catch (error) {
        if (!(error instanceof RangeError)) throw error;
        return JSON.stringify({ refused: error.message });
      }
    }""")
    return context


def explored(engine, s):
    """What the page would show for settings."""
    return json.loads(engine.eval(f"answer({json.dumps(s)})"))


def settings(**values):
    """Settings of the page: those that it opens with but for these."""
    opens = {"family": "RR", "triangular": False, "mirror": "horizontal", "q_min": 3, "q_max": 8, "n_cycles": 8}
    return {**opens, "total_steps": 64_000, "delay": 0, "delay_at": "q_max", "budget": None, **values}


def made(s):
    """The schedule of cpt_core for settings of the page."""
    bits = {"q_min": s["q_min"], "q_max": s["q_max"]}
    cycles = {"total_steps": s["total_steps"], "n_cycles": s["n_cycles"]}
    if s["family"] == "STATIC":
        return cpt.make_schedule("STATIC", q_max=s["q_max"], total_steps=s["total_steps"], delay=s["delay"])
    entry = cpt.SUITE.get(s["family"])
    profile = entry.profile if entry else s["family"]
    turned = {"triangular": s["triangular"], "mirror": s["mirror"]}
    if entry:
        turned = {"triangular": entry.triangular, "mirror": entry.mirror}
    if s["budget"] is not None:
        return cpt.solve_schedule(s["budget"], **bits, **cycles, family=profile, **turned, delay=s["delay"])
    if entry:
        return cpt.make_schedule(s["family"], **bits, **cycles, delay=s["delay"], delay_at=s["delay_at"])
    hold = round(s["delay"] * s["total_steps"])
    cycles["total_steps"] -= hold
    schedule = cpt.CyclicSchedule(cpt.schedules.PROFILES[profile](), **bits, **cycles, **turned)
    level = FLOAT32 if s["delay_at"] == "float32" else None
    return cpt.DelayedSchedule(schedule, hold, level) if hold else schedule


def made_or_none(s):
    try:
        return made(s)
    except ValueError:
        return None


def drawn(rng):
    """Settings of every kind, most of which make a schedule: also odd lengths, many cycles and few steps."""
    family = rng.choice([*cpt.SUITE, *explorer.constants()["profiles"], "STATIC"])
    q_min = rng.randint(1, 8)
    delay = rng.choice([0, 0, 0.1, 0.25, round(rng.random(), 3)])
    solved = family != "STATIC" and rng.random() < 0.4
    total = rng.choice([rng.randint(1, 60), rng.randint(60, 3_000), 8 * rng.randint(10, 400)])
    return settings(
        family=family,
        triangular=rng.random() < 0.5,
        mirror=rng.choice(["horizontal", "vertical"]),
        q_min=q_min,
        q_max=q_min + rng.choice([0, 1, 5, 5, 6, rng.randint(0, 24)]),
        n_cycles=rng.choice([1, 2, 2, 4, 8, 8, rng.randint(1, 20)]),
        total_steps=total,
        delay=0 if family == "STATIC" and rng.random() < 0.9 else delay,
        delay_at="float32" if delay and not solved and rng.random() < 0.4 else "q_max",
        budget=round(rng.uniform(0.2, 1.02), 3) if solved else None,
    )


def compare(found, schedule):
    assert found["bits"] == schedule.bits().tolist()
    assert found["relative_cost"] == schedule.relative_cost()
    assert found["noise_exposure"] == pytest.approx(schedule.noise_exposure(), rel=1e-13)  # summed in another order
    assert {row["bits"]: row["share"] for row in found["shares"]} == {
        q: schedule.share_at(q) for q in set(schedule.bits().tolist())
    }


def test_bits_cost_and_noise_of_200_random_settings(engine):
    """What one refuses the other refuses, what one makes the other makes, and the page's line of Python makes it too.

    Of a solved schedule, two steps that mirror each other may have values that differ in the last digit of one side
    only, and either may be the one that is moved by a bit: about one setting in 4,000, none of these.
    """
    rng, kinds, refused, compared = random.Random(7), set(), 0, 0
    while compared < SETTINGS:
        s = drawn(rng)
        found = explored(engine, s)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ShortCycleWarning)
            schedule = made_or_none(s)
        assert ("refused" in found) == (schedule is None), s
        if schedule is None:
            refused += 1
            continue
        compare(found, schedule)
        assert bool(found["warning"]) == (schedule(s["total_steps"] - 1) != s["q_max"])
        assert bool(told) == bool(found["warning"]) or s["budget"] is not None  # there a moved step may mend the end
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShortCycleWarning)
            line = eval(found["line"], {"cpt": cpt})
        assert line.bits().tolist() == found["bits"], found["line"]
        assert line.relative_cost() == found["relative_cost"]
        kinds.add(schedule.kind)
        compared += 1
    assert refused > 20
    assert kinds == {"static", "cyclic", "adjusted", "delayed"}


@pytest.mark.parametrize("name", [*cpt.SUITE, "STATIC"])
def test_the_paper_s_schedules_at_their_full_length(engine, name):
    s = settings(family=name)
    found = explored(engine, s)
    compare(found, made(s))
    assert found["savings"] == made(s).savings


def test_halves_are_rounded_to_even(engine):
    assert [engine.eval(f"rint({x})") for x in (0.5, 1.5, 2.5, 0.49999999999999994, 4.500000000000001)] == [
        0,
        2,
        2,
        0,
        5,
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"q_min": 9}, "q_min must be at most q_max: 9 is more than 8."),
        ({"q_max": 33}, "q_max must be a whole number from 1 to 32."),
        ({"q_min": 2.5}, "q_min must be a whole number"),
        ({"n_cycles": None}, "n_cycles must be a whole number"),
        ({"family": "RTV", "n_cycles": 3}, "even number of cycles"),
        ({"total_steps": 10**9}, "total_steps must be a whole number from 1 to 1000000."),
        ({"delay": 1}, "at least 0 and less than 1"),
        ({"delay": 0.99, "total_steps": 10}, "leaves none of 10 steps"),
        ({"budget": 0.1}, "between 3 and 8 bits; budgets lie between 0.2969 and 1."),
        ({"budget": 0.5, "delay": 0.5}, "with 32000 of 64000 steps held at 8 bits; budgets lie between 0.6484 and 1."),
        ({"budget": 0.7, "total_steps": 8}, "8 steps are too few to cost 0.7 to 0.1 %; the nearest is"),
        ({"family": "STATIC", "budget": 0.7}, "STATIC has one precision"),
        ({"family": "nope"}, "There is no schedule nope."),
    ],
)
def test_what_makes_no_schedule_is_a_sentence(engine, wrong, said):
    assert said in explored(engine, settings(**wrong))["refused"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return explorer.write_explorer(tmp_path_factory.mktemp("page") / "explorer.html").read_text(encoding="utf-8")


def test_the_page_is_complete_in_itself_and_small(page):
    assert len(page.encode()) < 300_000
    assert not re.search(
        r"""(?:src|href)=["'](?!data:|#)|@import|url\(|fetch\(|import\s""", page.replace("import cpt_core", "")
    )
    assert page.count("<script>") == page.count("</script>") == 2
    assert explorer.MATHEMATICS.read_text(encoding="utf-8") in page
    labelled = set(re.findall(r'<label for="(\w+)"', page))
    assert labelled == set(re.findall(r'<(?:input|select) id="(\w+)"', page))


def test_it_leads_back_where_it_is_told_to(page, tmp_path):
    told = explorer.write_explorer(tmp_path / "explorer.html", "index.html").read_text(encoding="utf-8")
    assert "Back to the course" not in page
    assert '<a href="index.html">Back to the course</a>' in told


def test_arms_of_about_the_same_cost_and_the_same_q_max_are_shown(engine):
    arms = [{"arm": name, "relative_cost": cost} for name, cost in zip("abcd", (0.47, 0.48, 0.52, 0.53), strict=True)]
    experiments = [{"name": str(q), "q_max": q, "arms": arms} for q in (8, 6, 8)] + [{"q_max": 8, "arms": arms[:1]}]
    found = json.loads(engine.eval(f"JSON.stringify(armsAtCost({json.dumps(experiments)}, 0.5, 8, 0.05))"))
    assert [(e["q_max"], "".join(arm["arm"] for arm in near)) for e, near in found] == [(8, "bc"), (8, "bc"), (8, "")]
    assert engine.eval(f"armsAtCost({json.dumps(experiments)}, 0.5, 5, 0.05).length") == 0


def test_results_are_those_of_the_committed_rows(page):
    (told,) = re.findall(r"^const EXPERIMENTS = (.*);$", page, flags=re.MULTILINE)
    shown = json.loads(told)
    assert shown == json.loads(json.dumps(explorer.experiments(committed())))
    digits = next(e for e in shown if e["name"].startswith("mlp6 on scikit-learn digits") and len(e["arms"]) > 12)
    runs = committed("image_digits", "equal_cost_digits")
    for arm in digits["arms"]:
        values = 100 * runs[(runs["arm"] == arm["arm"]) & (runs["q_min"] == 3) & (runs["model"] == "mlp6")]["accuracy"]
        assert (arm["n"], arm["mean"]) == (len(values), pytest.approx(values.mean(), abs=1e-4))
        assert arm["low"] < arm["mean"] < arm["high"]
        assert arm["relative_cost"] in set(runs.loc[runs["arm"] == arm["arm"], "relative_cost"])
    others = re.compile(r"of \d+")  # shorter trainings; windows of critical periods
    assert not [arm["arm"] for e in shown for arm in e["arms"] if others.search(arm["arm"])]
