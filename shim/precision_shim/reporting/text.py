"""Format the record of ``status()``: one screen of text, a complete table, parts of the doctor."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..process.settings import FEATURES, PREFIX
from .record import FrameworkStatus, Record, SeamStatus

WIDTH = 80
SCREEN = 40
"""Maximum number of lines of ``str(status())`` with one framework in use."""

_COLUMN = 25  # The column at which the text after a feature's name begins.
_LEAST = 8  # Number of lines that the problems leave to the decisions.
_AUDITS = 7  # Maximum number of lines for audits.
_MORE = "status().details()"
_LABELS = ("on: ", "", "why: ", "upstream: ", "delete when: ")

AT_WORK = ("pending", "partly pending", "wrapped", "partly", "native")
"""Verdicts that mean that a feature is or will be in force in one part of a framework."""

_WORDS = {
    "wrapped": "in force",
    "partly": "in force beside {name}'s own",
    "native": "{name} does it itself",
    "pending": "waits for import",
    "partly pending": "waits for import",
    "refused": "refused",
    "unsupported": "not on",
}
_AHEAD = {
    **_WORDS,
    "pending": "would be in force",
    "partly pending": "would be in force beside {name}'s own",
}
"""Words of ``precision-shim doctor``, where ``pending`` means that a job would be patched."""


def screen(status: Record) -> str:
    """Return the record as text for one screen of 80 columns."""
    lines = [_headline(status)]
    if status.enabled and status.given:
        given = (f"{name}={status.settings[name]}" for name in status.given)
        lines += fold(f"set: {', '.join(given)}", 0, 2)
    for name, found in status.frameworks.items():
        if found.state not in ("absent", "off"):
            lines += ["", *framework(name, found, status.features)]
    lines += left_out(status.frameworks)
    audits = [f"{audit.headline}: {audit.brief()}" for audit in status.audit]
    lines += _section("audit", audits, _AUDITS)
    room, decisions = SCREEN - len(lines), list(map(str, status.decisions))
    wrong = _problems(status)
    problems = _section("what is wrong, and what to do", wrong, room - _LEAST * bool(decisions))
    lines += _section("decisions", decisions, room - len(problems), newest=True)
    return "\n".join(lines + problems)


def _section(title: str, texts: Sequence[str], room: int, *, newest: bool = False) -> list[str]:
    """Return a title and whole texts as at most ``room`` lines: the first texts or the newest."""
    if not texts:
        return []
    room, used = max(room - 2, 2), 0
    blocks: list[list[str]] = []
    for text in reversed(texts) if newest else texts:
        block = fold(text, 2, 4)
        used += len(block)
        if blocks and used + (len(blocks) + 1 < len(texts)) > room:
            break
        blocks.insert(0 if newest else len(blocks), block)
    lines, out = [line for block in blocks for line in block], len(texts) - len(blocks)
    if out or len(lines) > room:
        lines = [*lines[: room - 1], f"  {f'{out} more' if out else 'the rest'}: {_MORE}"]
    return ["", title, *lines]


def table(status: Record) -> str:
    """Return the whole record as text: every setting, seam and decision."""
    lines = [_headline(status)]
    if status.enabled:
        lines += fold(f"features: {', '.join(status.features) or 'none'}", 0, 2)
        settings = (
            f"{name}={value}{' (set)' if name in status.given else ''}"
            for name, value in status.settings.items()
        )
        lines += fold(f"settings: {', '.join(settings)}", 0, 2)
    for name, found in status.frameworks.items():
        lines += ["", *fold(headline(name, found), 0, 2)]
        lines += fold(found.reason, 2, 2)
        lines += seams(found.seams)
    if status.decisions:
        lines += ["", "decisions"]
        for decision in status.decisions:
            lines += fold(str(decision), 2, 4)
    for audit in status.audit:
        lines += ["", str(audit)]
    for note in status.notes:
        lines += ["", *fold(note, 0, 0)]
    return "\n".join(lines)


def left_out(frameworks: Mapping[str, FrameworkStatus]) -> list[str]:
    """Return the lines that name the frameworks that are not installed or not asked for."""
    lines = []
    for state, words in (("absent", "not installed"), ("off", "not asked for")):
        names = ", ".join(name for name, found in frameworks.items() if found.state == state)
        lines += fold(f"{words}: {names}", 0, 2) if names else []
    return ["", *lines] if lines else []


def headline(name: str, status: FrameworkStatus, *, ahead: bool = False) -> str:
    """Return a framework's name, version and verdict as a line of text."""
    tested = {True: ", tested", False: ", not tested", None: ""}[status.tested]
    return f"{name} {status.version or ''}".rstrip() + f"{tested}: {_verdict(status, ahead)}"


