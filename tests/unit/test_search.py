"""What a reader types into the site's search leads to one page, which has all four frameworks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FRAMEWORKS = "verl", "SkyRL", "NeMo-RL", "torchtitan"
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("fp8", "both-sides"),
        ("old checkpoints", "checkpoints"),
        ("overhead", "cost"),
        ("performance", "cost"),
    ],
)
def test_a_word_leads_to_one_page_for_all_frameworks(words: str, page: str) -> None:
    """Sphinx ranks a word in a heading above a word in a text."""
    headings = {
        (one.stem, heading)
        for one in DOCS.rglob("*.md")
        for heading in HEADING.findall(one.read_text(encoding="utf-8"))
        if re.search(rf"\b{words}\b", heading, re.IGNORECASE)
    }
    assert {name for name, _ in headings} == {page}
    ((_, heading),) = headings
    _, begin, rest = (DOCS / f"{page}.md").read_text(encoding="utf-8").partition(f"# {heading}\n")
    assert begin
    section = rest if page == "cost" else rest.partition("\n## ")[0]  # cost: the page's title
    assert all(framework in section for framework in FRAMEWORKS)
