"""Checks of the notebooks: outputs, parameters, imports, sections, links, and what each promises to show."""

from __future__ import annotations

import ast
import json
import re
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from bench import demo_check
from bench.lint.dataflow import dependent_cells
from bench.lint.repository import CODE, Problem, Repository, code_cells, tags

NOTEBOOKS = r"notebooks/\d\d_\w+\.ipynb"
START = "notebooks/00_start_here.ipynb"
PAPER = (
    "03",
    "04",
    "05",
    "06",
    "07",
    "08",
)  # they follow the paper, with another opening
OVERVIEWS = ("12", "13", "14")  # without predictions and exercises
TRAINING = ("00", "09", "18")  # they train by themselves, on data of scikit-learn
LINKS_OF_LAST = ["../docs/reproducing/index.md", "../README.md"]
INSTALLED_EXTRAS = {"04": "lessons,vision", "06": "lessons,text"}
ALLOWED_IMPORTS = {
    "cpt_core",
    "cpt_extras",
    "cpt_lab",
    "cpt_lessons",
    "torch",
    *sys.stdlib_module_names,
}
MAX_CHARACTERS, MIN_WORDS = 700_000, 250
COMPARED, IGNORED = "nbval-check-output", "nbval-ignore-output"
MIN_COMPARED_CELLS = 3

# What trains, measures or computes in float32 gives other last digits, or more than that, on another machine.
MACHINE_DEPENDENT = {
    "backward",
    "precision_range_test",
    "promise_and_machine",
    "record",
    "run",
    "sensitivity",
    "tiny_problem",
    "torch",
    "train",
}
READS_ROWS = {"best_rows", "committed", "experiments"}

OPENING = re.compile(
    r"# \d\d · [^\n]+\n\n\*\*Study time\*\* (\d+) minutes[^\n]*\n\n\*\*Needs\*\* [^\n]+\n\n"
    r"\*\*Outcome\*\* (?:(?!\. )[^\n])+\.(?:\n|$)"  # one sentence
)
FIRST_HEADINGS = [
    "The paper: method and claims",
    "Settings, side by side",
    "The experiment",
]
LAST_HEADINGS = ["Paper and reproduction", "Exercises", "Summary"]
PAPER_LINK = "](https://arxiv.org/abs/2403.02243)"
GLOSSARY_WORDS = (
    "BitOps",
    "arm",
    "band",
    "noise exposure",
    "ledger",
    "rank correlation",
)
NOT_PROSE = re.compile(
    r"\$\$.+?\$\$|(?<!\\)\$[^$\n]+?\$"  # formulas
    r"|^ *```.*?^ *```"  # indented code
    r"|<summary>.*?</summary>|^#+ [^\n]*$|^\|[^\n]*$",  # headings and tables
    re.DOTALL | re.MULTILINE,
)


def check_notebook_outputs(repository: Repository) -> Iterator[Problem]:
    """Check that committed outputs come from one run from top to bottom, without errors, warnings and local paths."""
    for file in repository.find(NOTEBOOKS):
        notebook, text = repository.notebook(file), repository.text(file)
        counts = [cell.execution_count for cell in code_cells(notebook)]
        if counts != list(range(1, len(counts) + 1)):
            yield Problem(file, 1, "the cells did not run once, in order")
        version = (
            notebook.metadata.kernelspec.name,
            notebook.nbformat,
            notebook.nbformat_minor,
        )
        if (
            version != ("python3", 4, 5)
            or len(text) >= MAX_CHARACTERS
            or "widget-view" in text
        ):
            yield Problem(
                file,
                1,
                "expected kernel python3, format 4.5, less than 700,000 characters and no widgets",
            )
        for cell in code_cells(notebook):
            if any(
                o.output_type == "error" or o.get("name") == "stderr"
                for o in cell.outputs
            ):
                yield cell_problem(
                    repository, file, cell, "ended in an error or a warning"
                )
        plain = re.sub(r'"image/png": "[^"]*"', "", text)
        for match in re.finditer(
            r"(?<![\w.])/(root|home|work|tmp|Users)/|Traceback|ipykernel_\d+", plain
        ):
            yield repository.problem(
                file, f"an output of one machine: {match[0]}", match[0]
            )


