"""Effects and verdicts of claims on synthetic runs with known effects of both signs, as a golden file."""

from functools import partial

import pytest

from cpt_lab.analysis import claims, run_table
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs, grids
from tests.analysis.synthetic import DIVERGED_EVALUATION, by_arm, lost, rows_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("few_preregistered"),
    pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning"),
]

demo = partial(designs.quality_cost, "demo", static_bits=[8], seeds=range(3))
paper = partial(designs.quality_cost, "paper", q_max=[8])
deficit_length = partial(designs.deficit_length, "demo", "digits", seeds=range(3))
deficit_scan = partial(designs.deficit_scan, "demo", "digits", seeds=range(3))


def window_of(spec):
    """Return start and stop of a deficit, 0 and 0 for none."""
    ((start, stop),) = spec.schedule.windows or ((0, 0),)
    return start, stop


def by_mean_bits(sign):
    return rows_of(demo(), lambda s: 0.5 + 0.1 * sign * s.schedule.bits().mean())


def by_noise(*datasets):
    specs = [spec for dataset in datasets for spec in demo(dataset)]
    return rows_of(specs, lambda s: 0.5 - 1e-4 * s.schedule.noise_exposure())


def perplexities(six, large=10.0):
    """Return perplexities of static 6 at q_max 6, of the large savings, and of 10 elsewhere."""
    specs = demo("pydoc", schedules=["RR", "RTH"])
    specs += demo("pydoc", schedules=[], static_bits=[6], q_max=[6])
    values = {"static 6": six, "RR": large, "RTH": large}
    return rows_of(specs, lambda s: values.get(s.arm, 10.0), "perplexity")


def deficits(sign):
    """Return deficits that cost 5 points per 100 steps, and 1 point less per 100 steps of delay."""

    def value(spec):
        start, stop = window_of(spec)
        late = 0 if stop == spec.recipe.steps else start / 10_000
        return 0.9 - sign * ((stop - start) / 2_000 - late)

    return rows_of(deficit_scan(), value)


def deficits_of_lost_time():
    """Return deficits that only count as half of the training."""

    def value(spec):
        start, stop = window_of(spec)
        return 0.5 + (spec.recipe.steps - (stop - start) / 2) / 10_000

    return rows_of(deficit_length(), value)


def costs_by_length(cost):
    """Return early deficits that cost ``cost(steps)``."""
    return rows_of(deficit_length(), lambda s: 0.9 - cost(window_of(s)[1]))


def deficits_as_training_gains(sign):
    """Return windows whose damage rises with the accuracy gained meanwhile, or falls."""
    steps = range(50, 601, 50)
    curve = [
        {"step": t, "test": {"accuracy": 0.9 - 0.9 * 2 ** (-t / 100)}} for t in steps
    ]

    def value(spec):
        start, stop = window_of(spec)
        if not stop:
            return 0.9
        return 0.7 + sign * (start if stop < spec.recipe.steps else -2_000) / 10_000

    rows = rows_of(deficit_scan(), value)
    return [{**row, "evaluations": curve} for row in rows]


def both_aggregations_of_arxiv():
    fp = by_arm(paper("ogbn-arxiv"), {"static 8": 0.9})
    q_agg = designs.q_agg("paper", "ogbn-arxiv", q_max=[8])
    return fp + by_arm(q_agg, {"static 8": 0.6})


def validation_and_test(test_gap):
    """Return FP-Agg a point better on validation nodes, and ``test_gap`` on test nodes."""
    specs = designs.aggregation("paper", "ogbn-arxiv")
    rows = rows_of(specs, lambda s: 0.7 + test_gap * (s.recipe.aggregation == "fp"))
    for row, spec in zip(rows, specs, strict=True):
        gap = 0.01 * (spec.recipe.aggregation == "fp") + 1e-4 * spec.seed
        valid = {"split": "valid", "value": 0.7 + gap}
        row["metrics"].append({**row["metrics"][0], **valid})
    return rows


def sampled(sign):
    """Return Q-Agg that loses, or gains, with the number of sampled neighbours."""

    def value(spec):
        is_quantized = spec.recipe.aggregation == "quantized"
        return 0.7 - sign * 0.001 * spec.recipe.fanout * is_quantized

    return rows_of(grids.grid_specs("ogbn-products/fanout"), value)


