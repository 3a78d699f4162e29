"""Settings of the site: `make docs` builds it out of these pages and the docstrings."""

import inspect
import os
import re
import shutil
import tomllib
from importlib import import_module
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from pydantic import BaseModel
from sphinx import addnodes
from sphinx.util.inspect import stringify_signature

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FIGURES, ANALYSES = ROOT / "figures", ROOT / "analyses"
CHECKOUT = (
    "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/blob/{GITHUB_SHA}".format_map(os.environ)
    if "GITHUB_SHA" in os.environ
    else ROOT.as_uri()
)
"""Address of the files that are not on the site: on GitHub, or on this machine."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

SECTION = re.compile(r"^(?:Args|Attributes|Example|Raises|Returns|Yields):$", re.MULTILINE)
CODE_BLOCK = re.compile(r"(?<=\n\n) {4}\S.*(?:\n+ {4}.*)*")
INLINE = re.compile(
    r"(?P<kept>^ *>>>.*?(?:\n\n|\Z)|^::\n\n.*?(?:\n\n(?! )|\Z))"
    r"|`(?P<code>[^`]+)`(?P<more>\w)?|(?P<mark>[*|]|(?<=\w)_(?!\w))",
    re.MULTILINE | re.DOTALL,
)
COLON = "\0"
"""In docstrings of attributes, where Napoleon would take what stands before a colon for a type."""

project = "lapa2_interp"
author = copyright = "the authors of lapa2_interp"
version = release = PROJECT["version"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.linkcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"lapa2_interp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_math_renderer = "mathml"
# The last one is the owner's name before there is one.
linkcheck_ignore = [re.escape(CHECKOUT), r"(\.\./)*figures/", ".*/-owner-/"]

smartquotes_action = "D"  # dashes alone: quotes stay as code has them

nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3

default_role = "py:obj"
add_module_names = False
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
nitpicky = True
# Code in backticks need not be a name, and types may be any library's: only links, headings and
# errors are checked.
nitpick_ignore_regex = [
    ("py:(obj|class)", ".*"),
    ("py:exc", "(Type|Value|Attribute|Key|Index|FileNotFound|Import)Error"),
]


def inline_markup(match):
    """Code in backticks: a name, which may be linked, or other code. Nothing else is markup."""
    if match["mark"]:
        return "\\" + match["mark"]
    if not match["code"]:
        return match["kept"]
    code = " ".join(match["code"].split())
    ticks = "`" if re.fullmatch(r"[\w.]+(\(\))?", code) else "``"
    return f"{ticks}{code}{ticks}" + (f"\\ {match['more']}" if match["more"] else "")


def as_restructured_text(app, what, name, obj, options, lines):
    """Docstrings are plain text in Google's style; blocks of code are indented, as in Markdown."""
    text = "\n".join(lines)
    section = SECTION.search(text)
    start = section.start() if section else len(text)
    prose = CODE_BLOCK.sub(lambda block: f"::\n\n{block[0]}", text[:start])
    if what in ("attribute", "data", "property"):
        prose = prose.replace(":", COLON)
    lines[:] = INLINE.sub(inline_markup, prose + text[start:]).split("\n")


def restore_colons(app, what, name, obj, options, lines):
    lines[:] = [line.replace(COLON, ":") for line in lines]


def types_as_written(app, what, name, obj, options, signature, returned):
    """Signatures name types as the code does: an alias is not spelt out."""
    if not signature:
        return None
    inspected = inspect.signature(obj)
    parameters = [
        parameter for parameter in inspected.parameters.values() if parameter.name != "self"
    ]
    if isinstance(obj, type) and issubclass(obj, BaseModel):  # whose signature has them evaluated
        types = {}
        for base in reversed(obj.__mro__):
            types |= inspect.get_annotations(base)
        parameters = [
            parameter.replace(annotation=types[parameter.name]) for parameter in parameters
        ]
    written = inspected.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return stringify_signature(written), None if returned is None else inspected.return_annotation


def linkcode_resolve(domain, names):
    """Address of the code of a class, a function or a method; None for other objects."""
    value = import_module(names["module"])
    for name in names["fullname"].split("."):
        value = getattr(value, name, None)
    value = inspect.unwrap(getattr(value, "fget", None) or value)
    if not (inspect.isclass(value) or inspect.isfunction(value) or inspect.ismethod(value)):
        return None
    file = Path(inspect.getsourcefile(value))
    if not file.is_relative_to(ROOT / "lapa2_interp"):
        return None
    return f"{CHECKOUT}/{file.relative_to(ROOT).as_posix()}#L{inspect.getsourcelines(value)[1]}"


def include_the_studies(app, config):
    """A page for the README.md of every study, which stands beside its scripts."""
    pages = DOCS / "studies"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir()
    for readme in ANALYSES.glob("*/README.md"):
        text = f"```{{include}} ../../{readme.relative_to(ROOT).as_posix()}\n```\n"
        (pages / f"{readme.parent.name}.md").write_text(text, "utf-8")