def check_compared_outputs(repository: Repository) -> Iterator[Problem]:
    """Check that outputs that nbval compares are plain, and figures of stored rows are compared."""
    for file in repository.find(NOTEBOOKS):
        notebook = repository.notebook(file)
        compared = [cell for cell in code_cells(notebook) if COMPARED in tags(cell)]
        if len(compared) < MIN_COMPARED_CELLS:
            yield Problem(
                file, 1, f"fewer than {MIN_COMPARED_CELLS} cells are compared"
            )
        for cell in compared:
            if not has_plain_outputs(cell):
                yield cell_problem(
                    repository,
                    file,
                    cell,
                    "compared outputs are text on stdout, pictures and tables",
                )
        of_run, of_rows = (
            dependent_cells(notebook, roots)
            for roots in (MACHINE_DEPENDENT, READS_ROWS)
        )
        for cell in code_cells(notebook):
            captions = [
                o.data["text/plain"]
                for o in cell.outputs
                if "image/png" in o.get("data", {})
            ]
            is_run, is_stored = cell.id in of_run, cell.id in of_rows
            used = [tag for tag in (COMPARED, IGNORED) if tag in tags(cell)]
            expected = [IGNORED] if is_run else [COMPARED]
            if captions and (
                len(used) != 1 or ((is_run or is_stored) and used != expected)
            ):
                yield cell_problem(
                    repository,
                    file,
                    cell,
                    f"a picture here needs the tag {expected[0]}",
                )
            for caption in captions:
                if is_stored and not re.search(r"^1: .* mean ", caption, re.MULTILINE):
                    yield cell_problem(
                        repository, file, cell, "the picture's text has no numbers"
                    )
                if not is_run and "not a result" in caption:
                    yield cell_problem(
                        repository,
                        file,
                        cell,
                        "the picture of stored rows is called no result",
                    )


def check_parameters(repository: Repository) -> Iterator[Problem]:
    """Check that the parameters of a notebook are annotated literals, checked together and used."""
    for file in repository.find(NOTEBOOKS):
        cells = code_cells(repository.notebook(file))
        marked = [cell for cell in cells if "parameters" in tags(cell)]
        if marked != cells[1:2]:
            yield Problem(file, 1, "expected one parameters cell, the second code cell")
            continue
        statements = ast.parse(marked[0].source, type_comments=True).body
        if not all(
            isinstance(s, ast.AnnAssign) and is_literal(s.value) for s in statements
        ):
            yield cell_problem(
                repository, file, marked[0], "expected lines such as `steps: int = 3`"
            )
            continue
        values = {s.target.id: ast.literal_eval(s.value) for s in statements}
        if values["scale"] != "smoke":
            yield cell_problem(
                repository, file, marked[0], "the committed scale is smoke"
            )
        code = ast.parse("\n".join(cell.source for cell in cells[2:]))
        calls = [n for n in ast.walk(code) if isinstance(n, ast.Call)]
        checks = [
            call for call in calls if getattr(call.func, "id", "") == "check_parameters"
        ]
        if [{keyword.arg for keyword in call.keywords} for call in checks] != [
            values.keys()
        ]:
            yield Problem(
                file, 1, "expected one call of check_parameters, with every parameter"
            )
        unused = values.keys() - used_parameters(code, calls, values.keys()) - {"scale"}
        for name in sorted(unused):
            yield repository.problem(
                file, f"the parameter {name} is not used", f'"{name}'
            )


def check_notebook_code(repository: Repository) -> Iterator[Problem]:
    """Check that code cells differ, define no class, import allowed packages, and explain assertions about runs."""
    first = code_cells(repository.notebook(START))[0].source
    for file in repository.find(NOTEBOOKS):
        number, cells = file_number(file), code_cells(repository.notebook(file))
        install = first.replace(
            "[lessons]", f"[{INSTALLED_EXTRAS.get(number, 'lessons')}]"
        )
        if (
            cells[0].source != install
            or "install" not in tags(cells[0])
            or cells[0].outputs
        ):
            yield cell_problem(
                repository, file, cells[0], f"not the first cell of {START}"
            )
        allowed = ALLOWED_IMPORTS | ({"sklearn"} if number in TRAINING else set())
        sources = [cell.source for cell in cells]
        for cell in cells:
            if sources.count(cell.source) > 1:
                yield cell_problem(repository, file, cell, "the code is shown twice")
            for node in ast.walk(ast.parse(cell.source)):
                if isinstance(node, ast.ClassDef):
                    yield cell_problem(
                        repository, file, cell, "classes belong into a module"
                    )
                if not imported_packages(node) <= allowed:
                    yield cell_problem(
                        repository,
                        file,
                        cell,
                        "imports a package that a notebook may not use",
                    )
                if isinstance(node, ast.Assert) and "runs" in (
                    test := ast.unparse(node.test)
                ):
                    if node.msg is None or re.search("loss|status", test):
                        yield cell_problem(
                            repository,
                            file,
                            cell,
                            "assert what holds for any data, with a reason",
                        )