def best_schedules(sign, text="RR"):
    """Return ER as the best on digits in seeds that choose, and in others for sign 1; another on text."""

    def value(spec):
        return 0.8 + 0.1 * (spec.arm == "ER") * (1 if spec.seed % 2 == 0 else sign)

    rows = rows_of(demo(seeds=range(8)), value)
    pydoc = demo("pydoc", seeds=range(8))
    return rows + (by_arm(pydoc, {text: 0.7}, "perplexity") if text else [])


def ptb_at_six_bits(*q_max):
    specs = paper("ptb", q_max=q_max)
    values = {("CR", 6): 99.0}
    return rows_of(specs, lambda s: values.get((s.arm, s.q_max), 90.0), "perplexity")


# claim -> its runs, whether a run has the effect, and the sizes of the effect
DIRECTIONS = {
    "cycles": (
        lambda: [
            spec
            for n in (2, 8)
            for spec in demo(n_cycles=n, schedules=["CR"], static_bits=[])
        ],
        lambda s: s.recipe.n_cycles == 8,
        (0.0, -0.05),
    ),
    "entailment_cycles": (
        lambda: [
            s
            for s in grids.grid_specs("xnli/cycles")
            if s.recipe.lr == 1e-5 and s.q_max == 8
        ],
        lambda s: s.recipe.n_cycles == 1,
        (0.0, 0.02),
    ),
    "products_fanout": (
        lambda: grids.grid_specs("ogbn-products/fanout"),
        lambda s: s.recipe.fanout == 64,
        (0.0, 0.02),
    ),
    "deficit_decay": (
        lambda: deficit_length(deficit_lengths=[100], decay=["step", "cosine"]),
        lambda s: s.schedule.windows and s.recipe.lr_rule != "cosine",
        (0.0, -0.1),
    ),
    "gradients_stabilize": (
        lambda: demo(schedules=(), static_bits=[6], q_max=[6, 8]),
        lambda s: s.q_grad == 8,
        (0.01, -0.01),
    ),
    "gcn_aggregation": (
        lambda: designs.aggregation("demo", "digits-graph", seeds=range(3)),
        lambda s: s.recipe.aggregation == "fp",
        (0.01, 0.003, 0.0, -0.01),
    ),
    "sage_aggregation": (
        lambda: designs.aggregation("demo", "digits-graph", "sage", seeds=range(3)),
        lambda s: s.recipe.aggregation == "fp",
        (0.003, 0.0, 0.01),
    ),
    "delay": (
        lambda: designs.equal_cost("demo", "digits", seeds=range(3)),
        lambda s: "delayed" in s.arm,
        (0.05, -0.05),
    ),
    "detection_etv": (
        lambda: paper("voc2012", schedules=["ETV"]),
        lambda s: s.arm == "ETV",
        (0.015, 0.005, -0.015),
    ),
}


def directions():
    """Yield the runs of a claim with its effect, and runs of one side alone, which have no effect."""
    for claim, (specs_of, has, gaps) in DIRECTIONS.items():
        specs = specs_of()
        metric = "map50" if claim == "detection_etv" else "accuracy"
        for gap in gaps:
            rows = rows_of(
                specs, lambda s, gap=gap, has=has: 0.7 + gap * bool(has(s)), metric
            )
            yield f"{claim}: effect {gap:+}", rows, [claim]
        usual = [
            s for s in specs if claim != "deficit_decay" or s.recipe.lr_rule == "cosine"
        ]
        without = [s for s in usual if not has(s)]
        assert 0 < len(without) < len(specs)
        yield (
            f"{claim}: one side alone",
            rows_of(without, lambda s: 0.7, metric),
            [claim],
        )


