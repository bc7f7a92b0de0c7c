"""The table of quantized layers in docs/numerics.md shows what the page says of it."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"
BF16, BLOCKS, TENSOR = "bf16", "fp8, blocks", "fp8, per tensor"


def rows() -> dict[tuple[str, str], tuple[float, float]]:
    """Each pair's median k3 and largest difference."""
    text = PAGE.read_text(encoding="utf-8")
    block = text.partition("<!-- computed:formats -->")[2].partition("<!-- /computed:formats -->")[
        0
    ]
    cells = [line.replace("\\|", "").split("|")[1:-1] for line in block.splitlines() if "|" in line]
    return {
        (one[0].strip(), one[1].strip()): (float(one[2].split()[0]), float(one[3].split()[0]))
        for one in cells[2:]
    }


def test_the_rows_have_the_order_that_the_page_names() -> None:
    found = rows()
    k3 = {pair: one[0] for pair, one in found.items()}
    assert min(k3, key=k3.__getitem__) == (BF16, BF16)
    assert min(found, key=lambda pair: found[pair][1]) == (BF16, BF16)
    for name in (BLOCKS, "mxfp8"):
        assert k3[name, name] < k3[BF16, name]
    assert k3[TENSOR, TENSOR] >= k3[BF16, TENSOR]
    assert k3[BLOCKS, TENSOR] > max(k3[BF16, BLOCKS], k3[BF16, TENSOR])
    eight = [k3[pair] for pair in k3 if "nvfp4" not in pair]
    assert min(k3[pair] for pair in k3 if "nvfp4" in pair) > max(eight)
