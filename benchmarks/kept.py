"""Write the tables and pictures of docs/ again, from the results that are kept in results/.

    python -m benchmarks.kept

A page names where a table goes, `<!-- table: policies -->` to `<!-- end -->`; what stands between
the two is replaced. The text around them is written by people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import boundaries, descriptors, languages, policies

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs/MEMORY_AND_STREAMS.md", ROOT / "docs/CONTINUAL_FINE_TUNING.md")
PICTURES = ROOT / "docs/memory-and-streams"
PLACE = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def kept(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))


def boundary_groups() -> boundaries.Groups:
    """The runs by benchmark and way."""
    groups: boundaries.Groups = {}
    for run in kept("boundaries/boundaries")["runs"]:
        groups.setdefault((run["benchmark"], run["way"]), []).append(boundaries.Found(**run))
    return groups


def descriptor_rows() -> list[dict[str, Any]]:
    """The rows of all files, the oracle and random descriptions after the other networks."""
    rows = kept("descriptors/descriptors")["rows"]
    order = list(dict.fromkeys((row["stream"], row["learner"]) for row in rows))
    rows += kept("descriptors/oracle")["rows"] + kept("descriptors/random")["rows"]
    return sorted(rows, key=lambda row: order.index((row["stream"], row["learner"])))


#: Name → a table.
TABLES: dict[str, Callable[[], str]] = {
    "policies": lambda: policies.table(kept("policies/policies")["runs"]),
    "gains": lambda: policies.gains(kept("policies/policies")["runs"]),
    "gradients": lambda: policies.table(kept("policies/gradients")["runs"]),
    "thousand-300": lambda: policies.thousand_accs(kept("policies/thousand-300")["learners"]),
    "thousand-1000": lambda: policies.thousand_table(kept("policies/thousand-1000")["learners"]),
    "boundaries": lambda: boundaries.table(boundary_groups(), T=20),
    "descriptors": lambda: f"{descriptors.table(descriptor_rows())}\n",
    "positions": lambda: descriptors.positions(descriptor_rows()),
    "languages": lambda: languages.table(kept("languages/languages")["rows"]),
    "languages-R": lambda: languages.matrices(kept("languages/languages")["rows"]),
}


def with_tables(page: str) -> str:
    """A page with the tables that its comments name."""
    return PLACE.sub(lambda place: f"{place[1]}{place[2]}\n{TABLES[place[1]]()}\n", page)


def draw(folder: Path) -> None:
    """All pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    policies.draw_accuracies(kept("policies/policies")["runs"], folder / "policies.png")
    boundaries.draw(boundary_groups(), folder / "boundaries.png", T=20, n=1000)
    descriptors.picture(descriptor_rows(), folder / "descriptors.png")


def main() -> None:
    for page in PAGES:
        page.write_text(with_tables(page.read_text("utf-8")), "utf-8")
    draw(PICTURES)


if __name__ == "__main__":
    main()
