"""The page REPRODUCING.md: grids, kept rows, claims, and the ``Paper:`` and ``Differs:`` lines of the code.

The text stands in ``REPRODUCING.md.j2``; what can be counted is filled in here.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from cpt_lab.analysis import claims, preregistered
from cpt_lab.analysis.metrics import counted
from cpt_lab.analysis.pages import render
from cpt_lab.analysis.runs import committed, load
from cpt_lab.experiments.grids import find_grids, grid_specs
from cpt_lab.paths import ROOT, results_dir

OUTCOME = ("<!-- outcome: python -m cpt_lab docs -->", "<!-- end of outcome -->")


def text() -> str:
    """Return the whole page."""
    runs = committed()
    stored = set(runs.loc[runs["scale"] == "paper", "key"])
    entries = claims.judged(runs)
    lines = {kind: [_wrapped(f"`{place}`: {entry}") for place, entry in harvest(kind)] for kind in ("Differs", "Paper")}
    return render(
        "REPRODUCING.md.j2",
        grids=_grids,
        stored=lambda name: _stored(name, stored),
        kept=lambda *names: "; ".join(map(_kept, names)),
        claims=claims.summary(entries).drop(columns="evidence"),
        evidence=[(entry.claim.claim, entry.evidence()) for entry in entries],
        lines=lines,
    )


def readme(page: str) -> str:
    """Return the README with the outcome of the questions about equal cost as the committed rows have it."""
    begin, end = OUTCOME
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"README.md must have the lines {begin} and {end} once, the outcome goes between them")
    before, rest = page.split(begin)
    lines = "\n".join(_wrapped(line) for line in preregistered.outcome(committed()))
    return f"{before}{begin}\n\n{lines}\n\n{end}{rest.split(end)[1]}"


def _paper_scale(name: str) -> dict[str, set[str]]:
    """The keys of the runs of a grid or an artefact at paper scale, by grid."""
    at_paper = [key for key, grid in find_grids(name).items() if "paper" in grid.scales]
    return {key: {spec.key for spec in grid_specs(key, "paper")} for key in at_paper}


def _grids(name: str) -> str:
    """Such as "`cifar10/resnet74` (66 runs), ..."."""
    return ", ".join(f"`{grid}` ({counted(len(keys), 'run')})" for grid, keys in _paper_scale(name).items())


def _stored(name: str, stored: set[str]) -> str:
    """How much of a grid or an artefact was run at paper scale."""
    wanted = set().union(*_paper_scale(name).values())
    there = len(wanted & stored)
    return f"{there:,} of {len(wanted):,} runs" if there else "no, needs a GPU"


def _kept(name: str) -> str:
    """Such as "mlp6: 85 runs, 17 arms, 5 seeds": what is kept under a name, by model."""
    runs = load(results_dir() / f"{name}.jsonl", every_rate=True)
    return "; ".join(
        f"{model}: {counted(len(part), 'run')}, {counted(part['arm'].nunique(), 'arm')}, "
        f"{counted(part['seed'].nunique(), 'seed')}"
        for model, part in runs.groupby("model", sort=False)
    )


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(f"- {line}", 118, subsequent_indent="  "))


def harvest(kind: str) -> Iterator[tuple[str, str]]:
    """Yield (place in the code, text) of every ``Paper:`` or ``Differs:`` line."""
    for path in sorted(ROOT.glob("cpt_*/**/*.py")):
        place = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                name = "" if isinstance(node, ast.Module) else f" {node.name}"
                for entry in _entries(ast.get_docstring(node) or "", kind):
                    yield f"{place}{name}", entry
        comments = re.findall(r"((?:^ *# .*\n)+)", source, flags=re.M)
        for block in comments:
            text = re.sub(r"^ *# ?", "", block, flags=re.M)
            for entry in _entries(text, kind):
                yield place, entry


def _entries(text: str, kind: str) -> list[str]:
    """Cut the entries out of a text: from the word to the next such word, a blank line or a line of less indent."""
    out = []
    for match in re.finditer(rf"(?:^|\s){kind}: (.*?)(?=(?:\s(?:Paper|Differs): )|\n\s*\n|\n\w+:|\Z)", text, re.S):
        out.append(" ".join(match[1].split()))
    return out