def link_the_checkout(app, doctree):
    """Links to files and folders outside docs/ go to the checkout; to a page of figures, to its
    copy on the site; to a document that has a page (a top-level one, or of a study), to that
    page."""
    document = app.env.docname
    for kind in (addnodes.download_reference, addnodes.pending_xref):
        for node in list(doctree.findall(kind)):
            # The last two are of included documents.
            folders = ((DOCS / document).parent, DOCS, ROOT, ANALYSES / Path(document).name)
            names = (node["reftarget"], node["reftarget"] + ".md")
            paths = [(folder / name).resolve() for folder in folders for name in names]
            path = next((path for path in paths if path.exists()), DOCS)
            if node["reftype"] != "myst" or path.is_relative_to(DOCS):
                continue
            name = path.relative_to(ROOT).as_posix()
            of_study = path.name == "README.md" and path.parent.parent == ANALYSES
            page = f"studies/{path.parent.name}" if of_study else path.stem.lower()
            if (of_study or path.parent == ROOT) and page in app.env.found_docs:
                to_page = {"refdomain": "doc", "reftarget": page, "reftargetid": None}
                link = addnodes.pending_xref(**node.attributes | to_page)
            elif path.suffix == ".html":
                link = nodes.reference(refuri="../" * document.count("/") + name)
            else:
                link = nodes.reference(refuri=f"{CHECKOUT}/{name}")
            link += node.children
            node.replace_self(link)


PICTURE = re.compile(
    r"!\[(?P<title>[^\]]+)\]\((?P<file>[^)\s]+\.png)\)(?:\n\n\*(?P<note>[^*]+)\*\n)?"
)


QUESTION = re.compile(r"# Figure \w+: (.+?\?)\s*#?\s+(.+?\.)\s")
"""What a script of a figure of the paper asks, and what the figure shows."""


def shown_on(figure):
    """The page that shows a figure, and the match of PICTURE there; of a figure that none shows,
    those of a figure of the same name and study; or None."""
    pictures = {}
    pages = [*sorted(ANALYSES.glob("*/README.md")), *sorted(DOCS.glob("*.md")), ROOT / "README.md"]
    for page in pages:
        for shown in PICTURE.finditer(page.read_text("utf-8")):
            pictures.setdefault((page.parent / shown["file"]).resolve(), (page, shown))
    study = figure.relative_to(FIGURES).parts[0]
    alike = (at for at in pictures if at.name == figure.name and study in at.parts)
    return pictures.get(figure) or pictures.get(next(alike, None))


def title_of(figure):
    """The heading of the table beside a figure; without one, what a page calls it."""
    tables = [*figure.parent.glob(f"tables/{figure.stem}.md"), *figure.parent.glob("*.md")]
    if tables:
        return tables[0].read_text("utf-8").splitlines()[0].strip("# ")
    page, shown = shown_on(figure)
    is_other = (page.parent / shown["file"]).resolve() != figure
    return f"{shown['title']}: {figure.parent.name}" if is_other else shown["title"]


def inside_a_sentence(title):
    """A title without its capital, unless its first word is a name such as NegPrompt."""
    is_name = not title.split()[0][1:].islower()
    return title if is_name else title[0].lower() + title[1:]


def caption_of(figure):
    """A sentence that says what one sees, what the page that shows the figure says under it, and a
    link to that page. It stands above the figure."""
    title, of_one, _ = title_of(figure).partition(f": {figure.parent.name}")
    where = f", for `{figure.parent.name}`" if of_one else ""
    sees = f"This picture shows {inside_a_sentence(title)}{where}."
    script = ANALYSES / "paper" / f"{figure.stem}.py"
    if figure.is_relative_to(FIGURES / "paper") and script.is_file():
        question, shows = QUESTION.search(script.read_text("utf-8").replace("\n# ", " ")).groups()
        asks = f"{question[0].upper()}{question[1:]}"
        sees = f"{asks} This picture shows {inside_a_sentence(shows)}"
    page, shown = shown_on(figure) or (DOCS / "results.md", {"note": None})
    heading = re.search("^# (.+)", page.read_text("utf-8"))[1]
    note = " ".join((shown["note"] or "").split())
    address = "index.md" if page.parent == ROOT else os.path.relpath(page, DOCS)
    link = f"[{heading}]({address})"
    return f"{sees} {note if '](' not in note else ''}".rstrip() + f" {link} discusses it."


def fill_the_gallery(app, document, source):
    """Every committed figure and page of figures, found in its folder."""
    if document == "gallery":
        of_paper = FIGURES / "paper"
        for figure in sorted(FIGURES.rglob("*.png"), key=lambda f: (of_paper not in f.parents, f)):
            path, title = figure.relative_to(ROOT), title_of(figure)
            source[0] += f"\n## {title}\n\n{caption_of(figure)}\n\n![{title}](../{path})\n"
        source[0] += "\n## Pages\n\nThese pages have more figures, and open in the browser.\n\n"
        for page in sorted(FIGURES.rglob("*.html")):
            title = re.search("<title>(.+)</title>", page.read_text("utf-8"))[1]
            source[0] += f"- [{title}](../{page.relative_to(ROOT)})\n"


def find_without_module(app, env, node, contnode):
    """Docstrings and types name what other pages document without its module."""
    domain = env.domains.python_domain
    for module in list(domain.modules) if node["refdomain"] == "py" else ():
        node["py:module"] = module
        if reference := domain.resolve_xref(
            env, node["refdoc"], app.builder, node["reftype"], node["reftarget"], node, contnode
        ):
            return reference
    return None


def copy_pages_of_figures(app, error):
    """The committed reports, which stand alone, at the same place on the site."""
    for page in [] if error else FIGURES.rglob("*.html"):
        copy = Path(app.outdir) / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, copy)


def write_inline_math(translator, node):
    translator.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def write_block_math(translator, node):
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.connect("config-inited", include_the_studies)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", restore_colons, priority=600)  # after it
    app.connect("autodoc-process-signature", types_as_written)
    app.connect("source-read", fill_the_gallery)
    app.connect("doctree-read", link_the_checkout, priority=400)  # before files are collected
    app.connect("missing-reference", find_without_module)
    app.connect("build-finished", copy_pages_of_figures)
    app.add_html_math_renderer("mathml", (write_inline_math, None), (write_block_math, None))
