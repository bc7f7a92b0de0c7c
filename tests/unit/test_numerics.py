"""docs/numerics.md shows what ``benchmarks/numerics.py`` computes on any CPU."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def numerics() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numerics", ROOT / "benchmarks" / "numerics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the module's dataclass looks its own module up in sys.modules
    spec.loader.exec_module(module)
    return module


def numbers(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"(?<![\w.`])\d[\d.]*(?:e[+-]\d+)?(?![\w`])", text)]


@pytest.fixture(scope="module")
def made(numerics: ModuleType) -> dict[str, Any]:
    return dict(numerics.blocks())


def test_the_page_has_what_is_computed(made: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    for name, (text, curves) in made.items():
        found = re.search(f"<!-- computed:{name} -->\n(.*?)\n<!-- /", page, re.DOTALL)
        assert found, name
        # Logarithms of another CPU may differ in the last bit, which rounding can make visible.
        assert numbers(found[1]) == pytest.approx(numbers(text), rel=0.02, abs=2e-3), name
        assert curves is None or (ROOT / "docs" / "images" / f"{name}.svg").exists()


def test_what_the_page_claims(made: dict[str, Any]) -> None:
    lines = {name: curves.lines for name, (_, curves) in made.items() if curves is not None}
    last = {name: values[-1] for name, values in lines["second-moment"].items()}
    assert last["beta2 = 0.999"] > 50
    assert last["beta2 = 0.99"] == pytest.approx(1, abs=0.05)
    assert last["beta2 = 0.95"] == pytest.approx(1, abs=0.05)
    lost = lines["lost-updates"]
    assert lost["bf16 with remainder"] == lost["weights in fp32"]
    total = {name: sum(values) for name, values in lost.items()}
    assert total["weights in bf16"] > total["weights in fp16"] > total["weights in fp32"]
    apart = lines["mismatch"]
    for bf16, fp16 in zip(apart["bf16"], apart["fp16"], strict=True):
        assert 30 < bf16 / fp16 < 120  # 64, were every rounding independent
