"""Follows each remedy of the plan: the job that does what the remedy says is legal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..processes.commands import command
from .verdicts import Drawn

_SET = re.compile(r"([\w.]+)\s*[=:]\s+?([\w.-]+)|([\w.]+)=([\w.-]+)")
_ALLOWED = re.compile(r"(?:allowed:|takes?|an? name, such as) ([\w.]+)")
Keys = Mapping[str, str]
Line = Callable[[Drawn], Sequence[str]]


def problems(words: Sequence[str], *options: str) -> list[dict[str, Any]]:
    """The problems of a job; of a job that cannot be read, the message."""
    code, out, said = command("plan", "--parameters", "1M", "--json", *options, "--", *words)
    assert code in (0, 1, 2), said
    found = json.loads(out)
    return [{"key": "", "message": "", "remedy": found["error"]}] if code == 2 else found["problems"]


def followed(written: Keys, problem: Mapping[str, Any]) -> Iterator[Keys]:
    """The keys of a job after each of the ways that a problem's remedy names.

    A key that nothing reads, or that the framework lacks, is replaced by the key to write; another
    key stays. A remedy that says only "correct it" allows what the message lists.
    """
    remedy, message, key = problem["remedy"], problem["message"], problem["key"]
    near = re.search(r"Did you mean (\S+)\?", remedy)
    if near:
        (wrong,) = [one for one in written if one == key or (not key and _like(one, near[1]))]
        right = near[1] if "." in near[1] else f"{wrong.rpartition('.')[0]}.{near[1]}"
        yield {right if one == wrong else one: value for one, value in written.items()}
    for way in re.split(r", or |\. ", remedy.rstrip(".")):
        left = re.search(r"eave (.*) out", way)
        pairs = {a or c: b or d for a, b, c, d in _SET.findall(way)}
        if left:
            gone = [key] if left[1] == "it" else left[1].split(" or ")
            yield from ({one: written[one] for one in written if one != each} for each in gone)
        elif pairs:
            stays = "nothing reads" not in message and " has no " not in message
            kept = {one: written[one] for one in written if stays or one != key}
            yield {**kept, **{_whole(name, key): value for name, value in pairs.items()}}
        elif way.startswith(("Write ", "Correct ")) and not near:
            value = re.fullmatch(r"Write (\w+)", way) or _ALLOWED.search(f"{message} {way}")
            if value is not None:
                yield {**written, key: value[1]}


def _like(one: str, other: str) -> bool:
    return sorted({*one} ^ {*other}) == [] or abs(len(one) - len(other)) == 1


def _whole(name: str, key: str) -> str:
    return name if "." in name or not key else f"{key.rpartition('.')[0]}.{name}"


def hold(drawn: Sequence[Drawn], line: Line, *options: str) -> None:
    """Follow each way of each remedy once; where a job has several problems, of all of them.

    Raises:
        AssertionError: a remedy names no way, or a job that follows it is not legal.
    """
    wrong, count = [], 0
    for one in drawn:
        found = problems(line(one), *options)
        ways = [list(followed(one.written, problem)) for problem in found]
        wrong += [f"{one}: {each['remedy']}" for each, way in zip(found, ways, strict=True) if not way]
        for number in range(max(map(len, ways), default=0)):
            keys: Keys = one.written
            for problem in found:
                options_now = list(followed(keys, problem))
                if options_now and (not problem["key"] or problem["key"] in keys or "nothing" not in problem["message"]):
                    keys = options_now[min(number, len(options_now) - 1)]
            left = problems(line(Drawn(keys, one.settings)), *options)
            count += 1
            said = [f"{each['key']}: {each['message']}. {each['remedy']}" for each in found]
            wrong += [
                f"{one}\n  {said}\n  -> {dict(keys)}\n  {each['key']}: {each['message']}. {each['remedy']}"
                for each in left
            ]
    assert count, "no job had a problem"
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong)
