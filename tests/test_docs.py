"""The documentation: every snippet runs, every command parses, every public name is explained.

A page's ```python blocks share one namespace and run in an empty folder. An HTML comment on the
line before a block says what it needs: `<!-- needs LIBRARY -->`, or `<!-- not run: WHY -->`.
"""

import ast
import doctest
import inspect
import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer

import gradmem
from gradmem.learners import LEARNERS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = {DOCS / "_build", DOCS / "gallery"}
PAGES = [
    path for path in sorted(DOCS.rglob("*.md")) if not GENERATED & {*path.parents}
]  # README.md is run by its doctests
FENCE = re.compile(
    r"(?:^ *<!-- (?P<note>[^\n]*) -->\n)?^(?P<indent> *)```(?P<language>python|pycon|sh)\n"
    r"(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)

#: What a page's snippets take for granted, and the libraries it is about.
GIVEN = {"LARGE_MODELS.md": (("transformers", "peft", "lightning"), "tests.docs_large_models")}
#: Without a GPU, a Trainer wants to be told so.
ON_CPU = {} if torch.cuda.is_available() else {"bf16=True": "bf16=True, use_cpu=True"}


def snippets(path, *languages):
    """(note, line, code) of a page's blocks."""
    text = path.read_text("utf-8")
    for found in FENCE.finditer(text):
        if found["language"] in languages:
            code = inspect.cleandoc("\n" + found["code"])
            yield found["note"] or "", text[: found.start("code")].count("\n") + 1, code


def with_snippets(*languages):
    return [path for path in PAGES if any(snippets(path, *languages))]


@pytest.mark.parametrize(
    "path", with_snippets("python", "pycon"), ids=lambda path: str(path.relative_to(DOCS))
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")
def test_every_snippet_of_a_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names = {"__name__": path.stem}
    if path.name in GIVEN:
        libraries, given = GIVEN[path.name]
        for library in libraries:
            pytest.importorskip(library)
        exec(f"from {given} import *", names)
    for note, line, code in snippets(path, "python", "pycon"):
        needed = note.removeprefix("needs ").split(", ") if note.startswith("needs ") else []
        if note.startswith("not run: ") or not all(map(find_spec, needed)):
            ast.parse(code)
            continue
        if code.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(code, names, path.name, str(path), line)
            options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            runner = doctest.DebugRunner(optionflags=options)
            runner.run(test, clear_globs=False)
            names = test.globs
        else:
            for given, told in ON_CPU.items():
                code = code.replace(given, told)
            # As many lines before it as in the page: an error names the page's own line.
            exec(compile("\n" * line + code, str(path), "exec"), names)


def test_there_are_snippets():
    counted = {path: sum(1 for _ in snippets(path, "python", "pycon")) for path in PAGES}
    run = sum(
        not note.startswith("not run: ")
        for path in PAGES
        for note, *_ in snippets(path, "python", "pycon")
    )
    assert sum(counted.values()) - run <= 5  # another library's own code, several machines
    assert run >= 45


def commands():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        for _, _, code in snippets(path, "sh"):
            for line in code.replace("\\\n", " ").splitlines():
                if line.startswith("gradmem "):
                    yield path, line


@pytest.mark.parametrize(
    ("path", "line"), [*dict.fromkeys(commands())], ids=lambda value: str(value)[-60:]
)
def test_every_command_in_the_documentation_is_known(path, line):
    from gradmem.cli.app import app

    group = typer.main.get_command(app)
    words = shlex.split(line, comments=True)[1:]
    if words[0] in ("--install-completion", "--show-completion"):
        assert words[0] in {option for one in group.params for option in one.opts}
        return
    assert words[0] in group.commands, line
    group.commands[words[0]].make_context(words[0], words[1:])


def test_every_learner_has_a_page():
    for name, kind in LEARNERS.items():
        text = (DOCS / "learners" / f"{name}.md").read_text("utf-8")
        assert f"gm.{kind.__name__}(" in text
        assert "**Idea.**" in text
        assert "**Use it" in text
        assert "**Equation" in text


def test_every_public_name_is_in_the_api():
    text = "".join(path.read_text("utf-8") for path in (DOCS / "api").glob("*.md"))
    named = {*re.findall(r"^\.\. auto\w+:: gradmem\.(\w+)$", text, re.MULTILINE)}
    assert named == {*gradmem.__all__} - {"__version__", "networks"}


def test_every_example_is_shown():
    text = (DOCS / "examples.md").read_text("utf-8")
    shown = {*re.findall(r"\.\./examples/(\w+)\.py", text)}
    assert shown == {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert shown == {*re.findall(r"^\((\w+)\)=$", text, re.MULTILINE)}


def public_things():
    for name in gradmem.__all__:
        thing = getattr(gradmem, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            yield name, thing
        if inspect.isclass(thing):
            for own, member in vars(thing).items():
                if own.startswith("_"):
                    continue
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) or isinstance(function, property):
                    yield f"{name}.{own}", getattr(thing, own)


@pytest.mark.parametrize(
    ("name", "thing"), [*public_things()], ids=[name for name, _ in public_things()]
)
def test_every_public_name_has_a_docstring_with_its_parameters(name, thing):
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return
    known = [p for p in inspect.signature(thing).parameters if p not in ("self", "args", "kwargs")]
    if "." in name:  # of a method, x, t and y mean what they mean everywhere
        known = [p for p in known if p not in ("x", "t", "y")]
        if len(known) < 2:  # its sentence says what becomes of it
            return
    missing = [p for p in known if not re.search(rf"\b{p}\b", text)]
    assert not missing, f"the docstring of {name} does not name {missing}"


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert project["version"] == cited[1] == gradmem.__version__
    assert f"\n## {gradmem.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_a_link_in_the_readme_leads_to_a_file():
    text = (ROOT / "README.md").read_text("utf-8")
    linked = [link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if link]
    assert len(linked) > 10
    assert not [link for link in linked if not (ROOT / link).exists()]