def check_notebook_sections(repository: Repository) -> Iterator[Problem]:
    """Check that a notebook has its opening, sections and enough text."""
    for file in repository.find(NOTEBOOKS):
        text, number = repository.prose(file), file_number(file)
        wanted = [PAPER_LINK]
        if number not in PAPER:
            wanted += ["## Summary"]
            if not OPENING.match(text):
                yield Problem(
                    file,
                    1,
                    "expected a title, Study time, Needs and an Outcome of one sentence",
                )
        if number not in (*PAPER, *OVERVIEWS):
            wanted += ["Predict", "Exercises"]
        for words in wanted:
            if words not in text:
                yield Problem(file, 1, f"expected {words}")
        if len(text.split()) < MIN_WORDS or "ppendix" in text:
            yield Problem(
                file, 1, f"expected {MIN_WORDS} words or more, and no appendix"
            )
        if block := re.search(r"^ {4}.*", text, re.MULTILINE):
            yield repository.problem(
                file, "an indented block is shown as code, not as a formula", block[0]
            )


def check_notebook_order(repository: Repository) -> Iterator[Problem]:
    """Check that the lists name every notebook, and that each links the next one."""
    files = repository.find(NOTEBOOKS)
    names = [file.removeprefix("notebooks/") for file in files]
    last_of_start = repository.notebook(START).cells[-1].source
    if (
        re.findall(r"^\| \[\w+\]\((\w+\.ipynb)\)", last_of_start, re.MULTILINE)
        != names[1:]
    ):
        yield Problem(START, 1, "the last cell lists all other notebooks in order")
    following_links = [[name] for name in names[1:]] + [LINKS_OF_LAST]
    for file, name, expected in zip(files, names, following_links, strict=True):
        if f"]({name})" not in repository.text("notebooks/README.md"):
            yield Problem("notebooks/README.md", 1, f"no link to {name}")
        ways = re.findall(
            r"^Next: .*$", repository.notebook(file).cells[-1].source, re.MULTILINE
        )
        links = [link for way in ways for link in re.findall(r"\]\(([^)]+)\)", way)]
        if links != expected:
            yield Problem(
                file,
                1,
                f"the last cell has a line that begins with Next: and links {expected}",
            )


def check_glossary_links(repository: Repository) -> Iterator[Problem]:
    """Check that the first use of a glossary word links its entry."""
    for file in repository.find(NOTEBOOKS):
        text = NOT_PROSE.sub(" ", CODE.sub(" ", repository.prose(file)))
        links = list(re.finditer(r"\[[^\]]*\]\(([^)]*)\)", text))
        for word in GLOSSARY_WORDS:
            first = re.search(rf"\b{word}s?\b", text, re.IGNORECASE)
            target = f"glossary.md#{word.lower().replace(' ', '-')}"
            around = [
                link[1]
                for link in links
                if first and link.start() < first.start() < link.end()
            ]
            if first and around != [target]:
                line = text[: first.end()].rpartition("\n")[2]
                yield repository.problem(
                    file, f"link {target} at the first use: {line}", line[-30:]
                )


