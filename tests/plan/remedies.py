"""Follows each remedy of the plan: it takes its problem away, and makes no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..processes.commands import command
from .verdicts import Drawn

_SET = re.compile(r"([\w.]+)(?:=|: )([\w.-]+)")
_ALLOWED = re.compile(r"(?:allowed:|takes?|such as) (.*)")
Keys = Mapping[str, str]
Line = Callable[[Drawn], Sequence[str]]


def problems_of(words: Sequence[str], *options: str) -> list[dict[str, Any]]:
    """The problems of a job; of a job that cannot be read, the one message."""
    line = ("--", "PRECISION_SHIM_ROLLOUT=follow", *words)  # the rollout's key is another problem
    code, out, said = command("plan", "--parameters", "1M", "--json", *options, *line)
    assert code in (0, 1, 2), said
    found = json.loads(out)
    return found["problems"] if code < 2 else [{"key": "", "message": "", "remedy": found["error"]}]


def followed(written: Keys, problem: Mapping[str, Any]) -> Iterator[list[Keys]]:
    """Yield for each way that a remedy names the jobs that go it; one of them has to be right.

    A key that nothing reads, or that the framework lacks, is replaced by the key to write; another
    key stays. If a remedy only says "correct it", the message lists what is allowed.
    """
    message, key = problem["message"], problem["key"] or next(iter(written))
    rest = {one: value for one, value in written.items() if one != key}
    for way in re.split(r"(?:,? or |[.?] )(?=[a-zA-Z])", problem["remedy"].rstrip(".")):
        left, pairs = re.search(r"eave (.*) out", way), dict(_SET.findall(way))
        if left:
            gone = [key] if left[1] == "it" else [_whole(one, key) for one in left[1].split(" or ")]
            yield [{one: written[one] for one in written if one != each} for each in gone]
        elif way.startswith("Correct the command line") and "Did you mean" not in problem["remedy"]:
            yield [rest]
        elif way.startswith("Did you mean "):
            name = way.rpartition(" ")[2]
            yield [{**rest, **(pairs or {_whole(name, key): written[key]})}]
        elif way.startswith(("Write ", "Set ", "write ")) and pairs:
            stays = "nothing reads" not in message and " has no " not in message
            now = {_whole(name, key): value for name, value in pairs.items()}
            yield [{**(written if stays else rest), **now}]
        elif way.startswith(("Write ", "Correct ")) and "Did you mean" not in problem["remedy"]:
            values = re.fullmatch(r"Write (\w+)", way) or _ALLOWED.search(f"{message} {way}")
            if values is not None:
                yield [{**rest, key: one} for one in re.findall(r"[\w.]+", values[1])]


def _whole(name: str, key: str) -> str:
    return name if "." in name else f"{key.rpartition('.')[0]}.{name}"


def hold(drawn: Sequence[Drawn], line: Line, *options: str) -> None:
    """Follow each way of each remedy once.

    Raises:
        AssertionError: a remedy names no way, or its problem stays, or there is another problem.
    """
    wrong, count = [], 0
    for one in drawn:
        found = problems_of(line(one), *options)
        for problem in found:
            told = f"{one}\n    {problem['key']}: {problem['message']}. {problem['remedy']}"
            others = [each["key"] for each in found if each["remedy"] != problem["remedy"]]
            ways = list(followed(one.written, problem))
            wrong += [told] * (not ways)
            for way in ways:
                ends = []
                for keys in way:
                    left = problems_of(line(Drawn(keys, one.settings)), *options)
                    ends.append([each for each in left if each["key"] not in others])
                    if not ends[-1]:
                        break
                else:
                    wrong.append(f"{told}\n    -> {way}\n    {ends}")
                count += 1
    assert count, "no job had a problem"
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong)
