"""How Sphinx makes the site: `make docs`. Nothing is fetched, and every warning is an error."""

import re
import tomllib
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import gradmem
from gradmem.board import learner_text

ROOT = Path(__file__).resolve().parent.parent

project, author = "gradmem", "The gradmem authors"
copyright = author
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "version"
]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery_scripts", "**/sg_execution_times.rst"]

html_theme = "furo"
html_title = f"gradmem {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses for files
html_math_renderer = "mathml"  # drawn by the browser: MathJax would come from the network

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]

autodoc_member_order = "bysource"
#: Libraries that integrations are for: their docstrings are read without them.
autodoc_mock_imports = ["accelerate", "lightning", "torchjd", "transformers"]
autodoc_typehints = "none"  # the docstrings say what a parameter is
autoclass_content = "class"
napoleon_google_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_ivar = True

copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": "gallery_scripts",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "plot_gallery": True,
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "image_scrapers": ("matplotlib",),
    "capture_repr": (),
}

#: What lies outside the site, and is a page of it.
PAGES = {
    "../README.md": "index.md",
    "../SECURITY.md": "security.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../CHANGELOG.md": "changes.md",
    "../benchmarks/RESULTS.md": "measured.md",
}


def link_within(app, docname, source):
    """Files that are also read beside the code link to it; on the site they link to its pages."""
    up = "../" * docname.count("/")
    text = source[0]
    for path, page in PAGES.items():
        text = text.replace(f"]({path}", f"]({up}{page}")
    text = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", rf"]({up}examples.md#\1)", text)
    source[0] = text


def on_the_board(app, docname, source):
    """A learner's page ends with its places on the board."""
    folder, _, name = docname.rpartition("/")
    figures = learner_text(ROOT / "results/board", name) if folder == "learners" else ""
    if figures:
        source[0] += f"\n## On the [board](../BOARD.md)\n\n{figures}\n"


def as_code_or_link(app, what, name, obj, options, lines):
    """In docstrings, `name` is a link where it is a public name of gradmem, else code."""

    def replaced(found):
        text, letter = found[1], found[2]
        bare = text.removeprefix("gradmem.").removeprefix("gm.")
        public = bare in gradmem.__all__ and bare != "networks"
        marked = f":py:obj:`{text} <gradmem.{bare}>`" if public else f"``{text}``"
        return marked + (f"\\ {letter}" if letter else "")  # a letter right after it, as in `Task`s

    # Names of parameters that do not fit one line: one list, as it is meant.
    text = re.sub(r",\n +(?=[a-z_, ]+\n +See `)", ", ", "\n".join(lines))
    # |g| is a length, not a substitution of reStructuredText.
    bars = r"^(?!\s*(>>>|\.\.\.)).*\|.*$"
    text = re.sub(bars, lambda line: line[0].replace("|", r"\|"), text, flags=re.MULTILINE)
    lines[:] = re.sub(r"(?<![`:\w])`([^`]+)`(?![`_])(\w?)", replaced, text).split("\n")


def inline_math(self, node):
    self.body.append(f'<span class="math">{tex2mathml(node.astext(), as_block=False)}</span>')
    raise nodes.SkipNode


def block_math(self, node):
    self.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("source-read", link_within)
    app.connect("source-read", on_the_board)
    app.connect("autodoc-process-docstring", as_code_or_link, priority=400)  # before napoleon
