"""Recipes, run keys, grids of runs, parameters of experiments, and custom schedules."""

import hashlib
import json
import math
import pickle
import sys
from collections import Counter
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
from helpers import RECIPES, errors_text, quietly, run_command

from cpt_core.schedules.profiles import PROFILES, SCHEDULES, SUITE, SuiteEntry
from cpt_extras.search.custom_schedules import FunctionSchedule
from cpt_lab.analysis.schedules import figure_2
from cpt_lab.experiments import designs, grids
from cpt_lab.experiments.registry import DATASETS, EXPERIMENTS, recipe, task_of_dataset
from cpt_lab.experiments.schema import LATER, SCALES, is_own
from cpt_lab.experiments.spec import RunSpec, run_spec
from cpt_lab.experiments.stand_ins import STAND_INS
from cpt_lessons.parameters import check_parameters

# --- recipes --------------------------------------------------------------------------------------

OWN = [  # data sets without a recipe at the scale, which takes that of the nearest family
    ("paper", "photos/", None, "image"),
    ("paper", "a.npz,b.npz", None, "image"),
    ("demo", "photos/", None, "image"),
    ("demo", "my.npz", None, "graph"),
    ("demo", "ogbn-arxiv", None, "graph"),
    ("paper", "my/", "sage", "graph"),
    ("demo", "mine/", None, "entailment"),
    ("paper", "mine/", None, "entailment"),
    ("demo", "xnli", None, "entailment"),
]


def values_of(r):
    """Return the fields of a recipe as words."""
    return [f"{f.name}={getattr(r, f.name)}" for f in fields(r)]


