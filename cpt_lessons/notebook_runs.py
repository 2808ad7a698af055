"""Runs of notebooks and their pages: one page per notebook, data set and parameters.

``NotebookRun`` names and stores the page of a run; a failed run has a page of its own beside the last good one.
``NotebookOutcome`` is the result that ``cpt reproduce`` prints and the index shows.

>>> notebook, parameters = Path("03_image_classification.ipynb"), {"dataset": "my pictures/", "seeds": [0, 1]}
>>> NotebookRun(notebook, {}, {}, Path()).name, NotebookRun(notebook, parameters, parameters, Path()).name
('03_image_classification', '03_image_classification.my-pictures-0-1-e9f736f0')
"""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cpt_extras.files import write_text
from cpt_lab.analysis.rendering import plain
from cpt_lab.commands import digest
from cpt_lab.data.files import fingerprint_paths, own_paths
from cpt_lab.experiments.schema import is_own
from cpt_lab.paths import ROOT, paper_dir, results_dir

DATA_PARAMETERS = (
    "dataset",
    "pairs",
    "graph",
)  # parameters that can name the user's own files


@dataclass(frozen=True)
class NotebookOutcome:
    """Result of one notebook."""

    notebook: str  # name of the notebook
    changed_parameters: (
        str  # parameters that differ from the notebook's defaults, such as "seeds=[4]"
    )
    status: str  # "done", "up to date" or "failed"; "earlier" and "failed earlier" for runs of other calls
    seconds: float  # run time
    page: Path | None  # page of the last run that went well, None where there is none
    error: str = ""  # one line
    failed: Path | None = None  # page of the failure, None where there is none
    question: str = ""  # question that the notebook answers
    answer: str = ""  # its summary (of its default data), and the comparisons of the runs that it made

    @property
    def name(self) -> str:
        """Notebook, with its changed parameters."""
        if not self.changed_parameters:
            return self.notebook
        return f"{self.notebook} ({self.changed_parameters})"

    def index_entry(self) -> dict[str, Any]:
        """Return the outcome as ``analysis.report.write`` takes it, for the index page."""
        return {
            **vars(self),
            "name": self.name,
            "given": self.changed_parameters,
            "asked": self.question,
            "found": self.answer,
        }


@dataclass(frozen=True)
class NotebookRun:
    """Notebook to run, and the files of its page."""

    notebook: Path
    values: Mapping[str, Any]  # parameters to run it with
    # The parameters that differ from the notebook's defaults and change what the page shows; they name the page.
    changed_values: Mapping[str, Any]
    folder: Path  # folder of the page

    @property
    def name(self) -> str:
        """Name of the page's files: the notebook's, with the changed parameters and their hash."""
        if not self.changed_values:
            return self.notebook.stem

        text = " ".join(map(str, self.changed_values.values()))
        words = re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:40]
        content = json.dumps(dict(self.changed_values), sort_keys=True)
        key = hashlib.sha256(content.encode()).hexdigest()[:8]
        return f"{self.notebook.stem}.{words}-{key}"

    def file(self, ending: str) -> Path:
        """Return a file of the page; endings are "html", "ipynb" and "json", and "failed.html" and so on."""
        return self.folder / f"{self.name}.{ending}"

    def key(self) -> str:
        """Return a key of everything that the page depends on: notebook, parameters, data, package, committed rows."""
        shown = {**self.changed_values, "scale": self.values.get("scale")}
        own_data = [
            value
            for name, value in shown.items()
            if name in DATA_PARAMETERS and is_own(value)
        ]
        if own_data:
            shown["fingerprints"] = [
                fingerprint_paths(own_paths(data)) for data in own_data
            ]
        committed = [
            *sorted(results_dir().glob("*.json*")),
            *sorted(paper_dir().glob("*.csv")),
        ]
        sources = digest(
            [self.notebook, *sorted(ROOT.glob("cpt_*/**/*.py")), *committed]
        )
        return f"{json.dumps(shown, sort_keys=True)} {sources}"

    def up_to_date(self, key: str) -> bool:
        """Return whether the page exists and was made from the same key."""
        if not self.file("html").exists():
            return False
        return _read_json(self.file("json")).get("key") == key

    def keep(self, page: str, book: str, **facts: Any) -> None:
        """Write the page, the executed notebook and facts about a run.

        Args:
            page: HTML of the page.
            book: executed notebook, as JSON.
            **facts: ``key`` and ``seconds`` of a run that went well, which removes an older failure; or ``error`` of a
                failed run, whose files stand beside those of the last good one.
        """
        prefix = "failed." if "error" in facts else ""
        parameters = [f"{name}={value}" for name, value in self.changed_values.items()]
        content = {
            "notebook": self.notebook.stem,
            "given": ", ".join(parameters),
            **facts,
        }
        write_text(self.file(f"{prefix}ipynb"), book)
        write_text(self.file(f"{prefix}html"), page)
        write_text(self.file(f"{prefix}json"), json.dumps(content))
        if not prefix:
            self.forget_failure()

    def forget_failure(self) -> None:
        """Remove the page of an earlier failure."""
        for ending in ("html", "ipynb", "json"):
            self.file(f"failed.{ending}").unlink(missing_ok=True)

    def outcome(self, status: str, seconds: float | None = None) -> NotebookOutcome:
        """Return the outcome; ``seconds`` None takes the time of the last good run."""
        return _outcome(self.folder, self.name, status, seconds)


