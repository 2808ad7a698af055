"""Runs of notebooks and their pages: one page per notebook, data set and parameters.

The page of a failed run is stored next to that of the last successful run.

>>> notebook, given = Path("03_image_classification.ipynb"), {"dataset": "my pictures/", "seeds": [0, 1]}
>>> NotebookRun(notebook, {}, {}, Path()).name, NotebookRun(notebook, given, given, Path()).name
('03_image_classification', '03_image_classification.my-pictures-0-1-e9f736f0')
"""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt_extras.files import write_text
from cpt_lab.analysis.rendering import plain
from cpt_lab.commands import digest
from cpt_lab.data.files import fingerprint_paths, own_path
from cpt_lab.experiments.schema import is_own
from cpt_lab.paths import ROOT, paper_dir, results_dir

DATA = ("dataset", "pairs", "graph")  # parameters that can name data of the user's own


@dataclass(frozen=True)
class NotebookOutcome:
    """Result of running one notebook."""

    notebook: str  # its name
    given: str  # the parameters that are not its own, in words
    status: str  # "done", "up to date" or "failed"; "earlier" and "failed earlier" for what another call has run
    seconds: float  # that it took
    page: Path | None  # the newest one that is good, None where there is none
    error: str = ""  # why it failed, in one line
    failed: Path | None = None  # the page of the failure, None where there is none
    asked: str = ""  # the notebook's question
    # what came out, in words: the comparisons of its own runs, and what it sums up of the data that it names
    found: str = ""

    @property
    def name(self) -> str:
        """The notebook, and the parameters that are not its own."""
        return f"{self.notebook} ({self.given})" if self.given else self.notebook


@dataclass(frozen=True)
class NotebookRun:
    """A notebook to run, and where its page goes."""

    notebook: Path  # its path
    values: Mapping[str, Any]  # parameters to run it with
    # those of them that change what the page shows and are not the notebook's own: they name it
    given: Mapping[str, Any]
    folder: Path  # of the page

    @property
    def name(self) -> str:
        """Name of the page: the notebook and its changed parameters."""
        if not self.given:
            return self.notebook.stem
        words = re.sub(
            r"[^A-Za-z0-9]+", "-", " ".join(map(str, self.given.values()))
        ).strip("-")[:40]
        key = hashlib.sha256(
            json.dumps(dict(self.given), sort_keys=True).encode()
        ).hexdigest()[:8]
        return f"{self.notebook.stem}.{words}-{key}"

    def file(self, ending: str) -> Path:
        """Return a file of this page: "html", "ipynb", or "json" with what is known; "failed.html" and the like."""
        return self.folder / f"{self.name}.{ending}"

    def key(self) -> str:
        """Return what tells all that the page depends on: notebook, parameters, own data, package, committed rows."""
        inputs = {**self.given, "scale": self.values.get("scale")}
        own_data = [v for name, v in inputs.items() if name in DATA and is_own(v)]
        if own_data:
            inputs["fingerprints"] = [
                fingerprint_paths(map(own_path, data.split(","))) for data in own_data
            ]
        committed = [
            *sorted(results_dir().glob("*.json*")),
            *sorted(paper_dir().glob("*.csv")),
        ]
        sources = digest(
            [self.notebook, *sorted(ROOT.glob("cpt_*/**/*.py")), *committed]
        )
        return f"{json.dumps(inputs, sort_keys=True)} {sources}"

    def up_to_date(self, key: str) -> bool:
        """Return whether the page of a successful run has this key."""
        return (
            self.file("html").exists()
            and _read_json(self.file("json")).get("key") == key
        )

    def keep(self, page: str, book: str, **known: Any) -> None:
        """Keep the page and the notebook of a run, and what is known of it.

        That is ``key`` and ``seconds`` of a run that went well: what failed before is forgotten. Or ``error`` of one
        that failed: it stands beside the last one that went well.
        """
        prefix = "failed." if "error" in known else ""
        parameters = ", ".join(f"{name}={value}" for name, value in self.given.items())
        write_text(self.file(f"{prefix}ipynb"), book)
        write_text(self.file(f"{prefix}html"), page)
        write_text(
            self.file(f"{prefix}json"),
            json.dumps({"notebook": self.notebook.stem, "given": parameters, **known}),
        )
        if not prefix:
            self.forget_failure()

    def forget_failure(self) -> None:
        """Remove the page of a failed run."""
        for ending in ("html", "ipynb", "json"):
            self.file(f"failed.{ending}").unlink(missing_ok=True)

    def outcome(self, status: str, seconds: float | None = None) -> NotebookOutcome:
        """Return the outcome; ``seconds`` defaults to those of the successful page."""
        return _outcome(self.folder, self.name, status, seconds)