def _verdict(status: FrameworkStatus, ahead: bool) -> str:
    broken = any(seam.state == "refused" and not seam.refusal for seam in status.seams)
    in_part = ahead and any(seam.state == "pending" for seam in status.seams)
    waits = "imported; waits for modules that it has not imported yet"
    waits = waits if status.seams else "waits for its import"
    return {
        "wrapped": "in force, but refused in part" if broken else "in force",
        "pending": "can be patched" if ahead else waits,
        "refused": "can be patched in part" if in_part else "refused",
        "absent": "nothing of what the shim patches is here" if status.seams else "not installed",
        "native": "does all of it itself",
        "off": "not asked for",
    }[status.state]


def framework(
    name: str, status: FrameworkStatus, features: Iterable[str], *, ahead: bool = False
) -> list[str]:
    """Return a framework's lines on the screen: the verdict, and one line per feature.

    Features that the user did not switch on share one line. With ``ahead`` the states are
    predicted, as in ``precision-shim doctor``.
    """
    lines = fold(headline(name, status, ahead=ahead), 0, 2)
    if status.reason and not (
        status.state == "refused" and not status.seams
    ):  # without seams, the reason is listed as a problem
        lines += fold(status.reason, 2, 4)
    asked, left_out = set(features), []
    for feature in FEATURES:
        of_it = [seam for seam in status.seams if seam.feature == feature]
        if of_it and (feature in asked or any(seam.state != "off" for seam in of_it)):
            text = _feature(name, of_it, ahead)
            lines += fold(f"{feature:<{_COLUMN - 3}} {text}", 2, _COLUMN)
        elif of_it:
            left_out.append(feature)
    return lines + (fold(f"not asked for: {', '.join(left_out)}", 2, 4) if left_out else [])


def _feature(name: str, seams: Sequence[SeamStatus], ahead: bool) -> str:
    """Return the parts of a framework in which a feature is in force, pending or refused."""
    shown = {path: verdict for (_, path), verdict in verdicts(seams).items()}
    main = {path: verdict for path, verdict in shown.items() if not path.endswith(")")}
    if any(verdict != "absent" for verdict in main.values()):
        # Show a name with brackets, such as "FSDP engine (metrics)", only if that part is refused.
        shown = main | {path: verdict for path, verdict in shown.items() if verdict == "refused"}
    words = _AHEAD if ahead else _WORDS
    parts = []
    for word in dict.fromkeys(words.values()):
        paths = [path for path, verdict in shown.items() if words.get(verdict) == word]
        if paths:
            named = ", ".join(filter(None, paths))
            parts.append(word.format(name=name) + (f": {named}" if named else ""))
    return "; ".join(parts) or "nothing of what it patches is here"


def verdicts(seams: Iterable[SeamStatus]) -> dict[tuple[str, str], str]:
    """Return a one-word verdict for each pair of a feature and a part of the framework."""
    states: dict[tuple[str, str], list[str]] = {}
    for seam in seams:
        unsupported = seam.refusal and seam.state in ("pending", "refused")
        state = "unsupported" if unsupported else seam.state
        states.setdefault((seam.feature, seam.path), []).append(state)
    return {both: _together(several) for both, several in states.items()}


