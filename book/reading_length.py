"""Reading length of every notebook: ``python -m book.reading_length``; ``make book`` prints it.

A sentence is long from 36 words on. A colon joins two sentences where a small letter follows it in running text. A line
of code is plumbing when it imports, or names what the notebook took from ``cpt_lab`` or ``cpt_lessons``. The cell that
installs the package is not counted.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "notebooks"
MAX_WORDS = 35
OURS = ("cpt_lab", "cpt_lessons")
FORMULAS = re.compile(r"\$\$.+?\$\$|(?<!\\)\$[^$\n]+?\$|`[^`\n]*`", re.DOTALL)
NON_PROSE = re.compile(
    r"^#.*$|^\|.*$|</?\w+>|^ *(?:[-*]|\d+\.) ", re.MULTILINE
)  # headings, tables, marks of lists


class Count(NamedTuple):
    """Counts of one notebook.

    Attributes:
        words: words of text.
        long: sentences of more than ``MAX_WORDS`` words.
        colons: colons that join two sentences.
        lines: lines of code.
        plumbing: lines of code that import or use ``cpt_lab`` or ``cpt_lessons``.
    """

    words: int
    long: int
    colons: int
    lines: int
    plumbing: int

    @property
    def share(self) -> float:
        """Share of the lines of code that are plumbing."""
        return self.plumbing / self.lines if self.lines else 0.0


def count(notebook: dict[str, Any]) -> Count:
    """Count a notebook, given as parsed JSON."""
    cells = [
        (c["cell_type"], "".join(c["source"]))
        for c in notebook["cells"]
        if c["id"] != "install"
    ]
    text = "\n\n".join(source for kind, source in cells if kind == "markdown")
    code = "\n".join(source for kind, source in cells if kind == "code")
    sentence_list = sentences(text)
    colons = sum(
        len(re.findall(r"[\w)*]:\**\s+[a-z]", sentence)) for sentence in sentence_list
    )
    lines, ours = code_lines(code)
    return Count(
        len(text.split()),
        sum(len(s.split()) > MAX_WORDS for s in sentence_list),
        colons,
        len(lines),
        len(lines & ours),
    )


def sentences(text: str) -> list[str]:
    """Return the sentences of running text; a formula or piece of code counts as a word."""
    plain = NON_PROSE.sub("\n\n", FORMULAS.sub("X", text))
    return [
        s
        for part in re.split(r"\n\s*\n", plain)
        for s in re.split(r"(?<=[.!?])[*)\"]*\s+(?=[\W\d]*[A-Z])", part)
        if s.strip()
    ]


def code_lines(code: str) -> tuple[set[int], set[int]]:
    """Return the numbers of the code lines, and of the plumbing lines among them."""
    lines = {
        n
        for n, line in enumerate(code.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    }
    nodes, names, plumbing = list(ast.walk(ast.parse(code))), set[str](), set[int]()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            plumbing |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] in OURS
            ):
                names |= {alias.asname or alias.name for alias in node.names}
    for node in nodes:  # P = check_parameters(...)
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) in names
        ):
            names |= {
                target.id for target in node.targets if isinstance(target, ast.Name)
            }
    return lines, plumbing | {
        node.lineno for node in nodes if isinstance(node, ast.Name) and node.id in names
    }


def counts() -> dict[str, Count]:
    """Return the count of every notebook, by its number."""
    return {
        p.name[:2]: count(json.loads(p.read_text(encoding="utf-8")))
        for p in sorted(FOLDER.glob("*.ipynb"))
    }


def main() -> int:
    """Print a line per notebook."""
    counts_by_notebook = counts()
    print("notebook  words  long sentences  colons  code lines  plumbing")
    for name, c in {
        **counts_by_notebook,
        "all": Count(*map(sum, zip(*counts_by_notebook.values(), strict=True))),
    }.items():
        print(
            f"{name:<8}{c.words:7,}{c.long:16}{c.colons:8}{c.lines:12}{c.share:10.0%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
