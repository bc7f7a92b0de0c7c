"""Prints the end of the demo's output, from the results of both runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .worker import precision_keys

if TYPE_CHECKING:
    from rich.console import Console

    from .report import Check, Tolerance


def say_what_differs(
    console: Console, optim: dict[str, Any], without: dict[str, Any], verl: str
) -> None:
    """Print which settings the run without the shim leaves out, and why."""
    adam = without["transformer_engine"]
    if adam["checked_by"] == "stand-in":
        console.print(
            f"\nFusedAdam is the pure-torch stand-in for TransformerEngine {adam['version']}, in "
            "both runs: TransformerEngine is not installed here."
        )
    else:
        console.print(
            f"\nFusedAdam's arguments are judged by the installed TransformerEngine "
            f"{adam['version']}; its steps are the pure-torch stand-in's, in both runs: the real "
            "ones need a GPU."
        )
    left_out = precision_keys(optim)
    if not left_out:
        return
    if without["as_written"] is None:
        console.print(f"verl {verl} takes the settings as they are written.")
    else:
        console.print(f"Without the shim verl {verl} ends with these settings, as written, in")
        indented(console, without["as_written"], "yellow")
    console.print(
        f"So the run without the shim is verl as it runs today: the same settings less "
        f"{', '.join(left_out)}."
    )


def say_in_force(
    console: Console, nproc: int, without: dict[str, Any], with_shim: dict[str, Any]
) -> None:
    """Print the dtypes and sizes of the live objects of both runs."""
    from rich import box
    from rich.table import Table

    from . import report

    def mega(result: dict[str, Any]) -> str:
        return f"{result['runs'][0]['ranks'][0]['total'] / 1e6:.2f} MB"

    rank = without["runs"][0]["ranks"][0]
    title = f"In force in the live objects; {rank['trainable']:,} bf16 parameters"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("without", "with the shim"):
        table.add_column(name)
        table.add_column("B/param", justify="right")
    rows = list(zip(report.in_force(without), report.in_force(with_shim), strict=True))
    for before, after in rows[:-1]:
        style = None if before[1:] == after[1:] else "green"
        table.add_row(*before, *after[1:], style=style)
    table.add_section()
    before, after = rows[-1]
    table.add_row(*before, *after[1:], style="bold")
    held = "held by rank 0" + (f" of {nproc}" if nproc > 1 else "")
    table.add_row(held, "", mega(without), "", mega(with_shim))
    console.print()
    console.print(table)


def say_losses(
    console: Console, without: dict[str, Any], with_shim: dict[str, Any], allowed: Tolerance
) -> None:
    """Print the losses of both runs, and how much their final losses differ."""
    from rich import box
    from rich.table import Table

    from . import report

    first = [result["runs"][0]["losses"] for result in (without, with_shim)]
    low, high = min(map(min, first)), max(map(max, first))
    console.print("\n[bold]Training loss[/], seed 0, nats per byte")
    for label, losses in zip(("without", "with   "), first, strict=True):
        line = report.sparkline(losses, 52, low, high)
        console.print(f"{label} {losses[0]:.2f} {line} {losses[-1]:.2f}")
    table = Table(
        title="Final loss, on text held out", title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for name in ("seed", "without", "with the shim", "difference"):
        table.add_column(name, justify="right")
    apart = report.differences(without, with_shim)
    for before, after, each in zip(without["runs"], with_shim["runs"], apart, strict=True):
        numbers = f"{before['held_out']:.4f}", f"{after['held_out']:.4f}", f"{each:+.4f}"
        table.add_row(str(before["seed"]), *numbers)
    console.print()
    console.print(table)
    console.print(f"Tolerance {allowed.value:.4f}: {allowed.source}.")


def say_checks(console: Console, with_shim: dict[str, Any], checks: list[Check]) -> None:
    """Print the shim's decisions, and the result of each check."""
    decisions = {
        f"{each['feature']}: {each['chosen']} ({each['because']})": None
        for each in with_shim["shim"]["decisions"]
    }
    if decisions:
        console.print("\n[bold]What the shim decided[/]")
        for line in decisions:
            indented(console, line)
    console.print("\n[bold]Promised and measured[/]")
    for each in checks:
        mark, style = ("ok", None) if each.ok else ("FAIL", "bold red")
        indented(console, f"{mark}  {each.name}: {each.found}", style)


def indented(console: Console, line: str, style: str | None = None) -> None:
    """Print a line that is indented by two columns."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(line, style or ""), (0, 0, 0, 2), expand=False))