def signs():
    """Yield runs with effects of both signs."""
    for sign in (1, -1):
        gains = {
            "ER": 0.8 + 0.1 * sign,
            "ETH": 0.8 + 0.1 * sign,
            "CR": 0.8 + 0.05 * sign,
        }
        names = ["schedule_controls", "cpt_improves", "other_schedules", "cifar_small"]
        yield f"ER and ETH {10 * sign:+}, CR {5 * sign:+}", by_arm(demo(), gains), names
        yield f"bits help {sign:+}", by_mean_bits(sign), ["cost_decides"]
        names = ["deficit_length", "deficit_window"]
        yield f"deficits cost {sign:+}", deficits(sign), names
        yield f"sampling {sign:+}", sampled(sign), ["products_sampling"]
        yield f"ER best on digits {sign:+}", best_schedules(sign), ["no_one_schedule"]
        rows = deficits_as_training_gains(sign)
        yield f"damage follows gains {sign:+}", rows, ["deficit_slope"]
        rows = validation_and_test(0.008 * sign)
        yield f"FP-Agg on test nodes {0.8 * sign:+}", rows, ["gcn_aggregation"]


def selections():
    """Yield runs of which a claim selects some."""
    small = ["cifar_small", "imagenet_small"]
    gains = {"ER": 0.9, "ETH": 0.9}
    yield "two seeds", by_arm(demo(seeds=range(2)), gains), ["schedule_controls"]
    smoke = designs.quality_cost("smoke", seeds=range(3))
    yield "smoke scale", by_arm(smoke, {"static 8": 0.9}), ["imagenet_large"]
    imagenet = by_arm(paper("imagenet"), {"static 8": 0.9})
    yield "ImageNet at paper scale", imagenet, ["imagenet_large"]
    cifar10 = by_arm(paper("cifar10"), {"static 8": 0.7})
    yield "CIFAR-10 at paper scale", cifar10, small
    yield "digits in place of both", by_arm(demo(), {"static 8": 0.7}), small
    for q_max in (6, 8):
        specs = paper("cifar100", schedules=["ER", "ETH"], q_max=[q_max])
        rows = by_arm(specs, {f"static {q_max}": 0.7})
        yield f"static {q_max} is the top", rows, small[:1]
    specs, nearly = paper("cifar10"), ["cifar_nearly_all"]
    one = by_arm(specs, {"static 8": 0.7, "RR": 0.6})
    yield "one of ten is worse", one, nearly
    two = by_arm(specs, {"static 8": 0.7, "RR": 0.6, "LT": 0.6})
    yield "two of ten are worse", two, nearly
    nine = [row for row in one if row["spec"]["arm"] != "ETH"]
    yield "nine schedules ran", nine, nearly
    scenes = demo("digit-scenes")
    for value in (0.7, 0.9):
        rows = by_arm(scenes, {"CT": value}, "map50")
        yield f"CT reaches {value}", rows, ["detection_all"]
    arxiv = ["arxiv_large", "arxiv_large_q_agg", "arxiv_small_q_agg", "products_large"]
    yield "both aggregations of arxiv", both_aggregations_of_arxiv(), arxiv
    yield "CR worse at 6 bits alone", ptb_at_six_bits(6, 8), ["language_cr"]
    yield "6 bits ran alone", ptb_at_six_bits(6), ["language_cr"]
    for six in (11.0, 9.0):
        rows = perplexities(six)
        yield f"perplexity {six} at 6 bits", rows, ["language_q_max"]
    yield "large savings worse", perplexities(10.0, 12.0), ["language_large"]
    yield "noise decides on digits", by_noise("digits"), ["noise_decides"]
    yield "noise decides on both", by_noise("digits", "digits-graph"), ["noise_decides"]
    rows = rows_of(demo(), lambda s: 0.5 + 0.1 * s.schedule.relative_cost())
    yield "cost decides on digits", rows, ["noise_decides"]
    yield "ER best on both", best_schedules(1, "ER"), ["no_one_schedule"]
    yield "digits alone", best_schedules(1, ""), ["no_one_schedule"]
    yield "deficits of lost time", deficits_of_lost_time(), ["deficit_length"]
    longer = rows_of(
        deficit_length(), lambda s: 0.5 - s.recipe.steps / 10_000, noise=1e-3
    )
    yield "longer training is worse", longer, ["deficit_length", "deficit_slope"]
    names = ["deficit_short", "deficit_longer"]
    rows = costs_by_length(lambda n: 0.0005 * n if n < 400 else 0.1)
    yield "short deficits cost, 200 steps as much as 400", rows, names
    rows = costs_by_length(lambda n: 0.0 if n < 400 else 0.3)
    yield "only 400 steps cost", rows, names
    specs = demo(static_bits=[3, 6, 8], q_max=[6, 8])
    quality = {("static 8", 8): 0.9, ("static 6", 6): 0.7}
    rows = rows_of(specs, lambda s: quality.get((s.arm, s.q_max), 0.5))
    yield "baselines of two q_max", rows, ["schedule_controls", "cpt_improves"]


