"""What ``cpt try`` does with data: trains its recipe at several precisions and writes one page.  No torch.

The rows lie beside the page; the same command goes on from them.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from cpt_extras.figures import picture
from cpt_extras.files import write_text
from cpt_extras.search.search_loop import run_precision_search
from cpt_extras.search.search_result import (
    FLOAT32_ARM,
    STATIC_BITS,
    Arm,
    PrecisionSearchResult,
    Result,
)
from cpt_lab.analysis import data_reports
from cpt_lab.analysis.estimates import quality, unit_of
from cpt_lab.analysis.metrics import metric_of
from cpt_lab.analysis.rendering import Section, render
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import runs_dir
from cpt_lab.sweeps.result_row import ResultRow

FIGURE = "figure.png"
ALT = "difference to float32 against bit operations: static bits, schedules, fewer bits for gradients"
ANSWER = "answer.txt"  # beside the page: a line for the data set, one for the finding, the answer in words
MARGIN = 1.0  # points of a metric, or percent of a perplexity
EVALUATED = "Each of these trainings was evaluated on the test data at the bits with which it ended; notebooks take 8."
NOT_TRIED = (
    "Not tried: other learning rates (fewer bits may want another), longer trainings, bits that differ by layer, other "
    f"schedules. {EVALUATED}",
    "Differences are taken seed by seed, over the seeds that both trainings have. Brackets are 95 % intervals, not "
    "corrected for several comparisons, nor for looks after every seed: take what is clear as a good hint, not as a "
    "test. Low precision is simulated: bit operations count work, not seconds.",
    "What bits are and what a schedule is, notebook 00 teaches; how to choose them, notebook 08.",
)


def answer_sections(dataset: str, scale: str) -> list[Section]:
    """Return what was found for data, by model, with figures and links as seen from ``runs/reproduce/SCALE``."""
    found = []
    for path in sorted((runs_dir() / "try").glob(f"*-{scale}/{ANSWER}")):
        of, finding, *said = path.read_text(encoding="utf-8").splitlines()
        at = f"../../try/{path.parent.name}"
        table = pd.DataFrame(
            {
                "all of it": [
                    {"page": f"{at}/index.html", "name": "every training", "failed": ""}
                ]
            }
        )
        figure = f"{at}/{FIGURE}" if path.with_name(FIGURE).exists() else None
        if of == dataset:
            found.append(
                Section(f"{dataset}: {finding}", (*said, EVALUATED), figure, ALT, table)
            )
    return found


def specs(recipe: Recipe, scale: str, arms: Iterable[Arm], seed: int) -> list[RunSpec]:
    """Return the runs of arms: evaluated at the end alone, where the learning rate does not wait for evaluations."""
    if getattr(recipe, "lr_rule", "") != "plateau":
        recipe = replace(recipe, evaluate_every=0)
    return [
        RunSpec(recipe, a.schedule, STATIC_BITS[0], a.q_grad, seed, a.name, scale)
        for a in arms
    ]


def try_recipe(
    recipe: Recipe,
    scale: str,
    run: Callable[[list[RunSpec], Path], list[ResultRow]],
    *,
    at_once: int,
    minutes: float = 10,
    seeds: int = 10,
    margin: float = MARGIN,
    guessed: float | None = None,
    note: str = "",
) -> tuple[PrecisionSearchResult, Path]:
    """Return the answer for a recipe, and the page that says it; ``run(specs, store)`` is ``run_grid``.

    The page begins with the ``note``, a sentence about the model.

    Where float32 is no better than what is ``guessed``, the share of the commonest class, the answer says that.

    Raises:
        RuntimeError: when a run fails: the reason, and the log.
    """
    store, unit, title, of = _folder(recipe, scale) / "rows.jsonl", "", "", ""
    tried_rows: list[ResultRow] = []

    def results(arms: Sequence[Arm], seed: int) -> dict[str, Result]:
        nonlocal unit, title, of
        rows = run(specs(recipe, scale, arms, seed), store)
        if failed := [row for row in rows if row["status"] == "failed"]:
            reason = failed[0]["error"].strip().splitlines()[-1]
            raise RuntimeError(
                f"{failed[0]['spec']['arm']}, seed {seed}: {reason}; rows and logs: {store.parent}"
            )
        tried_rows.extend(rows)
        frame = table(rows)
        unit, title, of = unit_of(frame), rows[0]["title"], metric_of(frame)
        values = pd.Series(quality(frame, 1, "_current")).where(
            (frame["status"] == "ok").to_numpy()
        )
        return {
            a.name: Result(float(v), row["seconds"])
            for a, v, row in zip(arms, values, rows, strict=True)
        }

    found = run_precision_search(
        results,
        recipe.dataset,
        recipe.steps,
        cycles=recipe.n_cycles,
        margin=margin,
        minutes=minutes,
        seeds=seeds,
        at_once=at_once,
    )
    guess = -math.inf if guessed is None else 100 * guessed
    found = replace(
        found, title=title or recipe.dataset, unit=unit, metric=of, chance_level=guess
    )
    page = store.parent / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    reports, missing = data_reports.stored_reports([store], tried_rows)
    first, *others = sections(found)
    first = replace(first, notes=(*first.notes, *data_reports.summary(reports)))
    shown = [first, *others, *data_reports.sections(reports, missing)]
    write_text(
        page,
        render(
            "page.html.j2",
            title=found.title,
            notes=[note] if note else [],
            sections=shown,
        ),
    )
    if drawn := shown[0].figure:
        page.with_name(FIGURE).write_bytes(picture(drawn)[0])  # type: ignore[arg-type]  # no address
    write_text(page.with_name(ANSWER), f"{recipe.dataset}\n{found.headline}\n{found}\n")
    return found, page


def _folder(recipe: Recipe, scale: str) -> Path:
    """Return the folder of the page: a name that no shell hides, or the hidden one that a former release made."""
    name = re.sub(
        r"[^\w.-]+", "-", said := f"{recipe.dataset.strip('/')}-{recipe.model}"
    )
    former = name
    name = name.lstrip(".-") if name.startswith(".") else name
    if name != said:  # for a-b/ is another folder than a/b/
        name, former = (
            f"{one}-{zlib.crc32(said.encode()):08x}" for one in (name, former)
        )
    hidden = runs_dir() / "try" / f"{former}-{scale}"
    return hidden if hidden.exists() else hidden.with_name(f"{name}-{scale}")


def sections(found: PrecisionSearchResult) -> list[Section]:
    """Return the page: the answer with its figure, the lines to paste, every arm, and what was not tried."""
    said = (
        *(f"{name}: {words}" for name, words in found.sentences().items()),
        str(found).partition("\n")[0],
    )
    over = (
        ("Stopped before all was clear: the same command, run again, adds seeds.",)
        if found.out_of_time
        else ()
    )
    there = [
        d
        for d in map(partial(found.difference, other=FLOAT32_ARM), found.results)
        if d.arm.name != FLOAT32_ARM
    ]
    pasted = tuple(f"`{line}`" for line in found.code().splitlines())
    lines = [(d.arm.name, f"{d.arm.cost:.2f}", str(d), len(d.values)) for d in there]
    columns = [
        "bits",
        f"bit operations, {STATIC_BITS[0]} bits = 1",
        "difference to float32 [95 %]",
        "seeds",
    ]
    return [
        Section(found.headline, (*said, *over), found.figure() if there else None, ALT),
        *([Section("To train like this", pasted)] if pasted else []),
        Section(
            "All that was trained",
            table=pd.DataFrame(lines, columns=columns),
            style="left",
        ),
        Section("What was not tried, and what this does not say", NOT_TRIED),
    ]
