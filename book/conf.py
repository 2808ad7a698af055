"""Configuration of Sphinx for ``make book``. No notebook is executed, and nothing comes from the network."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from binascii import a2b_base64
from functools import partial
from hashlib import sha256
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.domains.python import PyObject

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import cpt_core
from book.public_names import reference

PATHS = {
    name.split(".")[-1]: name for name in reference("cpt_core")
}  # of a public name, without cpt_core

project = "cpt_core"
author = "the cpt_core contributors"
project_copyright = author
version = release = cpt_core.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
]
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!cpt_(core|extras)\.).*")
]  # what is of other libraries has no page here

exclude_patterns = ["downloads"]  # what a page hands out as it is
nb_execution_mode = "off"  # the committed outputs are shown
nb_merge_streams = (
    True  # a cell's lines stand in one box, in however many pieces they came
)
nb_ipywidgets_js: dict[
    str, dict[str, str]
] = {}  # sliders need a kernel; their scripts would come from the network
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
pygments_dark_style = (
    "a11y-high-contrast-dark"  # beside the light one that the theme takes
)
html_title = f"cpt_core {version}"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
smartquotes_action = "D"  # dashes alone: "" is an empty string
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = (
    False  # the summaries would be fetched, which a browser refuses for files
)


def inline_math(self, node):
    """Write an inline formula as MathML, which browsers render themselves."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block_math(self, node):
    """Write a block formula as MathML."""
    self.body.append(
        f'<div class="math">{convert(node.astext(), display="block")}</div>'
    )
    raise nodes.SkipNode


def source_address(module, name):
    """Return the address of a name's source line, relative to the reference pages; None if it has none."""
    try:
        value = importlib.import_module(module)
        for part in name.split("."):
            value = (
                inspect.getattr_static(value, part)
                if inspect.isclass(value)
                else getattr(value, part)
            )
        inner = (
            getattr(value, key, None) for key in ("fget", "func", "__func__")
        )  # of a property, a class's method
        value = inspect.unwrap(next(filter(None, inner), value))
        path = Path(inspect.getsourcefile(value)).relative_to(ROOT)
        if not path.parts[0].startswith("cpt_"):
            return None  # other libraries have no page
        return f"../{path}.html#L-{inspect.getsourcelines(value)[1] or 1}"
    except (ImportError, AttributeError, TypeError, ValueError, OSError):
        return None


def linkcode_resolve(domain, info):
    """Return the link from a name of the reference to its source."""
    return source_address(info["module"], info["fullname"])


def resolve_missing(app, env, node, content):
    """Link a type that Sphinx cannot resolve: a public name to its page, any other name to its source."""
    target = node.get("reftarget", "")
    if not re.fullmatch(
        r"[\w.]+", target
    ):  # a union or a generic that Sphinx took for one name
        return content
    name = target.rsplit(".", 1)[-1]
    if target.startswith(("cpt_core.", "cpt_extras.")) and name in PATHS:
        target_object = env.get_domain("py").objects.get(f"cpt_core.{PATHS[name]}")
        address = (
            app.builder.get_relative_uri(node["refdoc"], target_object.docname)
            + f"#{target_object.node_id}"
            if target_object
            else None
        )
    else:
        address = source_address(*target.rsplit(".", 1)) if "." in target else None
    return (
        nodes.reference("", "", content, internal=True, refuri=address)
        if address
        else None
    )


def mark_sources(app, kind, name, obj, options, lines):
    """Mark ``Paper:`` and ``Differs:`` in bold, and link public names to their pages.

    Indented lines below a mark belong to it.
    """

    def link_name(match):
        other = match[1] in PATHS and match[1] not in name.split(".")
        return (
            f":py:obj:`{match[1]} <cpt_core.{PATHS[match[1]]}>`" if other else match[0]
        )

    lines[:] = [re.sub(r"``(\w+)``", link_name, line) for line in lines]
    hanging = False
    for i, line in enumerate(lines):
        hanging = line.startswith(("Paper: ", "Differs: ")) or (
            hanging and line.startswith(" ")
        )
        lines[i] = re.sub(
            r"(?<![\w`])(Paper|Differs): ",
            r"**\1:** ",
            line.lstrip() if hanging else line,
        )


def hide_unreadable_defaults(app, kind, name, obj, options, signature, returns):
    """Replace defaults such as <factory>, with which Sphinx cannot parse the signature."""
    return re.sub(r"<[^<>]+>", "...", signature) if signature else signature, returns


def protect_properties(app, kind, name, obj, options, lines):
    """Insert an empty first line into a property's docstring, where Napoleon looks for a type before a colon."""
    if kind == "property":
        lines.insert(0, "")


def mark_prose(app, doctree):
    """Mark outputs without columns as prose, so that their lines may wrap."""
    for node in doctree.findall(nodes.literal_block):
        if "output" in node["classes"] and not re.search(r"\S {2,}\S", node.astext()):
            node["classes"].append("prose")


def box_pictures(app, doctree):
    """Wrap every image in a container."""
    for image in list(doctree.findall(nodes.image)):
        alone = isinstance(image.parent, nodes.paragraph) and len(image.parent) == 1
        place = image.parent if alone else image
        place.replace_self(nodes.container("", image.deepcopy(), classes=["picture"]))


def add_alt_texts(app, doctree):
    """Add the alt texts of a notebook's images, which MyST-NB does not read from the outputs' metadata."""
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [
        output
        for cell in cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    words = {  # by the names that MyST-NB gives to the files
        sha256(a2b_base64("".join(output["data"]["image/png"]))).hexdigest(): output[
            "metadata"
        ]["image/png"]["alt"]
        for output in outputs
    }
    for node in doctree.findall(nodes.image):
        if (name := Path(node["uri"]).stem) in words:
            node["alt"] = words[name]


def fix_accessibility(app, page, template, context, doctree):
    """Correct Sphinx's HTML for screen readers: headings without a level, definition lists without terms."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    lines = re.compile(
        r"<dl>\n(?:<dd>.*</dd>\n)+</dl>"
    )  # the parameters of a signature, one on a line
    plain = partial(re.sub, r"<(d[ld])>", r'<\1 role="none">')
    context["body"] = lines.sub(lambda match: plain(match[0]), context.get("body", ""))


def setup(app):
    """Register the handlers of this module."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # what Sphinx calls variables
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("missing-reference", resolve_missing)
    app.connect("autodoc-process-docstring", protect_properties, priority=400)
    app.connect("autodoc-process-docstring", mark_sources)
    app.connect("autodoc-process-signature", hide_unreadable_defaults)
    app.connect("doctree-read", mark_prose)
    app.connect("doctree-read", add_alt_texts)
    app.connect("doctree-read", box_pictures)
    app.connect(
        "html-page-context", fix_accessibility, priority=900
    )  # after the theme's
    return {"parallel_read_safe": True}
