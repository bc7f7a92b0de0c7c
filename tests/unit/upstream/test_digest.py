"""Digests: equal for equal code on every Python, and different for different code."""

from __future__ import annotations

import ast

import pytest

from precision_shim.process.digest import digest, digest_of
from precision_shim.seams._source import definition, looking_at

PLAIN = '''
def step(self, closure=None, *, scale: float = 1.0) -> bool:
    """Take a step."""
    # the scale first
    total: int = 0
    later: str
    for name, value in self.values.items():
        total += value * scale  # scaled
        text = f"{name!r}: {value:>{total}.2f} of {total}" f" and {name}" "{}"
    return not total
'''
PLAIN_DIGEST = "836fa007131a2e77fccbd1cb4d80284686f0804c02843fb4c82d7e3c9e2dcf46"
SAME = [
    # the digest ignores docstring, comments, annotations and positions
    """
def step(self, closure=None, *, scale=1.0):
    total = 0


    for (name, value) in self.values.items():
        total += (value *
                  scale)
        text = (f"{name!r}: {value:>{total}.2f} of {total} and {name}{{}}")
    return not total
"""
]
OTHER = {
    "another default": ("scale: float = 1.0", "scale: float = 2.0"),
    "of another type": ("scale: float = 1.0", "scale: float = 1"),
    "a parameter more": ("closure=None,", "closure=None, model=None,"),
    "by position": ("closure=None, *,", "closure=None,"),
    "another operator": ("value * scale", "value / scale"),
    "another order": ("value * scale", "scale * value"),
    "another text": (" of {total}", " off {total}"),
    "another conversion": ("{name!r}", "{name!s}"),
    "another name": ("not total", "not scale"),
    "a decorator": ("def step", "@staticmethod\ndef step"),
    "asynchronous": ("def step", "async def step"),
    "negated": ("return not total", "return total"),
    "deeper": ("    return not total", "        return not total"),
}


def of(source: str) -> str:
    return digest_of(ast.parse(source).body[0])


@pytest.mark.parametrize("source", SAME)
def test_what_does_nothing_does_not_count(source):
    assert of(source) == of(PLAIN)


@pytest.mark.parametrize("change", OTHER)
def test_what_does_something_counts(change):
    old, new = OTHER[change]
    assert PLAIN.count(old) == 1
    assert of(PLAIN.replace(old, new)) != of(PLAIN)


def test_the_digest_is_the_same_on_every_python():
    """If a change of ours changes the digest, the whole record must be written anew."""
    assert of(PLAIN) == PLAIN_DIGEST


EVERY = '''
class Every(Base, metaclass=Meta, **more):
    """All kinds of statements and expressions."""

    field: int
    """What a field is for."""
    other: "str" = "x"

    @property
    async def method(self, a, /, b=1, *c, d=2, e, **f):
        global g, h
        async with a as b, c:
            async for i in d:
                await i
        try:
            raise ValueError(b"x", 1.5, 2j, None, True, ...) from e
        except (A, B) as error:
            del error, a[1:2, ::3]
        except C:
            pass
        else:
            assert x, "text"
        finally:
            while not y:
                break
        lambda z, *w, k=1: (yield z)
        match a:
            case {"k": [1, *rest], **others} | Point(x=0) if rest:
                return {**a, "b": 1}, [*c], {1, 2}, (q := 3)
            case None | -1 | "s":
                import one.two as three
                from .. import four
        x = a if b else c
        x @= -1 + ~2
        x = [i async for i in a if i for j in i], {k: v for k, v in d}
        return f"{x=} {y:{z}.{w}f}" rf"\\d{x}" f"{'nested'}{{}}"
'''
EVERY_DIGEST = "7258128138297cecaaa2bc5d9fd3b961b85886b4ed9d4374d2f2679272944cde"


def test_every_kind_of_code_has_one_digest_on_every_python():
    assert of(EVERY) == EVERY_DIGEST


DATA = '''
from dataclasses import dataclass

@dataclass
class Config:
    """A config.

    Of many lines.
    """

    rate: float = 1.0
    """The rate."""
    name: str

    def other(self):
        return 1
'''


def source(text):
    """A source with one module."""
    return {"toy.config": lambda: text}.get


def seen(text, name):
    with looking_at(source(text)):
        return digest(f"toy.config:{name}"), definition(f"toy.config:{name}")


def test_a_generated_init_has_the_digest_of_its_class():
    found, _ = seen(DATA, "Config.__init__")
    assert found == seen(DATA, "Config")[0] != ""
    remarks = DATA.replace("Of many lines.", "Of few.").replace('"""The rate."""', "# a rate")
    assert seen(remarks, "Config.__init__")[0] == found
    for old, new in (("1.0", "2.0"), ("name: str", "title: str"), ("return 1", "return 2")):
        assert seen(DATA.replace(old, new), "Config.__init__")[0] != found
    assert seen(DATA, "Config.other")[0] != found


def test_what_is_not_there_has_no_digest():
    assert seen(DATA, "Config.nothing") == ("", None)
    assert seen("def broken(:", "broken") == ("", None)
    with looking_at(source(DATA)):
        assert digest("toy.elsewhere:Config") == ""
