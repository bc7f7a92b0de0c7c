"""Fixtures for the seam engine: small modules, their adapters, and engines that are removed."""

from __future__ import annotations

import importlib
import sys

import pytest

from precision_shim.process.framework import Adapter
from precision_shim.seams import Seam
from precision_shim.seams._engine import SeamEngine

TOY = {
    "toy/__init__.py": "",
    "toy/ops.py": '''
"""The module that the seams are in."""

LIMIT = 10


def scale(value, factor=2):
    return value * factor


def shift(value, by=1):
    return value + by


class Base:
    def inherited(self, value):
        return ("inherited", value)


class Box(Base):
    def __init__(self, value=0):
        self.value = value

    def add(self, amount):
        return self.value + amount

    @classmethod
    def make(cls, value):
        return cls(value)

    @staticmethod
    def double(value):
        return 2 * value
''',
    "toy/users.py": """
from toy.ops import scale
from toy.ops import scale as renamed


def use(value):
    return scale(value)
""",
    "toy_wrappers.py": """
CALLS = []


def negate(call):
    return -call.proceed()


async def awaits(call):
    return -await call.proceed()


def yields(call):
    yield from call.proceed()


def negate_by(call, by):
    return -call.proceed()


def wants_step(call, value, step):
    raise AssertionError("must not stand anywhere")


def wants_model(call, model):
    raise AssertionError("must not stand anywhere")


def add_hundred(call):
    return call.proceed() + 100


def note(call):
    CALLS.append((call.instance, dict(call.arguments)))
    return call.proceed()


def yes(symbol, settings):
    return f"native: {settings}" if symbol.found else None


def no(symbol, settings):
    return None


def broken(symbol, settings):
    raise RuntimeError("the probe is broken")
""",
}


class Lab:
    """Modules, adapters and engines for the tests of the seam engine."""

    def __init__(self, write):
        self.write = write
        self.faults = []
        self.engines = []

    def engine(self, *, features=("f", "g"), strict=False, settings=None, **options):
        engine = SeamEngine(
            features=features,
            settings=settings,
            strict=strict,
            on_fault=lambda framework, error: self.faults.append((framework, str(error))),
            describe=lambda adapter: f"{adapter.framework} 1.0",
            **options,
        )
        self.engines.append(engine)
        return engine

    def install(self, *seams, framework="toy", effects=(), **options):
        """Make an engine with one adapter that has these seams."""
        engine = self.engine(**options)
        engine.add(self.adapter(*seams, framework=framework, effects=effects))
        return engine

    def adapter(self, *seams, framework="toy", effects=()):
        return Adapter(
            framework=framework,
            distribution=framework,
            packages=(framework,),
            tested=("1.0",),
            seams=seams,
            effects=tuple(effects),
        )

    def seam(self, target, wrapper="toy_wrappers:negate", *, feature="f", native=None, **fields):
        """Make a seam; wrapper and probe are given by the names of their functions."""
        return Seam(
            target=target,
            feature=feature,
            wrapper=self.function(wrapper) if wrapper else None,
            native=self.function(native) if native else None,
            why="a test",
            **fields,
        )

    def function(self, name):
        module, _, attribute = name.partition(":")
        return getattr(self.load(module), attribute)

    def load(self, name):
        return importlib.import_module(name)

    @property
    def ops(self):
        return self.load("toy.ops")

    def states(self, engine, framework="toy"):
        return [one.state for one in engine.report(framework)]


@pytest.fixture
def lab(write_modules):
    """A ``Lab`` on the toy modules; afterwards ``sys.meta_path`` must be as it was before."""
    before = list(sys.meta_path)
    write_modules(TOY)
    made = Lab(write_modules)
    yield made
    for engine in reversed(made.engines):
        engine.remove()
    assert sys.meta_path == before
