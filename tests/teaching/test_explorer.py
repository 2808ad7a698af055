"""Scripts of the schedule explorer in V8, a browser's engine, against cpt_core; and the contents of its page."""

import json
import random
import re

import numpy as np
import pytest
import torch
from helpers import refused
from py_mini_racer import MiniRacer
from sklearn.datasets import load_digits

import cpt_core as cpt
from cpt_core.quantization import rounding as reference
from cpt_core.schedules.cost import step_cost
from cpt_extras.kernels import grids
from cpt_extras.search.allocation import static_of_cost
from cpt_lab.analysis.statistics import interval
from cpt_lessons import explorer

NUM_SETTINGS = 80


@pytest.fixture(scope="module")
def engine():
    context = MiniRacer()
    for name in ("schedules", "training"):
        context.eval(explorer.SCRIPTS[name].read_text(encoding="utf-8"))
    context.eval(f"const CONSTANTS = {json.dumps(explorer.constants())}")
    context.eval("""function answer(settings, steps) {
      const plain = (arm) => ({ ...arm, bits: Array.from(arm.bits) });
      try {
        const found = scheduleMath({ ...CONSTANTS, steps }).explore(settings);
        return { ...found, chosen: plain(found.chosen), rival: plain(found.rival) };
      } catch (error) {
        if (!(error instanceof RangeError)) throw error;
        return { refused: error.message };
      }
    }""")
    return context


def run(engine, expression):
    """Return the value of an expression, passed as JSON."""
    return json.loads(engine.eval(f"JSON.stringify({expression})"))


INITIAL = {"family": "CR", "q_min": 2, "q_max": 8, "q_grad": 8, "n_cycles": 4}


def explore(engine, steps=explorer.STEPS, **changes):
    """Return the page's answer to its initial settings with some changed."""
    return run(engine, f"answer({json.dumps(INITIAL | changes)}, {steps})")


def library_schedule(steps, family, q_min, q_max, n_cycles, **_):
    """Return the cpt_core schedule for settings of the page."""
    if family == "STATIC":
        return cpt.StaticSchedule(q_min, steps)
    options = {"q_min": q_min, "q_max": q_max, "n_cycles": n_cycles}
    return cpt.make_schedule(family, total_steps=steps, **options)


def check_arm(arm, schedule, q_max, q_grad):
    costs = step_cost(schedule.bits(), q_grad)
    cost = arm["relative_cost"]
    assert arm["bits"] == schedule.bits().tolist()
    assert cost == costs.mean() / step_cost(q_max, q_max)
    assert sum(arm["spent"].values()) == pytest.approx(cost, rel=1e-13)
    assert arm["spent"]["error"] == arm["spent"]["weight"]
    assert arm["soFar"][-1] == pytest.approx(cost, rel=1e-13)
    assert arm["evaluated"] == schedule.q_max