def lost_runs():
    """Yield runs some of which diverged."""
    rows = by_arm(demo(seeds=range(4)), {})
    for arm in ("CR", "static 8"):
        yield (
            f"{arm} diverges",
            lost(rows, lambda a, _, arm=arm: a == arm),
            ["cpt_improves"],
        )
    rows = by_arm(demo(seeds=range(6)), {"CR": 0.85})
    yield "no run of CR diverges", rows, ["cpt_improves"]
    half = lost(rows, lambda arm, seed: arm == "CR" and seed < 3)
    yield "half of CR diverges", half, ["cpt_improves"]
    rr = lost(rows, lambda arm, seed: arm == "RR")
    yield "RR diverges", rr, ["schedule_controls"]
    for arm in ("RR", "static 8"):
        rows = lost(by_mean_bits(1), lambda a, _, arm=arm: a == arm)
        yield f"bits help, {arm} diverges", rows, ["cost_decides"]
    specs = designs.aggregation("demo", "digits-graph", "sage", seeds=range(5))
    for seeds in (3, 5):
        rows = lost(rows_of(specs, lambda s: 0.8), lambda _, seed, n=seeds: seed < n)
        yield f"{seeds} of 5 seeds diverge in both", rows, ["sage_aggregation"]


def entries_text(runs, names):
    """Return verdicts and evidence of some claims."""
    lines = []
    for entry in claims.judge_claims(runs, names):
        paper_words, small_words = entry.verdicts()
        lines.append(f"{entry.claim.id}: {entry.verdict(True)} at paper scale, else")
        lines.append(f"  {entry.verdict(False)}; {paper_words}; {small_words}")
        lines += [f"    {line}" for line in entry.evidence()]
        lines += [f"      {effect.stores}" for effect, _ in entry.effects[:1]]
    return "\n".join(lines)


@pytest.mark.parametrize("kind", [signs, selections, lost_runs, directions])
def test_claim_verdicts_follow_known_effects(kind, golden):
    text = ""
    for title, rows, names in kind():
        text += f"=== {title}\n{entries_text(table(rows), names)}\n"
    golden(f"claims/{kind.__name__}.txt", text)


@pytest.mark.parametrize("lost_seeds", [(1,), (0, 1, 2)])
@pytest.mark.parametrize(
    ("status", "error", "evaluations"),
    [
        ("failed", "MemoryError: no memory", []),
        ("failed", "ValueError: in the model", []),
        ("diverged", "", []),
        ("diverged", "", [DIVERGED_EVALUATION]),
    ],
)
def test_deficit_slope_omits_seeds_without_clean_run(
    status, error, evaluations, lost_seeds
):
    changed = []
    for row in deficits_as_training_gains(1):
        spec = row["spec"]
        if not spec["schedule"]["windows"] and spec["seed"] in lost_seeds:
            row = {**row, "status": status, "error": error, "metrics": []}
            row["evaluations"] = evaluations
        changed.append(row)
    (entry,) = claims.judge_claims(table(changed), ["deficit_slope"])
    ((effect, _),) = entry.effects
    assert effect.n == 3 - len(lost_seeds)
    if effect.n:
        assert effect.interval[0] == pytest.approx(1)


def test_preregistered_runs_count_for_two_claims(golden):
    """Judge the committed runs of H3 only by the two claims that name them."""
    names = [claim.id for claim in claims.claims() if claim.id.startswith("deficit")]
    golden("claims/h3.txt", entries_text(run_table.committed("h3"), names) + "\n")
