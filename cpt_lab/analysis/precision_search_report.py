"""Page of ``cpt try``: a data set's recipe trained at several precisions, with the answer.  No torch.

``try_recipe`` runs the search and writes the page next to its rows; the same command continues from these rows.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
from cpt_lab.data.report import DataReport
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import runs_dir
from cpt_lab.sweeps.result_row import ResultRow

FIGURE_FILE = "figure.png"
SEARCH_FIGURE_ALT = "difference to float32 against bit operations: static bits, schedules, fewer bits for gradients"
# The file lies next to the page: one line for the data set, one for the finding, then the answer in words.
ANSWER_FILE = "answer.txt"
DEFAULT_MARGIN = 1.0  # points of a metric, or percent of a perplexity
EVALUATION_NOTE = (
    "Each of these trainings was evaluated on the test data at the bits with which it ended; "
    "the notebooks evaluate at 8 bits."
)
LIMITATION_NOTES = (
    "Not tried: other learning rates (fewer bits may want another), longer trainings, bits that differ by layer, other "
    f"schedules. {EVALUATION_NOTE}",
    "Differences are taken seed by seed, over the seeds that both trainings have. Brackets are 95 % intervals, not "
    "corrected for several comparisons, nor for the check after every seed: take a significant difference as a hint, "
    "not as a test. Low precision is simulated: bit operations count work, not seconds.",
    "Notebook 00 explains bits and schedules, notebook 08 how to choose them.",
)


def answer_sections(dataset: str, scale: str) -> list[Section]:
    """Return the answers for a data set, one section per model.

    Figures and links are relative to ``runs/reproduce/SCALE``.
    """
    page_sections = []
    for path in sorted((runs_dir() / "try").glob(f"*-{scale}/{ANSWER_FILE}")):
        lines = path.read_text(encoding="utf-8").splitlines()
        answer_dataset, finding, *sentences = lines
        if answer_dataset != dataset:
            continue

        folder = f"../../try/{path.parent.name}"
        link = {"page": f"{folder}/index.html", "name": "every training", "failed": ""}
        figure = None
        if path.with_name(FIGURE_FILE).exists():
            figure = f"{folder}/{FIGURE_FILE}"
        page_sections.append(
            Section(
                f"{dataset}: {finding}",
                (*sentences, EVALUATION_NOTE),
                figure,
                SEARCH_FIGURE_ALT,
                pd.DataFrame({"page": [link]}),
            )
        )
    return page_sections


def specs(recipe: Recipe, scale: str, arms: Iterable[Arm], seed: int) -> list[RunSpec]:
    """Return the runs of arms, evaluated at the end alone unless the learning rate depends on evaluations."""
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
    margin: float = DEFAULT_MARGIN,
    guessed: float | None = None,
    note: str = "",
) -> tuple[PrecisionSearchResult, Path]:
    """Search the precision of a recipe; return the result and the path of its page.

    Args:
        recipe: what is trained.
        scale: name of the recipe's scale.
        run: trains specs into a store and returns their rows (``run_grid``).
        at_once: runs at a time.
        minutes: time limit of the search.
        seeds: largest number of seeds.
        margin: smallest difference that counts, in points of a metric or percent of a perplexity.
        guessed: share of the most frequent class; the answer says so if float32 is no better than that.
        note: a sentence about the model, with which the page begins.

    Raises:
        ValueError: for a recipe with a format ladder: the search compares bits of the paper's grids.
        RuntimeError: when a run fails, with the reason and the path of the logs.
    """
    if recipe.ladder != "affine":
        raise ValueError(
            f"the search compares bits of the paper's grids; recipe.ladder must be 'affine', got {recipe.ladder!r}"
        )
    store = _folder(recipe, scale) / "rows.jsonl"
    unit, title, metric_name = "", "", ""
    search_rows: list[ResultRow] = []

    def train_arms(arms: Sequence[Arm], seed: int) -> dict[str, Result]:
        nonlocal unit, title, metric_name
        rows = run(specs(recipe, scale, arms, seed), store)
        failed = [row for row in rows if row["status"] == "failed"]
        if failed:
            reason = failed[0]["error"].strip().splitlines()[-1]
            raise RuntimeError(
                f"{failed[0]['spec']['arm']}, seed {seed}: {reason}; rows and logs: {store.parent}"
            )
        search_rows.extend(rows)
        frame = table(rows)
        unit, title, metric_name = unit_of(frame), rows[0]["title"], metric_of(frame)
        is_ok = (frame["status"] == "ok").to_numpy()
        values = pd.Series(quality(frame, 1, "_current")).where(is_ok)
        return {
            arm.name: Result(float(value), row["seconds"])
            for arm, value, row in zip(arms, values, rows, strict=True)
        }

    result = run_precision_search(
        train_arms,
        recipe.dataset,
        recipe.steps,
        cycles=recipe.n_cycles,
        margin=margin,
        minutes=minutes,
        seeds=seeds,
        at_once=at_once,
    )
    guess = -math.inf if guessed is None else 100 * guessed
    result = replace(
        result,
        title=title or recipe.dataset,
        unit=unit,
        metric=metric_name,
        chance_level=guess,
    )
    page = store.parent / "index.html"
    _write_page(page, result, data_reports.stored_reports([store], search_rows), note)
    write_text(
        page.with_name(ANSWER_FILE), f"{recipe.dataset}\n{result.headline}\n{result}\n"
    )
    return result, page


def _write_page(
    page: Path,
    result: PrecisionSearchResult,
    stored_reports: tuple[list[DataReport], list[str]],
    note: str,
) -> None:
    """Write the page of a search, and its figure as a file of its own."""
    page.parent.mkdir(parents=True, exist_ok=True)
    reports, missing = stored_reports
    first, *further_sections = sections(result)
    first = replace(first, notes=(*first.notes, *data_reports.summary(reports)))
    page_sections = [first, *further_sections, *data_reports.sections(reports, missing)]
    html = render(
        "page.html.j2",
        title=result.title,
        notes=[note] if note else [],
        sections=page_sections,
    )
    write_text(page, html)
    if first.figure:
        png, *_ = picture(first.figure)  # type: ignore[arg-type]  # not the address of a picture
        page.with_name(FIGURE_FILE).write_bytes(png)


def _folder(recipe: Recipe, scale: str) -> Path:
    """Return the folder of the page; a hidden folder of a former release is used if it exists."""
    recipe_name = f"{recipe.dataset.strip('/')}-{recipe.model}"
    former = re.sub(r"[^\w.-]+", "-", recipe_name)
    name = former.lstrip(".-") if former.startswith(".") else former
    if name != recipe_name:
        # The checksum keeps data sets apart whose names differ in replaced characters alone, such as a-b/ and a/b/.
        checksum = f"{zlib.crc32(recipe_name.encode()):08x}"
        name, former = f"{name}-{checksum}", f"{former}-{checksum}"
    hidden = runs_dir() / "try" / f"{former}-{scale}"
    return hidden if hidden.exists() else hidden.with_name(f"{name}-{scale}")


def sections(result: PrecisionSearchResult) -> list[Section]:
    """Return the sections of the page: answer and figure, code to paste, all arms, limitations."""
    sentences = [f"{name}: {words}" for name, words in result.sentences().items()]
    sentences.append(str(result).partition("\n")[0])
    if result.out_of_time:
        sentences.append(
            "Stopped before all comparisons were decided: run the same command again to add seeds."
        )
    differences = []
    for name in result.results:
        difference = result.difference(name, other=FLOAT32_ARM)
        if difference.arm.name != FLOAT32_ARM:
            differences.append(difference)
    figure = result.figure() if differences else None
    page_sections = [
        Section(result.headline, tuple(sentences), figure, SEARCH_FIGURE_ALT)
    ]

    code_lines = tuple(f"`{line}`" for line in result.code().splitlines())
    if code_lines:
        page_sections.append(Section("Code for this training", code_lines))
    arms = pd.DataFrame(
        [(d.arm.name, f"{d.arm.cost:.2f}", str(d), len(d.values)) for d in differences],
        columns=[
            "bits",
            f"bit operations, {STATIC_BITS[0]} bits = 1",
            "difference to float32 [95 %]",
            "seeds",
        ],
    )
    page_sections += [
        Section("All trainings", table=arms, style="left"),
        Section("Limitations", LIMITATION_NOTES),
    ]
    return page_sections
