"""The page of the site about models of other libraries, made from what ``python -m bench.zoo`` has stored."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from bench.zoo import FILE, LOOPS
from cpt_lab.paths import results_dir

LEAST = 0.01  # of the products of a model: what is named and less than that is no part of the model


def found() -> dict[str, Any]:
    """Return what is stored."""
    return json.loads((results_dir() / FILE).read_text(encoding="utf-8"))


def is_whole(row: dict[str, Any]) -> bool:
    """Whether every product runs quantised, but for less than 1 % that ``check`` names."""
    return row["outcome"] in ("whole", "in part") and 1 - row["share"] < LEAST


def title(models: list[dict[str, Any]]) -> str:
    """Return the finding."""
    return f"{sum(map(is_whole, models))} of {len(models)} models of other libraries train with every product quantised"


def page() -> str:
    """Return the page."""
    stored = found()
    models = stored["models"]
    versions = dict.fromkeys(f"{row['library']} {row['version']}" for row in models if "version" in row)
    outcomes = Counter("whole" if is_whole(row) else row["outcome"] for row in models)
    lines = [
        f"# {title(models)}",
        "",
        f"`python -m bench.zoo` tried {len(models)} models of {len(versions)} libraries at commit "
        f"`{stored['commit'][:10]}`, each small and without weights. `cpt.quantize_` converted it, and it trained for "
        "three steps. A watcher that asks nothing of this package looked at the operands of every product of a forward "
        f"pass at 2 bits: {', '.join(f'{n} {outcome}' for outcome, n in outcomes.most_common())}."
        + " No product ran in float32 that `cpt.check` calls quantised."
        * (not outcomes["silent"]),
        "",
        "*Quantised* is the share of the multiply-accumulates (MACs) whose operands are on a grid, as the watcher saw "
        "it. *MACs* says whether `cpt.check` counts as many as the watcher. *Use* names what went wrong when the model "
        f"was used: {', '.join(LOOPS)}, with rounding to nearest. What float32 does no better is left out.",
        "",
        f"Versions: {', '.join(versions)}.",
        "",
        "| library | model | quantised | MACs | use | in float32, and why |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {row['library']} | {row['model']} | {' | '.join(_cells(row))} |" for row in models]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "share" not in row:
        return row["outcome"], "", "", row["said"].replace("|", "\\|")
    macs = "equal" if row["macs"] == row["macs of check"] else f"{row['macs']:,} ran, {row['macs of check']:,} counted"
    wrong = [name for name, right in row["loops"].items() if right not in (True, None)]
    plain = [f"{place} ({n / row['macs']:.1%})" for place, n in row["float32"].items()]
    more = f" and {len(plain) - 3} more" if len(plain) > 3 else ""
    why = f"{', '.join(plain[:3])}{more}"
    use = ", ".join(wrong) or "right"
    return f"{row['share']:.2%}".replace("100.00%", "100%"), macs, use, why