def earlier_outcomes(folder: Path, notebooks: list[str]) -> list[NotebookOutcome]:
    """Return the outcomes of these notebooks that earlier calls stored in a folder."""
    names = {
        path.name.removesuffix(".json").removesuffix(".failed")
        for path in folder.glob("*.json")
    }
    outcomes = [_outcome(folder, name, "earlier") for name in sorted(names)]
    return [outcome for outcome in outcomes if outcome.notebook in notebooks]


def _outcome(
    folder: Path, name: str, status: str, seconds: float | None = None
) -> NotebookOutcome:
    good, bad = (
        _read_json(folder / f"{name}.{ending}") for ending in ("json", "failed.json")
    )
    page, failed = (folder / f"{name}.{ending}" for ending in ("html", "failed.html"))
    either = good or bad
    question, findings = _question_and_findings(
        folder / f"{name}.{'' if good else 'failed.'}ipynb", either.get("given", "")
    )
    return NotebookOutcome(
        either.get("notebook", ""),
        either.get("given", ""),
        "failed earlier" if bad and status == "earlier" else status,
        good.get("seconds", 0.0) if seconds is None else seconds,
        page if good and page.exists() else None,
        bad.get("error", ""),
        failed if bad and failed.exists() else None,
        question,
        findings,
    )


def _question_and_findings(notebook: Path, parameters: str) -> tuple[str, str]:
    cells = _read_json(notebook).get("cells", [])
    text = plain(
        "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    )
    question = re.search(r"Question(?: \(.*?\))?:? ([^?\n]+\?(?: [^.?\n]+\?)*)", text)
    summary = re.search(r"^## Summary\n\n((?:.+\n?)+)", text, re.M)
    has_other_data = any(
        f"{name}=" in parameters for name in DATA
    )  # what it sums up is of other data
    findings = (
        ""
        if has_other_data or not summary
        else " ".join(re.sub("^- ", "", summary[1], flags=re.M).split())
    )
    # outputs that are checked are of kept rows
    unchecked_cells = [
        c for c in cells if "nbval-check-output" not in c["metadata"].get("tags", ())
    ]
    printed = "".join(
        "".join(o.get("text", ""))
        for c in unchecked_cells
        for o in c.get("outputs", [])
    )
    lines = re.findall(
        r"^(.+) minus (.+): (.+, n = \d+): (above|below|cannot|fewer)", printed, re.M
    )
    comparisons = [
        f"{a} minus {b}: {effect}"
        for a, b, effect, word in lines
        if word in ("above", "below")
    ]
    for word, words in (
        ("cannot", "not told apart"),
        ("fewer", "too few seeds to tell"),
    ):
        if pairs := ", ".join(
            f"{a} and {b}" for a, b, _, this in lines if this == word
        ):
            comparisons.append(f"{words}: {pairs}")
    findings += f" In this run: {'; '.join(comparisons)}." if comparisons else ""
    return question[1][0].upper() + question[1][
        1:
    ] if question else "", findings.strip()


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(
        FileNotFoundError, ValueError
    ):  # none yet, or of no use: then it runs again
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}
