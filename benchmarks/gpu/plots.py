"""Draws bars and curves as SVG, so that a run needs no plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 210, 150, 46, 30
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888")
INK, GRID = "#333333", "#dddddd"


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        name: the name in the legend; curves with equal names have one entry.
        values: one value per step.
        colour: index in ``COLOURS``.
    """

    name: str
    values: Sequence[float]
    colour: int


def _document(height: float, body: Sequence[str], title: str) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
            text(12, 20, title, size=14),
            *body,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, what: str, *, anchor: str = "start", size: int = 12) -> str:
    """An SVG element with text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{INK}">{escape(what)}</text>'
    )


def box(x: float, y: float, width: float, height: float, colour: int) -> str:
    """A filled rectangle."""
    fill = COLOURS[colour % len(COLOURS)]
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{height:.1f}" '
        f'fill="{fill}"/>'
    )


def legend(names: Sequence[str], y: float) -> list[str]:
    """Draw one row with each name and its colour."""
    shown, x = [], 12.0
    for number, name in enumerate(names):
        shown += [box(x, y - 9, 10, 10, number), text(x + 14, y, name)]
        x += 24 + 6.6 * len(name)
    return shown


def bars(title: str, rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Draw one bar per row, stacked from the row's named parts, with their sum at its end."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    largest = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    across = (WIDTH - LEFT - RIGHT) / largest
    body, y = [], float(TOP)
    for row, parts in rows.items():
        body.append(text(LEFT - 8, y + 15, row, anchor="end"))
        x = float(LEFT)
        for name, value in parts.items():
            body.append(box(x, y, value * across, ROW - 10, names.index(name)))
            x += value * across
        body.append(text(x + 6, y + 15, f"{sum(parts.values()):.4g} {unit}"))
        y += ROW
    return _document(y + 34, [*body, *legend(names, y + 18)], title)


def lines(title: str, curves: Sequence[Line], unit: str) -> str:
    """Draw curves over steps."""
    height, low, high = 300.0, *_range([value for one in curves for value in one.values])
    longest = max((len(one.values) for one in curves), default=1)
    right, bottom = WIDTH - 20, TOP + height
    body = []
    for part in range(5):
        value, y = low + (high - low) * part / 4, bottom - height * part / 4
        body.append(f'<path d="M 60 {y:.1f} H {right}" stroke="{GRID}" fill="none"/>')
        body.append(text(54, y + 4, f"{value:.3g}", anchor="end"))
    for one in curves:
        points = " ".join(
            f"{60 + (right - 60) * number / max(longest - 1, 1):.1f},"
            f"{bottom - height * (value - low) / (high - low):.1f}"
            for number, value in enumerate(one.values)
        )
        colour = COLOURS[one.colour % len(COLOURS)]
        body.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>'
        )
    body.append(text(right, bottom + 16, f"{longest} steps, {unit}", anchor="end"))
    names = [one.name for one in sorted(curves, key=lambda one: one.colour)]
    shown = legend(list(dict.fromkeys(names)), bottom + 16)
    return _document(bottom + 30, [*body, *shown], title)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)
