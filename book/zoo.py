"""Page of the site about models of other libraries, from the results of ``python -m bench.zoo``."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from bench.third_party.results import FILE as PROOFS
from bench.third_party.results import OUTCOMES
from bench.zoo import FILE, LOOPS
from cpt_lab.paths import results_dir

NEGLIGIBLE_SHARE = 0.01  # of the MACs of a model: less than that in float32, or undecided, is no part of the model


def read_results() -> dict[str, Any]:
    """Return the stored results of ``bench.zoo``."""
    return json.loads((results_dir() / FILE).read_text(encoding="utf-8"))


def is_whole(row: dict[str, Any]) -> bool:
    """Return whether a model trains with matmuls that were seen to be quantised, except for less than 1 %.

    The rest runs in float32 where ``check`` names it, or has operands too small to tell.
    """
    if row["outcome"] not in ("whole", "in part"):
        return False
    rest = 1 - row["share"] + row["undecided"]
    return row["finite"] and not row["unknown"] and rest < NEGLIGIBLE_SHARE


def outcome_of(row: dict[str, Any]) -> str:
    """Return the outcome of a model as the page counts it."""
    if is_whole(row):
        return "whole"
    if row["outcome"] != "whole":
        return row["outcome"]
    return "undecided" if row["finite"] else "not finite"


def title(models: list[dict[str, Any]]) -> str:
    """Return the title of the page: how many models train quantised."""
    count = sum(map(is_whole, models))
    share = f"{1 - NEGLIGIBLE_SHARE:.0%}".replace("%", " %")
    return (
        f"{count} of {len(models)} models of other libraries train with more than {share} of their MACs "
        "seen to be quantised"
    )


def page() -> str:
    """Return the page in Markdown."""
    results = read_results()
    models = results["models"]
    versions = dict.fromkeys(
        f"{row['library']} {row['version']}" for row in models if "version" in row
    )
    outcomes = Counter(map(outcome_of, models))
    counts = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
    commits = dict.fromkeys(
        f"`{row.get('commit', results['commit'])[:10]}`" for row in models
    )
    proven = ""
    if not outcomes["silent"]:
        proven = " No matmul ran in float32 that `cpt.check` calls quantised."
    lines = [
        f"# {title(models)}",
        "",
        f"`python -m bench.zoo` tried {len(models)} models of {len(versions)} libraries at commit "
        f"{', '.join(commits)}, each small and without weights. `cpt.quantize_` "
        "converted it, and it trained for three steps. A watcher that asks nothing of this package looked at the "
        f"operands of every matmul of a forward pass at 2 bits: {counts}." + proven,
        "",
        "*Quantised* is the share of the multiply-accumulates (MACs) whose operands are on a grid, as the watcher saw "
        "it, among those that it could decide; *undecided* is the share whose operands have too few numbers to tell, "
        "with operations that it cannot look into. *MACs* says whether `cpt.check` counts as many as the watcher. "
        f"*Use* names what went wrong when the model was used: {', '.join(LOOPS)}, with rounding to nearest. What "
        "float32 does no better is left out.",
        "",
        f"Versions: {', '.join(versions)}.",
        "",
        "| library | model | quantised | undecided | MACs | use | in float32, and why |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['library']} | {row['model']} | {' | '.join(_cells(row))} |"
        for row in models
    ]
    lines += proofs()
    return "\n".join(lines) + "\n"


def proofs() -> list[str]:
    """Return the sections about torch's databases and about invariances."""
    results = json.loads((results_dir() / PROOFS).read_text(encoding="utf-8"))
    invariances = results["invariances"]
    bits = " and ".join(map(str, invariances["bits"]))
    lines = [
        "",
        "## Torch's own layers and functions",
        "",
        "Torch tests itself with lists of its layers and functions, and of inputs for each. `make third-party` runs "
        "all of them beside a linear layer: plain, converted in float mode, at 3 bits, copied, and after "
        "`cpt.restore_`.",
        "",
        f"| at commit `{results['layers']['commit'][:10]}` | layers | functions |",
        "|---|---|---|",
    ]
    tables = [results[part]["counts"] for part in ("layers", "functions")]
    for title, key in PROOF_ROWS:
        lines.append(
            f"| {title} | {' | '.join(f'{counts.get(key, 0):,}' for counts in tables)} |"
        )
    lines += [
        "",
        "## What float32 keeps, low precision keeps",
        "",
        f"{invariances['models']} models with random weights trained for {invariances['training passes']} passes and "
        f"answered in evaluation at {bits} bits. A property *holds* if outputs that do not move in float32 (by more "
        "than one millionth) do not move at low bits either. It *holds in float64* if float32 adds up in another order "
        "and that flips a rounding. The number of models:",
        "",
        f"| at commit `{invariances['commit'][:10]}` | {' | '.join(OUTCOMES)} |",
        f"|---|{'---|' * len(OUTCOMES)}",
    ]
    for question, counts in invariances["questions"].items():
        lines.append(
            f"| {question} | {' | '.join(str(counts.get(outcome, 0)) for outcome in OUTCOMES)} |"
        )
    reasons = dict.fromkeys(answer["reason"] for answer in invariances["broken"])
    lines += ["", "Why some are broken:", ""] if reasons else []
    for reason in reasons:
        models = dict.fromkeys(
            a["model"].partition(",")[0]
            for a in invariances["broken"]
            if a["reason"] == reason
        )
        lines.append(f"- {reason}: {', '.join(models)}.")
    return lines + suite_section(results.get("suites", {}))


def suite_section(suite: dict[str, Any]) -> list[str]:
    """Return the section about tests of other libraries, if they ran."""
    if "counts" not in suite:
        return []
    counts = suite["counts"]
    return [
        "",
        f"## Tests of {suite['suite']}",
        "",
        "Common tests of its models (training, checkpointing, saving and loading, tied weights, attention outputs and "
        f"more) that pass with plain models: {counts['plain']['passed']}. With converted models in float mode pass "
        f"{counts['float']['passed']}, at 8 bits {counts['8']['passed']}.",
    ]


PROOF_ROWS = (
    ("cases", "examined"),
    ("cases with gradients", "gradients compared"),
    (
        "cases without a fault: float mode equals plain torch bit for bit, copies and `restore_` are exact",
        "without a fault",
    ),
    ("cases with matmuls, all quantised", "matmuls: quantised"),
    (
        "cases with a matmul in float32 that `cpt.check` names",
        "matmuls: named float32",
    ),
    (
        "cases with matmuls of two numbers, which any grid holds exactly",
        "matmuls: two numbers per range",
    ),
    ("cases without matmuls, unchanged at 3 bits", "matmuls: none"),
)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "share" not in row:
        return row["outcome"], "", "", "", row["said"].replace("|", "\\|")
    macs = (
        "equal"
        if row["macs"] == row["macs of check"]
        else f"{row['macs']:,} ran, {row['macs of check']:,} counted"
    )
    failed_uses = [
        name for name, right in row["loops"].items() if right not in (True, None)
    ]
    layers = [f"{place} ({n / row['macs']:.1%})" for place, n in row["float32"].items()]
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    float32_layers = f"{', '.join(layers[:3])}{more}"
    if not row["finite"]:
        failed_uses.insert(0, "training is not finite")
    use_text = ", ".join(failed_uses) or "right"
    undecided = [f"{row['undecided']:.1%}"] if row["undecided"] else []
    return (
        f"{row['share']:.2%}".replace("100.00%", "100%"),
        ", ".join([*undecided, *row["unknown"]]),
        macs,
        use_text,
        float32_layers,
    )
