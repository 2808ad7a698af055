import math
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers import RECIPES, refused

from cpt_core.schedules.cost import relative_cost
from cpt_core.schedules.profiles import SUITE
from cpt_extras.search.custom_schedules import FunctionSchedule
from cpt_lab.experiments import designs, grids
from cpt_lab.experiments.registry import DATASETS, EXPERIMENTS, recipe, task_of_dataset
from cpt_lab.experiments.schema import SCALES, is_own
from cpt_lab.experiments.spec import RunSpec, run_spec
from cpt_lab.experiments.stand_ins import STAND_INS
from cpt_lessons.parameters import check_parameters

SETTINGS = {  # data set, model and preset -> fields at paper scale
    ("cifar10/mobilenetv2", "authors"): {
        "lr": 0.03,
        "q_min": 4,
        "cycle_rule": "floor_plus_one",
        "eval_bits": "current",
        "running_start": "zero",
    },
    ("cifar10/resnet74", "authors"): {"lr": 0.1},
    ("cifar100/mobilenetv2", "ours"): {
        "steps": 64_000,
        "batch": 128,
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "q_min": 3,
        "n_cycles": 8,
        "crop": 4,
        "flip": True,
        "milestones": (0.5, 0.75),
    },
    ("imagenet/resnet34", "ours"): {
        "steps": 450_450,
        "batch": 256,
        "lr": 0.1,
        "q_min": 4,
        "n_cycles": 8,
        "crop": "resized",
        "size": 224,
        "weight_decay": 1e-4,
        "quantized": "imagenet",
    },
    (
        "ptb",
        "ours",
    ): {  # 1,328 steps are an epoch, as the authors train; its last batch has 33 words
        "steps": 40 * math.ceil((929_589 // 20 - 1) / 35),
        "evaluate_every": 1328,
        "batch": 20,
        "length": 35,
        "hidden": 800,
        "dropout": 0.5,
        "clip": 0.25,
        "lr": 20.0,
        "lr_rule": "plateau",
        "lr_division": 5.0,
        "q_min": 5,
        "n_cycles": 2,
        "eval_bits": "q_max",
    },
    ("ptb", "authors"): {"n_cycles": 8, "lr_division": 4.0, "eval_bits": "current"},
    ("xnli", "ours"): {
        "steps": 12_272,
        "batch": 64,
        "length": 128,
        "padding": "max",
        "language": "de",
        "quantized": "all",
        "checkpoint": "bert-base-multilingual-cased",
        "lr": 1e-5,
        "final_lr": 0.1,
        "learning_rates": (5e-6, 1e-5, 5e-5),
        "weight_decay": 0.0,
        "clip": 1.0,
        "q_min": 5,
        "n_cycles": 2,
        "seeds": (0, 1, 2),
    },
    ("xnli", "authors"): {
        "lr": 1e-5,
        "final_lr": 0.0,
        "learning_rates": (),
        "eval_bits": "current",
        "cycle_rule": "floor_plus_one",
        "running_start": "zero",
    },
    ("ogbn-arxiv", "ours"): {
        "steps": 1000,
        "layers": 3,
        "hidden": 512,
        "lr": 1e-3,
        "weight_decay": 0,
        "q_min": 3,
        "loss": "cross_entropy",
        "self_loops": True,
    },
    ("ogbn-arxiv", "authors"): {
        "steps": 500,
        "loss": "nll_raw",
        "self_loops": False,
        "cycle_rule": "floor_plus_one",
    },
    ("ogbn-products", "ours"): {
        "steps": 15_440,
        "batch": 1024,
        "layers": 2,
        "fanout": 32,
        "lr": 3e-4,
    },
    ("ogbn-products", "authors"): {"q_min": 4},
    ("voc2012", "ours"): {"q_min": 5, "lr": 1e-5},
    ("voc2012", "authors"): {"batch": 8, "steps": 85_800, "flip": True},
}


@pytest.mark.parametrize(("name", "preset"), SETTINGS)
def test_paper_recipes_and_grids_match_settings(name, preset):
    dataset, _, model = name.partition("/")
    found, fields = (
        recipe("paper", dataset, model or None, preset),
        SETTINGS[name, preset],
    )
    assert type(found) is EXPERIMENTS[found.task].recipe
    assert {name: getattr(found, name) for name in fields} == fields
    if (
        preset == "ours" and dataset != "xnli"
    ):  # 3 seeds, 6 and 8 bits, 10 schedules and static
        specs = grids.grid_specs(f"{dataset}/{found.model}")
        assert len(specs) == len({s.key for s in specs}) == 66
        assert {(s.arm, s.q_max, s.seed) for s in specs} == {
            (arm, q_max, seed)
            for q_max in (6, 8)
            for arm in (*SUITE, f"static {q_max}")
            for seed in (0, 1, 2)
        }
        assert all(s.q_grad == s.q_max for s in specs)


@pytest.mark.parametrize(
    ("dataset", "there", "epochs"),
    [("cifar10", 50_000, 164), ("imagenet", 1_281_167, 90), ("voc2012", 5_717, 120)],
)
@pytest.mark.parametrize("preset", ["ours", "authors"])
def test_paper_recipes_train_on_all_images(dataset, there, epochs, preset):
    """Hold no data out where the paper tunes nothing, and derive the steps from its epochs."""
    r = recipe("paper", dataset, None, preset)
    assert (r.train_images, r.valid_images, r.test_images) == (None, 0, None)
    epoch = -(-there // r.batch)
    assert r.steps / epoch == pytest.approx(
        epochs, abs=0.5
    )  # CIFAR's is given in steps
    assert recipe("demo", "cifar10").valid_images == 1_000  # small scales hold some out
    if preset == "ours":
        assert r.evaluate_every == (5 if dataset == "voc2012" else 1) * epoch


def test_q_agg_grid_matches_fp_agg():
    """Mirror the FP-Agg grid of figure 6, and share the static runs of figure 5."""
    for dataset in ("ogbn-arxiv", "ogbn-products"):
        fp, q = (
            grids.grid_specs(f"{dataset}/{name}")
            for name in (recipe("paper", dataset).model, "q_agg")
        )
        assert {s.recipe.aggregation for s in q} == {"quantized"}
        back = [replace(s, recipe=replace(s.recipe, aggregation="fp")) for s in q]
        assert [s.key for s in back] == [s.key for s in fp]
        both = grids.grid_specs(f"{dataset}/aggregation")
        assert Counter((s.arm, s.q_max, s.recipe.aggregation) for s in both) == {
            ("static 8", 8, "fp"): 3,
            ("static 8", 8, "quantized"): 3,
        }
        assert len({s.key for s in q} & {s.key for s in both}) == 3


def test_authors_preset_sets_gradients_and_milestones():
    spec, *_ = designs.quality_cost(
        "paper", "cifar10", preset="authors", q_max=[6], seeds=[0], schedules=["CR"]
    )
    assert spec.q_grad == 8
    imagenet = recipe("paper", "imagenet", None, "authors")
    assert [int(m * imagenet.steps) for m in imagenet.milestones] == [
        30 * 5005,
        60 * 5005,
    ]


@pytest.mark.parametrize("scale", RECIPES)
def test_run_spec_roundtrips_for_every_recipe(scale):
    for key, r in RECIPES[scale].items():
        spec = run_spec(r, "CR", q_max=8, seed=1, scale=scale)
        again = RunSpec.from_dict(spec.to_dict())
        assert (again, again.key) == (spec, spec.key), key
        assert spec.schedule.q_min == r.q_min


def test_run_key_ignores_only_grid_seeds():
    spec = run_spec(recipe("demo"), "CR", q_max=8, seed=0)
    assert replace(spec, recipe=replace(spec.recipe, seeds=(7,))).key == spec.key
    for other in (
        *(
            run_spec(recipe("demo"), "CR", q_max=8, seed=seed)
            for seed in (1, 256, 1_000, 2**32)
        ),
        run_spec(recipe("demo"), "RR", q_max=8, seed=0),
        run_spec(recipe("demo"), "CR", q_max=8, seed=0, q_grad=6),
        run_spec(replace(recipe("demo"), lr=0.031), "CR", q_max=8, seed=0),
    ):
        assert other.key != spec.key


LATER = {
    "autocast": ("", "bfloat16"),
    "tf32": (False, True),
    "channels_last": (False, True),
    "execution": ("simulated", "integer"),
    "shared_steps": (False, True),
    "lr_rule": ("milestones", "cosine"),
}


@pytest.mark.parametrize("name", LATER)
def test_run_spec_omits_default_later_fields(name):
    """Omit fields that were added later at their default, so that keys of older rows stay valid."""
    default, other = LATER[name]
    plain = run_spec(recipe("demo"), "CR", q_max=8, seed=0)
    assert name not in plain.to_dict()["recipe"]
    assert (
        replace(plain, recipe=replace(plain.recipe, **{name: default})).key
        == plain.key
        == "ce573962865680b4"
    )
    changed = replace(plain, recipe=replace(plain.recipe, **{name: other}))
    assert changed.key != plain.key
    assert changed.to_dict()["recipe"] == {**plain.to_dict()["recipe"], name: other}
    assert RunSpec.from_dict(changed.to_dict()) == changed != plain


def test_recipe_rejects_unknown_arithmetic():
    for experiment in EXPERIMENTS.values():
        some = next(
            r
            for d in experiment.datasets
            for recipes in d.recipes.values()
            for r in recipes
        )
        for name, wrong in (
            ("autocast", "float16"),
            ("autocast", None),
            ("tf32", 1),
            ("channels_last", "yes"),
            ("execution", "auto"),
            ("shared_steps", "no"),
        ):
            refused(
                rf"{name} (must be .*, got )?{wrong!r}", replace, some, **{name: wrong}
            )


def test_static_arm_keeps_gradient_bits():
    """Keep the gradient bits in a static arm of fewer bits, and lower its cost."""
    spec = run_spec(recipe("demo"), "static 5", q_max=8, seed=0)
    assert spec.q_grad == 8
    assert relative_cost(
        spec.schedule.bits(), spec.q_max, spec.q_grad
    ) == pytest.approx(105 / 192)


def test_run_spec_accepts_user_schedule():
    r = recipe("demo")
    curve = FunctionSchedule(lambda u: 3 + 5 * u, total_steps=r.steps)
    spec = RunSpec(r, curve, q_max=8, q_grad=8, seed=0, arm="mine", scale="demo")
    assert spec.schedule.bits().tolist() == curve.bits().tolist()
    assert RunSpec.from_dict(spec.to_dict()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(ValueError, match="the schedule has 3 steps, the recipe 600"):
        RunSpec(
            r,
            FunctionSchedule(lambda u: 3 + u, total_steps=3),
            q_max=8,
            q_grad=8,
            seed=0,
            arm="x",
            scale="demo",
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: designs.quality_cost("huge"),
            r"unknown scale 'huge'; choose from smoke, demo, background, paper",
        ),
        (
            lambda: designs.quality_cost("demo", "mnist"),
            r"no demo recipe for dataset 'mnist'; choose from cifar10, digit-scenes, digits",
        ),
        (
            lambda: designs.quality_cost("demo", "digits", "vgg"),
            r"unknown model 'vgg'; choose from mlp6, resnet8_w8",
        ),
        (
            lambda: designs.quality_cost("demo", preset="authors"),
            r"preset 'authors' exists at scale 'paper'",
        ),
        (
            lambda: designs.quality_cost("demo", schedules=["XR"]),
            r"unknown schedule 'XR'; choose from LR",
        ),
        (
            lambda: designs.quality_cost("demo", stepz=3),
            r"a recipe has no stepz; it has task",
        ),
        (
            lambda: designs.quality_cost("demo", seeds=3),
            r"seeds must be Sequence\[int\] or None, got 3",
        ),
        (
            lambda: designs.deficit_scan("demo", seeds="01"),
            r"seeds must be Sequence\[int\] or None, got '01'",
        ),
        (
            lambda: designs.equal_cost("demo", seeds=0),
            r"seeds must be Sequence\[int\] or None, got 0",
        ),
        (
            lambda: designs.execution("demo", seeds=0),
            r"seeds must be Sequence\[int\] or None, got 0",
        ),
        (
            lambda: designs.quality_cost("demo", schedules="CR"),
            r"schedules must be Sequence\[str\], got 'CR'",
        ),
        (
            lambda: designs.quality_cost("demo", static_bits=8),
            r"static_bits must be Sequence\[int\] or None, got 8",
        ),
        (
            lambda: designs.quality_cost("demo", static_bits=[9]),
            r"static_bits: expected .* up to q_max = 8, got 9",
        ),
        (
            lambda: designs.quality_cost("demo", q_max=8),
            r"q_max must be Sequence\[int\] or None, got 8",
        ),
        (
            lambda: designs.quality_cost("demo", q_max=[]),
            r"q_max: expected at least one integer .* got none",
        ),
        (
            lambda: designs.quality_cost("demo", q_max=[33]),
            r"q_max must be an integer from 1 to 32, got 33",
        ),
        (
            lambda: designs.quality_cost("demo", q_min=9),
            r"q_min: expected an integer from 1 to q_max = 8, got 9",
        ),
        (
            lambda: designs.quality_cost("demo", q_max=[8, 2]),
            r"q_min: expected an integer from 1 to q_max = 2, got 3",
        ),
        (
            lambda: designs.quality_cost("demo", q_grad=99),
            r"q_grad must be an integer from 1 to 32, got 99",
        ),
        (
            lambda: designs.quality_cost("demo", steps=0),
            r"steps must be a whole number of at least 1, got 0",
        ),
        (
            lambda: designs.quality_cost("demo", learning_rate=0),
            r"learning_rate: expected a number above 0, got 0",
        ),
        (
            lambda: designs.quality_cost("demo", learning_rate="1"),
            r"learning_rate: expected a number above 0, got '1'",
        ),
        (
            lambda: designs.quality_cost("demo", learning_rate=1, lr=1),
            r"learning_rate: expected None beside lr",
        ),
        *(
            (
                lambda seed=seed: designs.quality_cost("demo", seeds=[seed]),
                rf"seed must be .* at least 0, got {seed!r}",
            )
            for seed in ("0", 1.0, True, -1)
        ),
        (
            lambda: run_spec(recipe("demo"), "CR", q_max=8.5, seed=0),
            r"q_max must be an integer, got 8.5",
        ),
        (
            lambda: run_spec(recipe("demo"), "CR", q_max=8, q_grad=64, seed=0),
            r"q_grad must be an integer from 1 to 32",
        ),
        (
            lambda: run_spec(recipe("demo"), "static x", q_max=8, seed=0),
            r"written 'static 5', got 'static x'",
        ),
        (lambda: RunSpec.from_dict({"version": 0}), r"spec version 0 is not 1"),
        (
            lambda: check_parameters(scale="big"),
            r"scale must be one of smoke, demo, background, paper; got 'big'",
        ),
        (
            lambda: check_parameters(sclae="demo"),
            r"unknown parameter 'sclae'; did you mean 'scale'\?",
        ),
        (
            lambda: check_parameters(schedules='["XR"]'),
            r"schedules must be a list of LR, .* got 'XR' in \['XR'\]",
        ),
        (
            lambda: check_parameters(schedules="CR"),
            r"schedules must be a list of LR, .* got 'CR': write \[CR\]",
        ),
        (
            lambda: check_parameters(q_max=6),
            r"q_max must be a list of whole numbers .* got 6: write \[6\]",
        ),
        (
            lambda: check_parameters(q_max=[6, 64]),
            r"q_max must be a list of whole numbers .* got 64 in \[6, 64\]",
        ),
        (
            lambda: check_parameters(static_bits=8),
            r"static_bits must be a list .*, or None; got 8: write \[8\]",
        ),
        (
            lambda: check_parameters(q_min="3"),
            r"q_min must be a whole number from 1 to 32, or None; got '3'",
        ),
        (
            lambda: check_parameters(seeds=[]),
            r"seeds must be a list of at least one .*; None takes the recipe's; got",
        ),
        (
            lambda: check_parameters(learning_rate="1e-3"),
            r"a number above 0 \(in YAML with a point.*got '1e-3'",
        ),
        (
            lambda: check_parameters(decay=["linear"]),
            r"decay must be a list of recipe, constant, step, cosine",
        ),
        (
            lambda: check_parameters(controls=1),
            r"controls must be True or False; got 1",
        ),
        (
            lambda: check_parameters(scale="demo", dataset="mnist"),
            r"dataset must be one of digits",
        ),
        (
            lambda: check_parameters(scale="demo", dataset="digits", model="x"),
            r"unknown model 'x'",
        ),
        (
            lambda: check_parameters(pairs="digits"),
            r"pairs must be one of templates, xnli, a folder of your own",
        ),
        (
            lambda: check_parameters("language_model", dataset="digits"),
            r"'digits' is for another notebook: its task",
        ),
        (
            lambda: recipe("paper", "own-graph"),
            r"imagenet, ogbn-arxiv, ogbn-products, ptb, voc2012, xnli, or your own data",
        ),
        (
            lambda: recipe("demo", "own-pairs"),
            r"no demo recipe for dataset 'own-pairs'; choose from cifar10",
        ),
        (
            lambda: recipe("demo", "x/", task="text"),
            r"unknown task 'text'; choose from image, detection, graph",
        ),
        (
            lambda: designs.quality_cost("demo", "xnli", task="image"),
            r"dataset 'xnli' is for task 'entailment'",
        ),
        (
            lambda: check_parameters(seeds=[True]),
            r"seeds must be a list of whole numbers",
        ),
    ],
)
def test_quality_cost_design_rejects_wrong_values(call, message):
    refused(message, call)


def test_run_spec_accepts_arrays_and_known_datasets():
    own = designs.quality_cost(
        "smoke", schedules=["CR"], static_bits=[], seeds=range(2)
    )
    theirs = designs.quality_cost(
        "smoke",
        schedules=["CR"],
        static_bits=[],
        seeds=np.arange(2),
        q_max=np.array([8]),
    )
    assert [spec.key for spec in theirs] == [spec.key for spec in own]
    refused(
        "unknown dataset 'nope'",
        replace,
        own[0],
        recipe=replace(own[0].recipe, dataset="nope"),
    )


def test_check_parameters_separates_smoke_stores():
    """Give every smoke run a separate store, so that it never resumes."""
    assert (
        check_parameters(scale="smoke").store != check_parameters(scale="smoke").store
    )
    assert check_parameters(scale="demo").store == check_parameters(scale="demo").store


OWN = {  # scale, data set, model, task -> fields of the nearest recipe
    ("paper", "photos/", None, "image"): {"size": 224},
    ("paper", "a.npz,b.npz", None, "image"): {"size": 32},
    ("demo", "photos/", None, "image"): {"dataset": "photos/"},
    ("demo", "my.npz", None, "graph"): {"model": "gcn"},
    ("demo", "ogbn-arxiv", None, "graph"): {"hidden": 32},  # below paper scale
    ("paper", "my/", "sage", "graph"): {"batch": 1024},
    ("demo", "mine/", None, "entailment"): {"model": "bert_small"},
    ("paper", "mine/", None, "entailment"): {
        "checkpoint": "bert-base-multilingual-cased"
    },
    ("demo", "xnli", None, "entailment"): {"dataset": "xnli", "checkpoint": ""},
}


@pytest.mark.parametrize("asked", OWN)
def test_recipe_falls_back_to_nearest_family(asked):
    scale, dataset, model, task = asked
    found = recipe(scale, dataset, model, task=task)
    assert {name: getattr(found, name) for name in OWN[asked]} == OWN[asked]


@pytest.mark.parametrize(
    ("dataset", "changes", "message"),
    [
        *(
            (
                "digits-graph",
                {field: "nonsense"},
                f"unknown {field} 'nonsense'; choose from",
            )
            for field in ("norm", "loss", "aggregation", "inference", "lr_rule")
        ),
        *(
            ("digits", {"batch": batch}, f"a whole number of at least 1, got {batch}")
            for batch in (0, -3)
        ),
        ("digits", {"lr": float("nan")}, "lr must be a number of at least 0, got nan"),
        ("digits", {"lr": -1}, "lr must be a number of at least 0, got -1"),
        (
            "digits",
            {"weight_decay": float("inf")},
            "weight_decay must be a number of at least 0, got inf",
        ),
        ("digits", {"steps": "600"}, "steps must be an integer, got '600'"),
        (
            "digits",
            {"eval_bits": "x"},
            "unknown eval_bits 'x'; choose from q_max, current",
        ),
        ("digits", {"cycle_rule": "x"}, "unknown cycle_rule 'x'; choose from exact"),
        (
            "digits",
            {"milestones": (0.5, 3.0)},
            "milestones must be shares of the steps",
        ),
        ("digits-graph", {"degrees": (5, 2)}, "must rise"),
        ("digits-graph", {"degrees": (2, 2)}, "must rise"),
        ("digits-graph", {"degrees": (-1,)}, "at least 0"),
        (
            "templates",
            {"padding": "short"},
            "unknown padding 'short'; choose from max, longest",
        ),
        (
            "templates",
            {"test_languages": ()},
            "test_languages must name at least one language",
        ),
        (
            "pydoc",
            {"lr_rule": "plateau", "evaluate_every": 0},
            "lr_rule 'plateau' needs evaluations",
        ),
        (
            "pydoc",
            {"lr_rule": "steps"},
            "unknown lr_rule 'steps'; choose from plateau, cosine, step, constant",
        ),
        (
            "pydoc",
            {"unit": "bytes"},
            "unknown unit 'bytes'; choose from words, characters",
        ),
    ],
)
def test_recipe_rejects_wrong_fields(dataset, changes, message):
    refused(message, replace, recipe("smoke", dataset), **changes)


def test_quality_cost_runs_every_learning_rate():
    specs = designs.quality_cost(
        "paper", "xnli", schedules=["CR"], q_max=[8], seeds=[0]
    )
    assert [(s.arm, s.recipe.lr) for s in specs] == [
        (arm, lr) for arm in ("CR", "static 8") for lr in (5e-6, 1e-5, 5e-5)
    ]
    assert len({s.key for s in specs}) == 6
    fixed = designs.quality_cost(
        "paper", "xnli", schedules=["CR"], static_bits=[], q_max=[8], seeds=[0], lr=2e-5
    )
    assert [(s.recipe.lr, s.recipe.learning_rates) for s in fixed] == [(2e-5, ())]
    authors = designs.quality_cost(
        "paper",
        "xnli",
        preset="authors",
        schedules=["CR"],
        static_bits=[],
        q_max=[8],
        seeds=[0],
    )
    assert [s.recipe.lr for s in authors] == [1e-5]


# --- what is declared -----------------------------------------------------------------------------


@pytest.mark.parametrize("task", EXPERIMENTS)
def test_experiment_declarations_are_consistent(task):
    experiment = EXPERIMENTS[task]
    families = {d.name: d for d in experiment.datasets}
    assert len(families) == len(experiment.datasets)
    assert {
        name
        for name in (experiment.user_data_like, experiment.large_user_data_like)
        if name
    } <= set(families)
    for d in experiment.datasets:
        recipes = [r for found in d.recipes.values() for r in found]
        assert {(type(r), r.task) for r in recipes} <= {(experiment.recipe, task)}
        assert set(d.recipes) <= set(SCALES)
        assert all(
            len({r.model for r in found}) == len(found) for found in d.recipes.values()
        )
        assert not d.title or {r.dataset for r in recipes} <= {d.name}
        assert not d.like or set(families[d.like].recipes) == set(SCALES) - {
            "background"
        }
        assert all(
            model in {r.model for r in d.recipes[scale]}
            for scale in d.deficits
            for model in d.deficits[scale]
        )
        assert set(d.designs) <= set(grids.GRID_DESIGNS)
        assert not d.authors or set(d.authors) - {""} <= {
            r.model for r in d.recipes["paper"]
        }


def test_dataset_name_has_one_task():
    assert len(DATASETS) == sum(len(e.named_datasets) for e in EXPERIMENTS.values())
    for task, experiment in EXPERIMENTS.items():
        assert {task_of_dataset(name) for name in experiment.named_datasets} == {task}
    for unnamed in (
        "own-graph",
        "own-pictures",
        "own-pairs",
        "mnist",
        "my/images",
        "a.npz",
    ):
        assert task_of_dataset(unnamed) is None


@pytest.mark.parametrize(
    "path",
    ["my/images", "images/", "a.npz,b.npz", "g.pt", "C:\\data\\images", "images\\"],
)
def test_user_paths_are_recognised_on_every_system(path):
    assert is_own(path)
    assert not any(map(is_own, DATASETS))


def test_grid_descriptions_identify_embedded_data():
    for name, grid in grids.GRIDS.items():
        if name in STAND_INS:
            continue
        d = DATASETS[name.split("/")[0]]
        assert grid.description.startswith(d.title)
        assert ("embedded" in grid.description) == bool(d.embedded)
        assert bool(d.embedded) == ("paper" not in d.recipes), name
    scales = [grid.scales[0] for grid in grids.GRIDS.values()]
    assert scales == sorted(
        scales, key=lambda scale: scale != "paper"
    )  # the paper's own come first


@pytest.mark.parametrize(
    "name", [name for name in grids.GRIDS if "deficit" in name or "equal_cost" in name]
)
def test_grid_arms_are_unique_with_every_seed(name):
    for scale in grids.GRIDS[name].scales:
        specs = grids.grid_specs(name, scale)
        assert len({s.key for s in specs}) == len(specs)
        assert Counter((s.arm, s.seed) for s in specs) == {
            (s.arm, seed): 1 for s in specs for seed in s.recipe.seeds
        }


def test_select_filters_runs_by_every_condition():
    specs = designs.quality_cost("demo", seeds=[0, 1])
    kept = grids.select(specs, savings=["small", "static"])
    assert {s.arm for s in kept} == {
        a for a, m in SUITE.items() if m.savings == "small"
    } | {f"static {b}" for b in range(2, 9)}
    assert grids.select(specs) == specs
    both = grids.select(specs, arms=["CR", "ER"], savings=["small"])
    assert {(s.arm, s.seed) for s in both} == {("ER", 0), ("ER", 1)}


@pytest.mark.parametrize(
    ("name", "runs", "arms", "seeds"),
    [
        ("cifar10-jpeg/figure_3", 60, 15, 4),
        ("cifar10-jpeg/figure_3_q_max_6", 33, 11, 3),
        ("cifar10-jpeg/table_1", 36, 9, 4),
        ("digits/q_max_6", 150, 15, 10),
        ("facebook/q_max_6", 88, 11, 8),
        ("facebook/q_agg", 88, 11, 8),
        ("cora/q_agg", 88, 11, 8),
        ("facebook/sage", 66, 11, 3),
        ("facebook/fanout", 24, 1, 3),
        ("pydoc/q_max_6", 120, 15, 8),
        ("xnli/figure_7", 72, 12, 3),
        ("xnli/one_and_two_cycles", 36, 3, 3),
    ],
)
def test_stand_in_grids_match_figures(name, runs, arms, seeds):
    specs = grids.grid_specs(name)
    assert len({s.key for s in specs}) == len(specs) == runs
    assert len({s.arm for s in specs}) == arms
    assert len({s.seed for s in specs}) == seeds


def test_cifar_stand_in_grids_order_by_seed():
    specs = grids.grid_specs("cifar10-jpeg/figure_3")
    assert [s.seed for s in specs] == [
        seed for seed in (10, 11, 12, 13) for _ in range(15)
    ]
    assert [s.arm for s in specs[:5]] == ["static 8", "CR", "RR", "ER", "static 4"]


def test_deficits_without_controls_match_table_1():
    arms = {s.arm for s in grids.grid_specs("cifar10-jpeg/table_1")}
    assert sum(arm.startswith("no deficit") for arm in arms) == 1
    assert "[3900, 7800) of 7800" not in arms
    assert "[0, 3900) of 7800" in arms