def random_settings(rng):
    low = rng.randint(1, 8)
    return {
        "family": rng.choice([*cpt.SUITE, "STATIC"]),
        "q_min": low,
        "q_max": low + rng.choice([-1, 0, 1, 2, 4, 4]),
        "q_grad": rng.randint(1, 12),
        "n_cycles": rng.choice([1, 2, 4, 8, rng.randint(1, 16)]),
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning")
def test_explorer_equals_library_for_random_settings(engine):
    """Reject the settings that the library rejects, and print Python lines of an equal schedule and baseline."""
    rng, num_rejected, num_mixed, families = random.Random(7), 0, 0, []
    while len(families) < NUM_SETTINGS:
        settings = random_settings(rng)
        family, q_max, q_grad = (settings[k] for k in ("family", "q_max", "q_grad"))
        steps = rng.choice([400, rng.randint(16, 60), rng.randint(60, 3_000)])
        answer = explore(engine, steps, **settings)
        if "refused" in answer:
            num_rejected += 1
            if settings["q_min"] <= q_max:
                refused("even n_cycles", library_schedule, steps, **settings)
            continue
        schedule = library_schedule(steps, **settings)
        cost = schedule.relative_cost(q_grad, q_max)
        rival = static_of_cost(cost, q_max, steps, settings["q_min"], q_grad)
        check_arm(answer["chosen"], schedule, q_max, q_grad)
        check_arm(answer["rival"], rival, q_max, q_grad)
        excess = answer["rival"]["relative_cost"] - answer["chosen"]["relative_cost"]
        highest_cost = step_cost(q_max, q_grad) / step_cost(q_max, q_max)
        assert -1e-9 < excess < highest_cost / steps  # a step more at most
        assert answer["same"] == bool((schedule.bits() == rival.bits()).all())
        mixed = r"static \d+( and \d+ mixed \(\d+\s% of the steps at \d+\))?"
        assert re.fullmatch(mixed, answer["rival"]["name"])
        ends_below = family != "STATIC" and schedule(steps - 1) != q_max
        assert bool(answer["warning"]) == ends_below
        names = {"cpt": cpt, "static_of_cost": static_of_cost}
        exec(answer["python"], names)
        assert names["schedule"].bits().tolist() == schedule.bits().tolist()
        assert names["rival"].bits().tolist() == rival.bits().tolist()
        num_mixed += len(set(rival.bits().tolist())) == 2
        families.append(family)
    assert min(num_rejected, num_mixed) > 8
    assert set(families) == {*cpt.SUITE, "STATIC"}


def test_explorer_cost_is_relative_to_static(engine):
    for bits, q_grad, cost in (
        (8, 8, 1),
        (8, 6, 0.8333),
        (6, 6, 0.5625),
        (5, 8, 0.5469),
    ):
        chosen = explore(engine, family="STATIC", q_min=bits, q_grad=q_grad)["chosen"]
        assert round(chosen["relative_cost"], 4) == cost
    spent = explore(engine, family="STATIC", q_min=4)["chosen"]["spent"]
    assert spent == {"forward": 16 / 192, "error": 32 / 192, "weight": 32 / 192}


def test_explorer_rounds_halves_to_even(engine):
    numbers = [0.5, 1.5, 2.5, 0.49999999999999994, 4.500000000000001]
    rounded = run(engine, f"{numbers}.map(scheduleMath(CONSTANTS).rint)")
    assert rounded == [0, 2, 2, 0, 5]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"q_min": 9}, "q_min must be at most q_max: 9 is more than 8."),
        (
            {"q_min": 9, "family": "STATIC"},
            "The bits must be at most q_max: 9 is more than 8.",
        ),
        ({"q_max": 33}, "q_max must be a whole number from 1 to 12."),
        ({"q_grad": 2.5}, "q_grad must be a whole number"),
        ({"n_cycles": None}, "n_cycles must be a whole number"),
        ({"family": "RTV", "n_cycles": 3}, "an even number of cycles"),
        ({"family": "nope"}, "There is no schedule nope."),
    ],
)
def test_explorer_rejects_invalid_settings_in_a_sentence(engine, wrong, said):
    assert said in explore(engine, **wrong)["refused"]


def js(tensor):
    """Return a tensor as a typed array; float32 survives JSON."""
    return f"new Float32Array({json.dumps(tensor.flatten().tolist())})"


@pytest.mark.parametrize("key", [0, 1, 123 << 20, 2**62 + 5])
@pytest.mark.parametrize("count", [1, 10, 2049])
def test_explorer_noise_equals_library(engine, key, count):
    found = run(engine, f"Array.from(noiseOf({key}n, {count}))")
    assert found == reference.hash_noise(torch.tensor(key), count).tolist()


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8, 12])
def test_explorer_rounding_equals_library(engine, bits):
    torch.manual_seed(bits)
    levels, key = torch.tensor(2.0**bits - 1), torch.tensor(99)
    tensors = (
        torch.randn(32, 64),
        torch.rand(64, 10).relu() / 7,
        torch.full((4, 6), 0.3),
    )
    for x in tensors:
        noisy = grids.fake_quantize(x, levels, "per_tensor", key)[0]
        for options, expected in (
            ("", cpt.quantize(x, bits)),
            (f", {len(x)}", cpt.quantize(x, bits, "linear_weight")),
            (", 1, 99n", noisy),
        ):
            numbers = run(engine, f"Array.from(rounded({js(x)}, {bits}{options}))")
            assert numbers == expected.flatten().tolist()