def earlier_outcomes(folder: Path, notebooks: list[str]) -> list[NotebookOutcome]:
    """Return the outcomes of notebooks that earlier calls have stored in a folder."""
    names = {
        path.name.removesuffix(".json").removesuffix(".failed")
        for path in folder.glob("*.json")
    }
    outcomes = [_outcome(folder, name, "earlier") for name in sorted(names)]
    return [outcome for outcome in outcomes if outcome.notebook in notebooks]


def _outcome(
    folder: Path, name: str, status: str, seconds: float | None = None
) -> NotebookOutcome:
    """Read the outcome of a notebook from the files of its page."""
    good_facts = _read_json(folder / f"{name}.json")
    failure_facts = _read_json(folder / f"{name}.failed.json")
    facts = good_facts or failure_facts
    page, failure_page = folder / f"{name}.html", folder / f"{name}.failed.html"

    ending = "ipynb" if good_facts else "failed.ipynb"
    changed_parameters = facts.get("given", "")
    texts = _question_and_answer(folder / f"{name}.{ending}", changed_parameters)

    if failure_facts and status == "earlier":
        status = "failed earlier"
    if seconds is None:
        seconds = good_facts.get("seconds", 0.0)
    return NotebookOutcome(
        notebook=facts.get("notebook", ""),
        changed_parameters=changed_parameters,
        status=status,
        seconds=seconds,
        page=page if good_facts and page.exists() else None,
        error=failure_facts.get("error", ""),
        failed=failure_page if failure_facts and failure_page.exists() else None,
        question=texts.question,
        answer=texts.answer,
    )


class NotebookTexts(NamedTuple):
    """Question of a notebook, and its answer in words; "" where there is none."""

    question: str
    answer: str


def _question_and_answer(notebook: Path, changed_parameters: str) -> NotebookTexts:
    """Return the question of an executed notebook, its summary, and the comparisons that it printed."""
    cells = _read_json(notebook).get("cells", [])
    text = plain(
        "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    )
    question = re.search(r"Question(?: \(.*?\))?:? ([^?\n]+\?(?: [^.?\n]+\?)*)", text)
    summary = re.search(r"^## Summary\n\n((?:.+\n?)+)", text, re.M)

    answer = ""
    # The summary is about the notebook's own data.
    has_other_data = any(f"{name}=" in changed_parameters for name in DATA_PARAMETERS)
    if summary and not has_other_data:
        answer = " ".join(re.sub("^- ", "", summary[1], flags=re.M).split())

    comparisons = _comparisons(cells)
    if comparisons:
        answer += f" In this run: {'; '.join(comparisons)}."
    if not question:
        return NotebookTexts("", answer.strip())
    return NotebookTexts(question[1][0].upper() + question[1][1:], answer.strip())


def _comparisons(cells: list[dict[str, Any]]) -> list[str]:
    """Return the differences between arms that cells printed, in words; cells on committed rows do not count."""
    printed = ""
    for cell in cells:
        if "nbval-check-output" not in cell["metadata"].get("tags", ()):
            printed += "".join(
                "".join(output.get("text", "")) for output in cell.get("outputs", [])
            )

    lines = re.findall(
        r"^(.+) minus (.+): (.+, n = \d+): (above|below|cannot|fewer)", printed, re.M
    )
    comparisons = [
        f"{a} minus {b}: {effect}"
        for a, b, effect, verdict in lines
        if verdict in ("above", "below")
    ]
    for inconclusive, words in (
        ("cannot", "not told apart"),
        ("fewer", "too few seeds to tell"),
    ):
        pairs = [
            f"{a} and {b}" for a, b, _, verdict in lines if verdict == inconclusive
        ]
        if pairs:
            comparisons.append(f"{words}: {', '.join(pairs)}")
    return comparisons


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; {} if it is missing or damaged, so that the notebook runs again."""
    with suppress(FileNotFoundError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}
