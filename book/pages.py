"""Pages of the site: documents of the repository, a page per public name, a page per source file.

Sphinx reads one folder. It is written here, in the layout of the repository, so that links between pages stay as they
are; only those to files that are no pages lead to the page that shows the file.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound

import cpt_core
from bench import PACKAGES
from book import zoo
from book.public_names import reference
from cpt_lessons.predictions import with_answers

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "*.md",
    "docs/**/*.md",
    "notebooks/*.md",
    "notebooks/*.ipynb",
    "data/cards/*.md",
)
FOREIGN_BASES = "Module, tuple, BaseException"  # classes of other libraries, whose members are theirs
SOURCE = (".py", ".cpp", ".h", ".js", ".j2", ".patch")
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)([^)]*\))")
NAMES = reference("cpt_core")  # such as search.allocate, and the module of each
DOWNLOAD = "{{download}}`Download this notebook <../downloads/{}>` and [run it](../docs/installing.md#notebooks)."
PROMPT = re.compile(
    r"^.*: (no prediction yet|choose first|not attempted yet).*\n?", re.MULTILINE
)
EXPLORER = "`cpt explorer explorer.html`"  # writes a page that the site has
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def pages() -> dict[str, str | bytes]:
    """Return the content of every page, by its path in the folder that Sphinx reads."""
    documents = [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]
    source_files = {
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in SOURCE
    }
    pages_by_path: dict[str, str | bytes] = {
        "index.md": (ROOT / "book/index.md").read_text(encoding="utf-8")
    }
    for path in documents:
        text, linked_files = relink(path, path.read_text(encoding="utf-8"), documents)
        source_files |= {
            target
            for target in linked_files
            if target.is_file() and target not in documents
        }
        pages_by_path[str(path.relative_to(ROOT))] = text
    for path in sorted(source_files):
        name = str(path.relative_to(ROOT))
        if path.suffix == ".png":
            pages_by_path[name] = path.read_bytes()
        else:
            pages_by_path[f"{name}.md"] = source_page(
                name, path.read_text(encoding="utf-8")
            )
    for path in ROOT.glob("notebooks/*.ipynb"):
        pages_by_path[f"downloads/{path.name}"] = path.read_bytes()
    folders = {path.parent for path in source_files if path.suffix in SOURCE} | {
        ROOT / "data/cards"
    }
    pages_by_path |= {
        f"{folder.relative_to(ROOT)}/index.md": folder_page(folder, folders)
        for folder in folders
    }
    pages_by_path["zoo.md"] = zoo.page()
    pages_by_path["api/index.md"] = api_index()
    pages_by_path |= {f"api/{name}.md": name_page(name) for name in NAMES}
    return pages_by_path


def write(folder: Path) -> None:
    """Write every page into a folder."""
    for name, text in pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


# --- links ------------------------------------------------------------------------------------------


def relink(path: Path, text: str, documents: list[Path]) -> tuple[str, set[Path]]:
    """Rewrite the links of a page; return it with the files and folders that it links to."""
    linked_files: set[Path] = set()

    def lead(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / match[2]))
        if not target.exists():
            raise FileNotFoundError(
                f"{path.relative_to(ROOT)} links to {match[2]}, which is not there"
            )
        if target == Path(zoo.__file__):  # the site has the page that it makes
            return f"{match[1]}{os.path.relpath(ROOT / f'{target.stem}.md', path.parent)}{match[3]}"
        linked_files.add(target)
        if target.is_dir():
            return f"{match[1]}{match[2].rstrip('/')}/index.md{match[3]}"
        if target in documents or target.suffix == ".png":
            return match[0]
        return f"{match[1]}{match[2]}.md{match[3]}"

    def prose(words: str) -> str:
        parts = CODE.split(words)
        parts[::2] = [LINK.sub(lead, part) for part in parts[::2]]
        explorer = f'<a href="{os.path.relpath(ROOT / "explorer.html", path.parent)}">{EXPLORER}</a>'
        parts[1::2] = [explorer if part == EXPLORER else part for part in parts[1::2]]
        return "".join(parts)

    if path.suffix != ".ipynb":
        return prose(text), linked_files
    book = json.loads(text)
    book["cells"] = list(with_answers(book["cells"]))
    title, _, rest = "".join(book["cells"][0]["source"]).partition("\n")
    book["cells"][0]["source"] = f"{title}\n\n{DOWNLOAD.format(path.name)}\n{rest}"
    for cell in book["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = prose("".join(cell["source"]))
    book["cells"] = list(without_prompts(book["cells"]))
    return json.dumps(book, ensure_ascii=False), linked_files


def without_prompts(cells: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the cells of a notebook without prompts for answers: a page has no kernel."""
    for cell in cells:
        yield cell
        if cell["cell_type"] == "code":
            for output in cell["outputs"]:
                if "text" in output:
                    output["text"] = PROMPT.sub("", "".join(output["text"]))
            cell["outputs"] = [
                output for output in cell["outputs"] if output.get("text", "-").strip()
            ]


# --- the source -------------------------------------------------------------------------------------