def test_paper_recipes_have_listed_settings(golden):
    """Compare all fields at paper scale, of the authors' preset those that differ, and of user data."""
    lines = []
    for key in RECIPES["paper"]:
        dataset, _, model = key.partition("/")
        if dataset.startswith("own-"):
            continue
        ours = recipe("paper", dataset, model)
        lines.append(f"{key}: {' '.join(values_of(ours))}")
        if DATASETS[dataset].authors:
            authors = values_of(recipe("paper", dataset, model, "authors"))
            changed = [word for word in authors if word not in values_of(ours)]
            lines.append(f"  authors: {' '.join(changed)}")
    for scale, dataset, model, task in OWN:
        found = recipe(scale, dataset, model, task=task)
        lines.append(f"{scale} {dataset} {task}: {' '.join(values_of(found))}")
    golden("recipes.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("dataset", "samples", "epochs"),
    [
        ("cifar10", 50_000, 164),
        ("imagenet", 1_281_167, 90),
        ("voc2012", 5_717, 120),
        ("ptb", (929_589 // 20 - 1) / 35 * 20, 40),
    ],
)
@pytest.mark.parametrize("preset", ["ours", "authors"])
def test_paper_recipes_train_for_printed_epochs(dataset, samples, epochs, preset):
    r = recipe("paper", dataset, None, preset)
    epoch = math.ceil(samples / r.batch)
    assert r.steps / epoch == pytest.approx(
        epochs, abs=0.5
    )  # CIFAR's is given in steps
    if preset == "ours":
        assert r.evaluate_every == (5 if dataset == "voc2012" else 1) * epoch
    if dataset != "ptb":
        assert (r.train_images, r.valid_images, r.test_images) == (None, 0, None)


def test_run_key_ignores_only_grid_seeds():
    make = partial(run_spec, q_max=8)
    r = recipe("demo")
    keys = {
        spec.key
        for spec in (
            *(make(r, "CR", seed=seed) for seed in (0, 1, 256, 1_000, 2**32)),
            make(r, "RR", seed=0),
            make(r, "CR", seed=0, q_grad=6),
            make(replace(r, lr=0.031), "CR", seed=0),
        )
    }
    assert len(keys) == 8
    assert make(replace(r, seeds=(7,)), "CR", seed=0).key == "ce573962865680b4"


CHANGED = {
    "autocast": "bfloat16",
    "execution": "integer",
    "lr_rule": "cosine",
    "ladder": "mx",
    "optimizer": "adamw",
    "wide_share": 0.15,
}
NEEDED = {"wide_share": {"ladder": "recipe nvfp4"}}  # by other fields


def test_run_spec_omits_default_later_fields():
    """Omit fields that were added later at their default, so that keys of older rows stay valid."""
    plain = run_spec(recipe("demo"), "CR", q_max=8, seed=0)
    later = [f for f in fields(plain.recipe) if f.metadata == LATER]
    assert len(later) == 9
    for f in later:
        others = {f.name: CHANGED.get(f.name, True)} | NEEDED.get(f.name, {})
        assert f.name not in plain.to_dict()["recipe"]
        changed = replace(plain, recipe=replace(plain.recipe, **others))
        stored = {**plain.to_dict()["recipe"], **others}
        assert changed.to_dict()["recipe"] == stored
        assert changed.key != plain.key == "ce573962865680b4"
        assert RunSpec.from_dict(changed.to_dict()) == changed != plain


def test_run_spec_accepts_user_schedule():
    curve = FunctionSchedule(lambda u: 3 + 5 * u, total_steps=600)
    spec = RunSpec(recipe("demo"), curve, 8, 8, 0, "mine", "demo")
    assert spec.schedule.bits().tolist() == curve.bits().tolist()
    assert RunSpec.from_dict(spec.to_dict()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_run_spec_accepts_arrays():
    kind = {"schedules": ["CR"], "static_bits": []}
    own = designs.quality_cost("smoke", seeds=range(2), **kind)
    arrays = {"seeds": np.arange(2), "q_max": np.array([8])}
    assert designs.quality_cost("smoke", **arrays, **kind) == own


# --- declarations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("task", EXPERIMENTS)
def test_experiment_declarations_are_consistent(task):
    experiment = EXPERIMENTS[task]
    families = {d.name: d for d in experiment.datasets}
    assert len(families) == len(experiment.datasets)
    likes = {experiment.user_data_like, experiment.large_user_data_like} - {"", None}
    assert likes <= set(families)
    for d in experiment.datasets:
        recipes = [r for found in d.recipes.values() for r in found]
        assert {(type(r), r.task) for r in recipes} <= {(experiment.recipe, task)}
        assert set(d.recipes) <= set(SCALES)
        models = {scale: [r.model for r in d.recipes[scale]] for scale in d.recipes}
        assert all(len(names) == len(set(names)) for names in models.values())
        assert not d.title or {r.dataset for r in recipes} <= {d.name}
        assert not d.like or {*families[d.like].recipes} == {*SCALES} - {"background"}
        assert all(set(d.deficits[scale]) <= set(models[scale]) for scale in d.deficits)
        assert set(d.designs) <= set(grids.GRID_DESIGNS)
        assert set(d.authors or ()) - {""} <= set(models.get("paper", ()))


def test_dataset_name_has_one_task():
    assert len(DATASETS) == sum(len(e.named_datasets) for e in EXPERIMENTS.values())
    for task, experiment in EXPERIMENTS.items():
        assert {task_of_dataset(name) for name in experiment.named_datasets} == {task}
    unnamed = ("own-graph", "own-pictures", "own-pairs", "mnist", "my/images", "a.npz")
    assert {task_of_dataset(name) for name in unnamed} == {None}


@pytest.mark.parametrize(
    "path", ["my/images", "a.npz,b.npz", "g.pt", "C:\\data\\images", "images\\"]
)
def test_user_paths_are_recognised_on_every_system(path):
    assert is_own(path)
    assert not any(map(is_own, DATASETS))


# --- grids ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_grids_have_listed_counts_and_keys(golden):
    """Compare counts and a digest of all keys: a grid that changes would not find its stored rows."""
    lines = []
    for name, grid in grids.GRIDS.items():
        lines.append(f"{name}: {grid.artefact}, {grid.description}")
        for scale in grid.scales:
            specs = grids.grid_specs(name, scale)
            keys = [spec.key for spec in specs]
            assert len(set(keys)) == len(keys), name
            arms, seeds = {s.arm for s in specs}, {s.seed for s in specs}
            counts = f"{len(specs)} runs, {len(arms)} arms, {len(seeds)} seeds"
            digest = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:12]
            lines.append(f"  {scale}: {counts}, keys {digest}")
    golden("grids.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("dataset", ["ogbn-arxiv", "ogbn-products"])
def test_q_agg_grid_matches_fp_agg(dataset):
    """Mirror the FP-Agg grid of figure 6, and share the static runs of figure 5."""
    fp = grids.grid_specs(f"{dataset}/{recipe('paper', dataset).model}")
    q_agg = grids.grid_specs(f"{dataset}/q_agg")
    assert {s.recipe.aggregation for s in q_agg} == {"quantized"}
    back = [replace(s, recipe=replace(s.recipe, aggregation="fp")) for s in q_agg]
    assert back == fp
    both = grids.grid_specs(f"{dataset}/aggregation")
    assert Counter((s.arm, s.q_max, s.recipe.aggregation) for s in both) == {
        ("static 8", 8, "fp"): 3,
        ("static 8", 8, "quantized"): 3,
    }
    assert len({s.key for s in q_agg} & {s.key for s in both}) == 3


def test_grid_descriptions_identify_embedded_data():
    for name, grid in grids.GRIDS.items():
        if name in STAND_INS:
            continue
        d = DATASETS[name.split("/")[0]]
        assert grid.description.startswith(d.title)
        assert bool(d.embedded) == ("paper" not in d.recipes), name
        assert bool(d.embedded) == ("embedded" in grid.description)
    is_small = [grid.scales[0] != "paper" for grid in grids.GRIDS.values()]
    assert is_small == sorted(is_small)  # the paper's own come first


def test_select_filters_runs_by_every_condition():
    specs = designs.quality_cost("demo", seeds=[0, 1])
    kept = grids.select(specs, savings=["small", "static"])
    small = {name for name, entry in SUITE.items() if entry.savings == "small"}
    assert {s.arm for s in kept} == small | {f"static {b}" for b in range(2, 9)}
    assert grids.select(specs) == specs
    both = grids.select(specs, arms=["CR", "ER"], savings=["small"])
    assert {(s.arm, s.seed) for s in both} == {("ER", 0), ("ER", 1)}


# --- errors ---------------------------------------------------------------------------------------


def smoke_recipe(dataset, **changes):
    return replace(recipe("smoke", dataset), **changes)


def test_recipes_and_parameters_reject_wrong_values(golden):
    graph = ("norm", "loss", "aggregation", "inference", "lr_rule")
    wrong_fields = {
        "digits-graph": [
            *({name: "nonsense"} for name in graph),
            *({"degrees": degrees} for degrees in ((5, 2), (2, 2), (-1,))),
        ],
        "digits": [
            {"batch": 0},
            {"batch": -3},
            {"lr": math.nan},
            {"lr": -1},
            {"weight_decay": math.inf},
            {"steps": "600"},
            {"eval_bits": "x"},
            {"cycle_rule": "x"},
            {"milestones": (0.5, 3.0)},
        ],
        "templates": [{"padding": "short"}, {"test_languages": ()}],
        "pydoc": [
            {"lr_rule": "plateau", "evaluate_every": 0},
            {"lr_rule": "steps"},
            {"unit": "bytes"},
        ],
    }
    arithmetic = [
        {"autocast": "float16"},
        {"autocast": None},
        {"tf32": 1},
        {"channels_last": "yes"},
        {"execution": "auto"},
        {"shared_steps": "no"},
    ]
    for dataset in ("digits", "digits-graph", "pydoc", "templates", "digit-scenes"):
        wrong_fields.setdefault(dataset, []).extend(arithmetic)
    parameters = [
        {"scale": "big"},
        {"sclae": "demo"},
        {"schedules": '["XR"]'},
        {"schedules": "CR"},
        {"q_max": 6},
        {"q_max": [6, 64]},
        {"static_bits": 8},
        {"q_min": "3"},
        {"seeds": []},
        {"seeds": [True]},
        {"learning_rate": "1e-3"},
        {"decay": ["linear"]},
        {"controls": 1},
        {"scale": "demo", "dataset": "mnist"},
        {"scale": "demo", "dataset": "digits", "model": "x"},
        {"pairs": "digits"},
    ]
    recipes = [
        {"scale": "paper", "dataset": "own-graph"},
        {"scale": "demo", "dataset": "own-pairs"},
        {"scale": "demo", "dataset": "x/", "task": "text"},
        {"scale": "demo", "dataset": "nope"},
    ]
    short = FunctionSchedule(lambda u: 3 + u, total_steps=3)
    spec = {"q_max": 8, "q_grad": 8, "seed": 0, "arm": "x", "scale": "demo"}
    text = errors_text(
        [
            *((recipe, given) for given in recipes),
            *(
                (smoke_recipe, {"dataset": dataset, **given})
                for dataset, wrong in wrong_fields.items()
                for given in wrong
            ),
            *((check_parameters, given) for given in parameters),
            (partial(check_parameters, "language_model"), {"dataset": "digits"}),
            (RunSpec, {"recipe": recipe("demo"), "schedule": short, **spec}),
            (partial(RunSpec.from_dict, {"version": 0}), {}),
        ]
    )
    golden("recipe_errors.txt", text)


def test_check_parameters_separates_smoke_stores():
    """Give every smoke run a separate store, so that it never resumes."""
    smoke = [check_parameters(scale="smoke").store for _ in range(2)]
    assert smoke[0] != smoke[1]
    assert check_parameters(scale="demo").store == check_parameters(scale="demo").store


# --- custom schedules, added as CONTRIBUTING says -------------------------------------------------

# Run before anything else of the package is imported: the same as editing the file.
CUSTOM = """
import json
from dataclasses import dataclass
from cpt_core.schedules import profiles

@dataclass(frozen=True)
class Parabola(profiles.Profile):
    def growth(self, x):
        return x**2

profiles.PROFILES["parabola"] = Parabola
profiles.SCHEDULES["PR"] = profiles.SuiteEntry("parabola")

from cpt_lab.experiments import grids
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import RunSpec, run_spec, savings_of

spec = run_spec(recipe("demo"), "PR", q_max=8, seed=0)
runs = grids.grid_specs("digits/mlp6", seeds=[0]) + [spec]
bits = spec.schedule.bits()
print(json.dumps({
    "keys": {name: [s.key for s in grids.grid_specs(name)] for name in NAMES},
    "round trip": RunSpec.from_dict(spec.to_dict()) == spec,
    "bits": [int(bits[0]), int(bits[299]), int(bits[-1])],
    "savings": savings_of("PR"),
    "selected": [s.arm for s in grids.select(runs, savings=["own"])],
}))
"""


@pytest.mark.slow
def test_custom_schedule_keeps_paper_grids():
    names = ["cifar10/resnet74", "ptb/lstm", "digits/equal_cost"]
    code = f"NAMES = {names!r}\n{CUSTOM}"
    found = json.loads(run_command(sys.executable, "-W", "ignore", "-c", code))
    for name, keys in found.pop("keys").items():
        assert keys == [spec.key for spec in grids.grid_specs(name)], name
    assert found == {
        "round trip": True,
        "bits": [3, 8, 8],
        "savings": "own",
        "selected": ["PR"],
    }


def test_suite_contains_only_paper_schedules(monkeypatch):
    assert len(SUITE) == 10
    assert {name: SCHEDULES[name] for name in SUITE} == SUITE
    others = [entry for name, entry in SCHEDULES.items() if name not in SUITE]
    assert all(entry.savings == "own" for entry in others)
    assert {entry.profile for entry in SCHEDULES.values()} <= set(PROFILES)
    monkeypatch.setitem(SCHEDULES, "PR", SuiteEntry("linear"))
    assert len(quietly(figure_2, total_steps=80).axes) == 10