def check_paper_notebooks(repository: Repository) -> Iterator[Problem]:
    """Check that notebooks 03 to 07 share headings, sum up the paper briefly, and show what they promise."""
    for file in repository.find(NOTEBOOKS):
        if file_number(file) not in demo_check.PAPER:
            continue
        text = repository.prose(file)
        headings = re.findall(r"^## (?:\d\. )?(.*)$", text, re.MULTILINE)
        has_figures = any(heading.startswith("Figure") for heading in headings[3:-3])
        if (headings[:3], headings[-3:], has_figures) != (
            FIRST_HEADINGS,
            LAST_HEADINGS,
            True,
        ):
            yield Problem(
                file,
                1,
                f"expected the headings {FIRST_HEADINGS}, Figure, {LAST_HEADINGS}",
            )
        summary = text.partition("method and claims")[2].partition("\n## ")[0]
        words = len(re.sub(r"\$[^$]*\$|\]\([^)]*\)", "x", summary).split())
        if not 50 < words <= 150:
            yield Problem(file, 1, f"the paper in 50 to 150 words, not {words}")
        sweeps = re.findall(r"-f (notebooks/sweeps/\S+)", text)
        for path in sweeps or ["notebooks/sweeps/?"]:
            if not repository.exists(path):
                yield repository.problem(file, f"there is no {path}", path)
        for line in demo_check.missing(repository.notebook(file), own_runs=False):
            yield Problem(file, 1, line)


def check_study_times(repository: Repository) -> Iterator[Problem]:
    """Check that docs/teaching.md has the study times of the notebooks."""
    page = repository.text("docs/teaching.md")
    rows = re.findall(r"^\| ([\d, ]+) \| ([\d, ]+) \|", page, re.MULTILINE)
    listed = {}
    for numbers, minutes in rows:
        listed |= dict(zip(numbers.split(", "), minutes.split(", "), strict=True))
    for file in repository.find(NOTEBOOKS):
        stated = re.search(r"\*\*Study time\*\* (\d+) minutes", repository.prose(file))
        if stated and listed.get(file_number(file)) != stated[1]:
            yield repository.problem(
                "docs/teaching.md",
                f"{file} takes {stated[1]} minutes",
                f"| {file_number(file)}",
            )


def check_bands(repository: Repository) -> Iterator[Problem]:
    """Check that bands of the exercises follow from what was measured, and leave the control outside."""
    file = "data/results/bands.json"
    for name, band in json.loads(repository.text(file))["bands"].items():
        values = band["values"]
        mean, sigma = statistics.mean(values), statistics.stdev(values)
        limits = [round(mean - 4 * sigma, 4), round(mean + 4 * sigma, 4)]
        wrong = [limits[0] <= value <= limits[1] for value in band["control"]]
        is_stored = limits == [band["low"], band["high"]]
        if len(values) < 10 or not is_stored or not wrong or any(wrong):
            yield repository.problem(
                file, f"{name}: python -m bench.bands", f'"{name}"'
            )


def file_number(file: str) -> str:
    """Return the number of a notebook, such as "03"."""
    return file.rpartition("/")[2][:2]


def cell_problem(repository: Repository, file: str, cell: Any, text: str) -> Problem:
    """Return a problem at a cell of a notebook."""
    return repository.problem(file, f"cell {cell.id}: {text}", f'"id": "{cell.id}"')


def has_plain_outputs(cell: Any) -> bool:
    """Return whether a cell shows text on stdout, pictures or tables, and nothing else."""
    shown = [o for o in cell.outputs if o.output_type == "display_data"]
    texts = [
        o for o in cell.outputs if o.output_type == "stream" and o.name == "stdout"
    ]
    kinds = ({"image/png", "text/plain"}, {"text/html", "text/plain"})
    is_visible = bool(shown or "".join(o.text for o in texts).strip())
    is_plain = len(shown) + len(texts) == len(cell.outputs)
    return is_visible and is_plain and all(set(o.data) in kinds for o in shown)


def is_literal(node: ast.expr | None) -> bool:
    """Return whether an expression is a literal."""
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def used_parameters(
    code: ast.Module, calls: list[ast.Call], names: set[str]
) -> set[str]:
    """Return the parameters that code reads from `P`, itself or through a function that takes all of P."""
    attributes = [n for n in ast.walk(code) if isinstance(n, ast.Attribute)]
    used = {n.attr for n in attributes if getattr(n.value, "id", "") == "P"}
    if "run" in used:
        used |= {"workers", "device"}
    with_all = [call for call in calls if any(ast.unparse(a) == "P" for a in call.args)]
    if any("paper_runs." in ast.unparse(call.func) for call in with_all):
        used |= names
    return used


def imported_packages(node: ast.AST) -> set[str]:
    """Return the top-level packages that an import statement loads."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {str(node.module).partition(".")[0]}
    return set()