def _together(states: Sequence[str]) -> str:
    for state in ("refused", "unsupported"):
        if state in states:
            return state
    if "native" in states and not {"wrapped", "pending"} & set(states):
        # A part of the framework that this version lacks may share a symbol with an existing part.
        return "native" if states.count("native") >= states.count("absent") else "absent"
    if "native" in states:
        return "partly" if "wrapped" in states else "partly pending"
    return next((word for word in ("wrapped", "pending") if word in states), "absent")


def refusals(name: str, seams: Iterable[SeamStatus]) -> list[str]:
    """Return why seams were refused, each reason once, and remedies; not seams with ``refusal``."""
    seams = list(seams)
    broken = [seam for seam in seams if seam.state == "refused" and not seam.refusal]
    features = dict.fromkeys(seam.feature for seam in broken)
    subjects: dict[str, set[tuple[str, str]]] = {}
    for seam in broken:
        for reason in seam.causes or (seam.reason,):
            subjects.setdefault(reason, set()).add((seam.path, seam.feature))
    reasons: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for reason, concerned in subjects.items():
        reasons.setdefault(tuple(sorted(concerned)), []).append(reason)
    texts = []
    for pairs, several in reasons.items():
        by_path: dict[str, list[str]] = {}
        for path, feature in pairs:
            by_path.setdefault(path, []).append(feature)
        where = "; ".join(
            ", ".join(names) + (f" ({path})" if path else "") for path, names in by_path.items()
        )
        texts.append(f"{name}: refused: {where}, because: {'; '.join(several)}")
    if features:
        out = ",".join(f"-{feature}" for feature in features)
        at_work = {both[0] for both, verdict in verdicts(seams).items() if verdict in AT_WORK}
        going_on = [feature for feature in features if feature in at_work]
        if going_on:
            texts.append(
                f"{name}: {', '.join(going_on)}: the other paths go on without it; under strict it "
                "is an error"
            )
        texts.append(
            f"{name}: install a tested version, or leave out what is refused: "
            f"{PREFIX}_FEATURES={out}"
        )
    return texts


def seams(listed: Sequence[SeamStatus], shown: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the table of seams; ``shown`` replaces words for states, such as ``"pending"``."""
    words = shown or {}
    for feature in dict.fromkeys(seam.feature for seam in listed):
        yield f"  {feature}"
        for seam in listed:
            if seam.feature != feature:
                continue
            yield from fold(f"{words.get(seam.state, seam.state):<8} {seam.target}", 4, 6)
            texts = (seam.path, seam.reason, seam.why, seam.upstream, seam.delete_when)
            for label, text in zip(_LABELS, texts, strict=True):
                if text:
                    yield from fold(label + text, 13, 15)


def _headline(status: Record) -> str:
    strict = ", strict" if status.enabled and status.settings.get("strict") else ""
    return f"precision_shim: {'on' if status.enabled else 'off'}{strict}"


def _problems(status: Record) -> list[str]:
    texts = list(status.notes)
    for name, found in status.frameworks.items():
        if found.state == "refused" and not found.seams and found.reason:
            texts.append(f"{name}: {found.reason}")
        texts += refusals(name, found.seams)
        texts += dict.fromkeys(
            f"{name}: {seam.target}: {seam.reason}"
            for seam in found.seams
            if seam.state == "wrapped" and seam.reason
        )
    return list(dict.fromkeys(texts))


def fold(text: str, indent: int, further: int | None = None, width: int = WIDTH) -> list[str]:
    """Wrap a text into lines that fit ``width`` and the terminal; an empty text gives no lines.

    ``indent`` is the indentation of the first line, and ``further`` of the other lines (``None``:
    the same). A word that is longer than a line, such as a path, is not broken.
    """
    if not text.strip():
        return []
    return textwrap.wrap(
        " ".join(text.splitlines()),  # spaces within a line are kept: they align columns
        min(width, shutil.get_terminal_size((width, 0)).columns),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if further is None else further),
        break_long_words=False,
        break_on_hyphens=False,
    )