def source_page(name: str, text: str) -> str:
    """Return the page of a source file, with an anchor per line (``#L-12``); the search omits it."""
    try:
        lexer = get_lexer_for_filename(name)
    except ClassNotFound:
        lexer = TextLexer()
    html = highlight(
        text, lexer, HtmlFormatter(linenos="inline", lineanchors="L", wrapcode=True)
    )
    fence = "`" * 12
    head = f"---\nnosearch: true\norphan: true\n---\n# {name}"
    return f'{head}\n\n{fence}{{raw}} html\n<div class="source">{html}</div>\n{fence}\n'


def folder_page(folder: Path, folders: set[Path]) -> str:
    """Return the page of a folder: its purpose, and the list of its pages."""
    init_file = folder / "__init__.py"
    description = (
        rst(ast.get_docstring(ast.parse(init_file.read_text(encoding="utf-8"))) or "")
        if init_file.exists()
        else ""
    )
    if folder == ROOT / "data/cards":
        return f"# Data sets\n\n{toctree(sorted(p.stem for p in folder.glob('*.md')))}"
    title = str(folder.relative_to(ROOT))
    if folder == ROOT / "notebooks/solutions":
        title, description = (
            "Solutions",
            "A file per notebook. Try each exercise first: its check names what is still wrong.",
        )
    below = toctree(
        [f"{f.name} <{f.name}/index>" for f in sorted(folders) if f.parent == folder]
    )
    files = "\n".join(
        f"- [`{p.name}`]({p.name}.md)"
        for p in sorted(folder.iterdir())
        if p.suffix in SOURCE
    )
    return f"# {title}\n\n{description}\n{below}\n{files}\n"


def toctree(entries: list[str]) -> str:
    """Return the directive that lists pages."""
    return "```{toctree}\n:maxdepth: 1\n\n" + "\n".join(entries) + "\n```\n"


def rst(text: str) -> str:
    """Return a block of reStructuredText for a Markdown page."""
    return f"```{{eval-rst}}\n{text}\n```\n"


# --- the reference ----------------------------------------------------------------------------------


def api_index() -> str:
    """Return the page of all public names by package, each with its first sentence."""
    parts = [
        "# Public names\n\nEvery name of `import cpt_core as cpt`; `search.allocate` is `cpt.search.allocate`. "
        "Names are resolved on first use.\n"
    ]
    packages = {name: ".".join(home.split(".")[:2]) for name, home in NAMES.items()}
    for package in dict.fromkeys(packages.values()):
        description = __import__(package, fromlist=["x"]).__doc__.strip()
        names = [name for name, home in packages.items() if home == package]
        rows = [f"   * - :doc:`{name}`\n     - {first_line(name)}" for name in names]
        table = ".. list-table::\n   :widths: 30 70\n\n" + "\n".join(rows)
        parts.append(f"## {package}\n\n{rst(description)}\n{rst(table)}")
    return (
        "\n".join(parts)
        + "\n"
        + toctree(list(NAMES)).replace(":maxdepth: 1", ":hidden:")
    )


def first_line(name: str) -> str:
    """Return the first sentence of the docstring of a public name, or of the comment above a table."""
    description = public_docstring(name)
    return " ".join(re.split(r"(?<=\.)\s|\n\n", description, maxsplit=1)[0].split())


def public_docstring(name: str) -> str:
    """Return the docstring of a public name, or the comment above a table of names."""
    value = attrgetter(name)(cpt_core)
    if not isinstance(value, Mapping):
        return inspect.getdoc(value) or ""
    path = ROOT / f"{NAMES[name].replace('.', '/')}.py"
    above = re.search(
        rf"((?:^#.*\n)*)^{name.split('.')[-1]}\b",
        path.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    comment = (
        " ".join(line.lstrip("# ") for line in above[1].splitlines()) if above else ""
    )
    return f"A dict from {len(value)} names to {kind(value)}. {comment}".strip()


def kind(value: Mapping[str, Any]) -> str:
    """Return the type of the values of a table of names."""
    value_type = next(iter(value.values()))
    return (
        f"classes of {value_type.__mro__[1].__name__}"
        if inspect.isclass(value_type)
        else type(value_type).__name__
    )


def name_page(name: str) -> str:
    """Return the page of a public name: an autodoc directive, or the entries of a table of names."""
    value = attrgetter(name)(cpt_core)
    if isinstance(value, Mapping):
        rows = [
            f'      * - ``"{key}"``\n        - {entry(key, item)}'
            for key, item in value.items()
        ]
        table = "   .. list-table::\n      :widths: 20 80\n\n" + "\n".join(rows)
        body = f".. py:data:: cpt_core.{name}\n\n   {public_docstring(name)}\n\n{table}"
    elif inspect.isclass(value):
        body = f".. autoclass:: cpt_core.{name}\n   :members:\n   :inherited-members: {FOREIGN_BASES}"
        if value.__bases__ != (object,):
            body += "\n   :show-inheritance:"
    else:
        body = f".. autofunction:: cpt_core.{name}"
    return f"# {name}\n\n{rst(body)}"


def entry(name: str, value: Any) -> str:
    """Return a table's value as text: its fields, without functions and default values."""
    if inspect.isclass(value):
        return f"``{value.__name__!r}``"
    if not dataclasses.is_dataclass(value):
        return f"``{value!r}``"

    texts = []
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if content not in (field.default, name) and not callable(content):
            texts.append(f"*{field.name}*: {escaped(content)}")
    return "; ".join(texts)


def escaped(value: Any) -> str:
    """Return the text of a value with markup escaped."""
    return re.sub(r"([*_`|])", r"\\\1", str(value))
