"""Check the site that `make docs` made: its links, and how a browser shows it.

    python scripts/check_site.py [--browser] [FOLDER]

Links within the site must lead to a file and, with a #, to a place in it; no page may load anything
from elsewhere. With --browser, every page is opened from its file in Chromium (`chromium` on the
PATH, or the variable CHROMIUM), 1400 and 400 pixels wide: nothing may be said on the console, no
page may be wider than the window, and a search must find something. Only the standard library.
"""

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (1400, 400)
PROBE = """<script>
window.addEventListener("load", () => setTimeout(() => {
  const probe = document.createElement("pre");
  probe.id = "probe";
  probe.textContent = `${document.documentElement.scrollWidth} ${window.innerWidth}`;
  document.body.append(probe);
}, 200));
</script></body>"""
#: Tags that load what their attribute names.
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src"}


class Page(HTMLParser):
    """What a page links to, what it loads, and the places that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: "list[tuple[str, str | None]]") -> None:
        found = {name: value for name, value in attrs if value}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        attribute = LOADS.get(tag)
        if attribute in found and found.get("rel") not in ("canonical", "author"):
            self.loads.append(found[attribute])


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the links and pages of the site.")
    parser.add_argument("folder", nargs="?", default=ROOT / "docs/_build/html", type=Path)
    parser.add_argument("--browser", action="store_true", help="open every page in Chromium, too")
    arguments = parser.parse_args()
    pages = {
        path: Page(path.read_text("utf-8"))
        for path in sorted(arguments.folder.resolve().rglob("*.html"))
    }
    if not pages:
        sys.exit(f"{arguments.folder} has no pages: `make docs` makes them")
    wrong = wrong_links(pages)
    n_links = sum(len(page.links) + len(page.loads) for page in pages.values())
    print(f"{len(pages)} pages, {n_links} links: {len(wrong)} wrong", flush=True)
    if arguments.browser:
        seen = wrong_views(list(pages), arguments.folder.resolve())
        print(f"{len(pages)} pages in a browser, {WIDTHS} pixels wide: {len(seen)} wrong")
        wrong += seen
    if wrong:
        sys.exit("\n".join(wrong))


def wrong_links(pages: "dict[Path, Page]") -> "list[str]":
    """Links that lead nowhere, and what is loaded from elsewhere."""
    wrong = []
    for path, page in pages.items():
        for link in page.loads:
            if urlsplit(link).netloc:
                wrong.append(f"{path}: loads {link}")
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                wrong.append(f"{path}: {link} does not exist")
            elif target in pages and parts.fragment:
                places = pages[target].places | {"", "top", "svg-search"}
                if unquote(parts.fragment) not in places:
                    wrong.append(f"{path}: {link}: no such place")
    return wrong


def wrong_views(paths: "list[Path]", folder: Path) -> "list[str]":
    """Pages that say something on the console, or are wider than the window."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not chromium:
        sys.exit("no chromium on the PATH and none in CHROMIUM")
    wrong = []
    with tempfile.TemporaryDirectory() as profile:
        for width in WIDTHS:
            for path in paths:
                dom, said = look(chromium, path, width, profile)
                wrong += [f"{path} at {width}: {line}" for line in said]
                sizes = re.search(r'<pre id="probe">(\d+) (\d+)</pre>', dom)
                if not sizes or int(sizes[1]) > int(sizes[2]):
                    wrong.append(
                        f"{path} at {width}: {sizes and sizes[0]} is wider than the window"
                    )
        dom, said = look(chromium, folder / "search.html", 1400, profile, "?q=projection")
        found = re.search(r"found (\d+) page", html.unescape(dom))
        if said or not found:
            wrong.append(f"the search for projection finds nothing; {said}")
        else:
            print(f"the search for projection found {found[1]} pages")
    return wrong


def look(
    chromium: str, path: Path, width: int, profile: str, query: str = ""
) -> "tuple[str, list[str]]":
    """What a browser makes of a page: the document, and lines on the console."""
    before, _, after = path.read_text("utf-8").rpartition("</body>")
    probed = path.with_name("probed-page.html")
    probed.write_text(before + PROBE + after, "utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={profile}", f"--window-size={width},2000"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=8000"]
    command += ["--dump-dom", probed.as_uri() + query]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        probed.unlink()
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


if __name__ == "__main__":
    main()