@pytest.mark.parametrize(("bits", "q_grad"), [(8, 8), (3, 8), (5, 4)])
def test_explorer_training_steps_equal_library(engine, bits, q_grad):
    """Start from equal weights, images and noise; only the summation order differs."""
    torch.manual_seed(bits)
    images, labels = load_digits(return_X_y=True)
    images, labels = (
        torch.tensor(images[:320]).float().view(10, 32, 64) / 16,
        torch.tensor(labels[:320]).view(10, 32),
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    cpt.quantize_(model)
    layers = [
        f"{{weight: {js(layer.weight)}, bias: {js(layer.bias)}, key: {layer.precision.noise_key.item()}n}}"
        for layer in model[::2]
    ]
    engine.eval(f"var model = [{', '.join(layers)}]")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpt.precision(model, bits=bits, q_grad=q_grad):
        for x, y in zip(images, labels, strict=True):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mine = engine.eval(
                f"step(model, {js(x)}, {y.tolist()}, 32, {bits}, {q_grad}, 0.1)"
            )
            assert mine == pytest.approx(loss.item(), rel=2e-3)
        right = (
            (model(images.view(-1, 64)).argmax(1) == labels.view(-1))
            .float()
            .mean()
            .item()
        )
    for i, layer in enumerate(model[::2]):
        for name in ("weight", "bias"):
            moved = torch.tensor(run(engine, f"Array.from(model[{i}].{name})")).view_as(
                getattr(layer, name)
            )
            torch.testing.assert_close(moved, getattr(layer, name), rtol=0, atol=2e-3)
    mine = engine.eval(
        f"accuracy(model, {js(images)}, {labels.flatten().tolist()}, {bits})"
    )
    assert mine == pytest.approx(right, abs=0.01)


def test_explorer_arms_share_start_and_test_images(engine):
    engine.eval("""var given = { images: Float32Array.from({ length: 40 * 64 }, (_, i) => Math.floor(i / 64)),
      labels: Array.from({ length: 40 }, (_, i) => i % 10), steps: 6, batch: 4, learn: 30 };
    var arm = (q) => ({ bits: new Uint8Array(6).fill(q), q_grad: 8, evaluated: q });
    var trained = (...arms) => Array.from(train({ ...given, arms: arms.map(arm), seeds: 3, rate: 0.1, every: 4 }));""")
    found = run(engine, "trained(8, 8, 2)")
    assert [part["step"] for part in found] == [4, 6]
    for part in found:
        assert part["loss"][0] == part["loss"][1] != part["loss"][2]
        assert len(set(part["loss"][0])) == 3
    drawn = run(
        engine,
        """[0, 1].map((seed) => { const c = chosenBy(seed, given);
      return [c.test, ...c.batches].map(([x]) => Array.from(x).filter((_, i) => i % 64 === 0)) })""",
    )
    for test, *batches in drawn:
        assert len(set(test)) == 10
        assert not set(test) & set().union(*batches)
    assert drawn[0][0] != drawn[1][0]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return explorer.write_explorer(
        tmp_path_factory.mktemp("page") / "explorer.html"
    ).read_text(encoding="utf-8")


def test_explorer_page_is_self_contained_and_small(page):
    assert len(page.encode()) < 200_000
    loaded = r"""(?:src|href)=["'](?!data:|#)|@import|url\(|fetch\(|import\s"""
    assert not re.search(
        loaded, page.replace("import cpt_core", "").replace("import static_of_cost", "")
    )
    assert page.count("<script") == page.count("</script>") == 3
    assert all(
        path.read_text(encoding="utf-8") in page for path in explorer.SCRIPTS.values()
    )
    labelled = set(re.findall(r'<label for="(\w+)"', page))
    assert labelled == set(re.findall(r'<(?:input|select) id="(\w+)"', page))
    assert labelled == {
        "family",
        "q_min",
        "q_max",
        "q_grad",
        "n_cycles",
        "rate",
        "seeds",
    }
    assert all(f'id="{name}-hint"' in page for name in labelled)


@pytest.mark.parametrize(
    ("home", "lessons"),
    [
        ("index.html", ""),
        ("a/index.html", "a/"),
        ("../a/index.html", "../a/"),
        ("https://example.org/x", "https://example.org/"),
        ("https://example.org", "https://example.org/"),
        ("file:///tmp/index.html", "file:///tmp/"),
    ],
)
def test_explorer_page_links_to_course_and_lesson(home, lessons, page, tmp_path):
    told = explorer.write_explorer(tmp_path / "explorer.html", home).read_text(
        encoding="utf-8"
    )
    assert "Back to the course" not in page
    lesson = f"{lessons}notebooks/00_start_here.html"
    assert f'<a href="{home}">Back to the course</a> <a href="{lesson}">' in told


def test_explorer_contains_digits_and_student_quantiles():
    images, labels = load_digits(return_X_y=True)
    held = explorer.digits()
    pixels = np.frombuffer(held["images"].encode(), dtype=np.uint8).reshape(
        images.shape
    ) - ord("A")
    assert (pixels == images).all()
    assert [int(digit) for digit in held["labels"]] == labels.tolist()
    for n, student in explorer.constants()["student"].items():
        values = np.random.default_rng(n).normal(size=n)
        mean, low, _ = interval(values)
        assert student * values.std(ddof=1) / n**0.5 == pytest.approx(mean - low)


@pytest.mark.parametrize(
    "home",
    [
        "javascript:alert(1)",
        " JavaScript:alert(1)",
        "java\tscript:x",
        "data:text/html,x",
        "vbscript:x",
    ],
)
def test_explorer_rejects_home_that_is_no_page(home, tmp_path):
    with pytest.raises(ValueError, match=r"home: expected a page such as index\.html"):
        explorer.write_explorer(tmp_path / "page.html", home)
    assert not any(tmp_path.iterdir())
