"""What became of notebooks: a page per notebook, data set and parameters; a failure has a page beside the good one.

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
    """What became of one notebook."""

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
        """Of the page: that of the notebook, and of the parameters that are not the notebook's own."""
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
        shown = {**self.given, "scale": self.values.get("scale")}
        own = [v for name, v in shown.items() if name in DATA and is_own(v)]
        if own:
            shown["fingerprints"] = [
                fingerprint_paths(map(own_path, data.split(","))) for data in own
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
        """Whether there is a page of a run that went well and would show the same now."""
        return (
            self.file("html").exists() and _known(self.file("json")).get("key") == key
        )

    def keep(self, page: str, book: str, **known: Any) -> None:
        """Keep the page and the notebook of a run, and what is known of it.

        That is ``key`` and ``seconds`` of a run that went well: what failed before is forgotten. Or ``error`` of one
        that failed: it stands beside the last one that went well.
        """
        beside = "failed." if "error" in known else ""
        given = ", ".join(f"{name}={value}" for name, value in self.given.items())
        write_text(self.file(f"{beside}ipynb"), book)
        write_text(self.file(f"{beside}html"), page)
        write_text(
            self.file(f"{beside}json"),
            json.dumps({"notebook": self.notebook.stem, "given": given, **known}),
        )
        if not beside:
            self.forget_failure()

    def forget_failure(self) -> None:
        """Remove the page of a failure, for the same has gone well since."""
        for ending in ("html", "ipynb", "json"):
            self.file(f"failed.{ending}").unlink(missing_ok=True)

    def outcome(self, status: str, seconds: float | None = None) -> NotebookOutcome:
        """Return what became of it; the seconds are those of the good page where none are given."""
        return _outcome(self.folder, self.name, status, seconds)


def earlier_outcomes(folder: Path, notebooks: list[str]) -> list[NotebookOutcome]:
    """Return what earlier calls left in a folder of these notebooks."""
    names = {
        path.name.removesuffix(".json").removesuffix(".failed")
        for path in folder.glob("*.json")
    }
    found = [_outcome(folder, name, "earlier") for name in sorted(names)]
    return [outcome for outcome in found if outcome.notebook in notebooks]


def _outcome(
    folder: Path, name: str, status: str, seconds: float | None = None
) -> NotebookOutcome:
    good, bad = (
        _known(folder / f"{name}.{ending}") for ending in ("json", "failed.json")
    )
    page, failed = (folder / f"{name}.{ending}" for ending in ("html", "failed.html"))
    either = good or bad
    asked, found = _asked_and_found(
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
        asked,
        found,
    )


def _asked_and_found(notebook: Path, given: str) -> tuple[str, str]:
    cells = _known(notebook).get("cells", [])
    text = plain(
        "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    )
    asked = re.search(r"Question(?: \(.*?\))?:? ([^?\n]+\?(?: [^.?\n]+\?)*)", text)
    summary = re.search(r"^## Summary\n\n((?:.+\n?)+)", text, re.M)
    of_others = any(
        f"{name}=" in given for name in DATA
    )  # what it sums up is of other data
    found = (
        ""
        if of_others or not summary
        else " ".join(re.sub("^- ", "", summary[1], flags=re.M).split())
    )
    # outputs that are checked are of kept rows
    own = [
        c for c in cells if "nbval-check-output" not in c["metadata"].get("tags", ())
    ]
    said = "".join(
        "".join(o.get("text", "")) for c in own for o in c.get("outputs", [])
    )
    lines = re.findall(
        r"^(.+) minus (.+): (.+, n = \d+): (above|below|cannot|fewer)", said, re.M
    )
    here = [
        f"{a} minus {b}: {effect}"
        for a, b, effect, word in lines
        if word in ("above", "below")
    ]
    for word, words in (
        ("cannot", "not told apart"),
        ("fewer", "too few seeds to tell"),
    ):
        if alike := ", ".join(
            f"{a} and {b}" for a, b, _, this in lines if this == word
        ):
            here.append(f"{words}: {alike}")
    found += f" In this run: {'; '.join(here)}." if here else ""
    return asked[1][0].upper() + asked[1][1:] if asked else "", found.strip()


def _known(path: Path) -> dict[str, Any]:
    with suppress(
        FileNotFoundError, ValueError
    ):  # none yet, or of no use: then it runs again
        known = json.loads(path.read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    return {}
