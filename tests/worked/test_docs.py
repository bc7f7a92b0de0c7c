"""docs/adding-a-framework.md shows the adapters unchanged, and they stay small."""

from __future__ import annotations

import pytest

from .conftest import SITE

PAGE = SITE.parents[2] / "docs" / "adding-a-framework.md"


ROOT = PAGE.parents[1]
SHOWN = (
    "tests/worked/site/tinytron_shim.py",
    "tests/worked/site/tinyfsdp_shim.py",
    "adapters/precision_shim_adapters/slime/adapter.py",
)


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_the_adapter(name: str, request: pytest.FixtureRequest) -> None:
    code = (ROOT / name).read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 80
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- file: {name} -->\n", "<!-- /file -->"
    before, found, rest = page.partition(begin)
    assert found, f"{PAGE.name} lacks {begin}"
    held, _, after = rest.partition(end)
    wanted = f"```python\n{code}```\n"
    if request.config.getoption("--write-docs"):
        PAGE.write_text(before + begin + wanted + end + after, encoding="utf-8")
        return
    assert held == wanted, f"write it anew: pytest {request.node.nodeid} --write-docs"
