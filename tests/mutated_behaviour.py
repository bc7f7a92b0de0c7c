"""Changes to upstream's behaviour, made in the imported modules; a probe must fail on each.

    python -m tests.mutated_behaviour FRAMEWORK [--share N] [--json]

The framework is imported once. A function or class is compiled again with one statement changed,
and replaces the original. All tests of ``tests/probes`` run, and then the original is put back.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import inspect
import json
import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from precision_shim.process import standby
from precision_shim.process.registry import entries
from precision_shim.seams._source import look

from .probes.conftest import import_frameworks, is_there

SEED = 13
KIND = "behaviour changed"
_CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
_STATES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_SCALER = "megatron.core.optimizer.grad_scaler:DynamicGradScaler"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"

COVERED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        f"{_CONFIG}.__post_init__",
        "precision_aware",
        (
            "use_precision_aware_optimizer",
            "use_distributed_optimizer",
            "main_grads_dtype",
            *_STATES,
        ),
    ),
    (f"{_CONFIG}.__post_init__", "needs_adam", ("self.optimizer ==",)),
    (
        _CONFIG,
        "megatrons_defaults",
        (
            "adam_beta2",
            *_STATES,
            "store_param_remainders",
            "use_precision_aware_optimizer",
            "loss_scale",
        ),
    ),
    (
        "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
        "megatrons_defaults",
        ("grad_reduce_in_fp32", "check_for_nan_in_grad"),
    ),
    (
        "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step",
        "an_overflow_is_an_answer",
        ("found_inf_flag", "return (False"),
    ),
    (f"{_SCALER}.update", "megatrons_scaler", ("",)),
    (
        f"{_SCALER}.__init__",
        "megatrons_scaler",
        (
            "self.min_scale",
            "self.growth_factor",
            "self.backoff_factor",
            "self.growth_interval",
            "self.hysteresis",
            "_tracker",
        ),
    ),
    (f"{_SCALER}.state_dict", "megatrons_scaler", ("",)),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."
        "_get_main_param_and_optimizer_states",
        "remainders",
        ("master_param", "use_precision_aware_optimizer", "get_unscaled_state"),
    ),
    (f"{_BUFFER}:group_params_for_buffers", "dtype_of_a_gradient_bucket", ("grad_dtype =",)),
    (
        f"{_BUFFER}:_ParamAndGradBuffer.__init__",
        "dtype_of_a_gradient_bucket",
        ("self.grad_dtype = grad_dtype", "self.grad_data = torch"),
    ),
    (
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine.optimizer_step",
        "raises_on_an_overflow",
        ("update_successful", "NotImplementedError"),
    ),
    (
        "skyrl.backends.skyrl_train.distributed.megatron.optimizer:init_megatron_optim_config",
        "optimizer_config",
        ("bf16", "params_dtype", "use_distributed_optimizer", "update("),
    ),
    ("torch.amp.grad_scaler:GradScaler._maybe_opt_step", "the_scaler_skips", ("found_inf",)),
    (
        "torch.amp.grad_scaler:GradScaler.state_dict",
        "the_scaler_skips",
        ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"),
    ),
    (
        "torch.distributed.checkpoint.state_dict:_init_optim_state",
        "distributed_checkpoint",
        ("optim.step(",),
    ),
)
"""Symbols that ``tests/probes`` checks. Each symbol has words of its test's name, so that its test
runs first, and words of the statements to change."""


@dataclass(frozen=True)
class Change:
    """One statement changed.

    Attributes:
        target: the symbol.
        detail: the change, and the statement's first line.
        asks: words in the name of the test that should fail.
        tree: the changed syntax tree of the function, or of the class whose fields changed.
    """

    target: str
    detail: str
    asks: str
    tree: Any

    def __str__(self) -> str:
        return f"{KIND}: {self.target}: {self.detail}"


def changes(packages: set[str]) -> Iterator[Change]:
    """All changes of the symbols in ``COVERED`` that are installed.

    Args:
        packages: the top-level packages that may be imported.
    """
    for target, asks, words in COVERED:
        module, _, attribute = target.partition(":")
        if module.partition(".")[0] not in packages or not look(target).found:
            continue
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = inspect.getattr_static(found, part)
        found = inspect.unwrap(getattr(found, "__func__", found))
        tree = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
        for index, line in enumerate(_statements(tree)):
            head = _head(line)
            if not any(word in head for word in words):
                continue
            for detail, new in _changed(line, words):
                whole = copy.deepcopy(tree)
                _put(whole, index, new)
                text = f"{detail}: {head.splitlines()[0][:60]}"
                yield Change(target, text, asks, ast.fix_missing_locations(whole))


def _statements(tree: Any) -> list[ast.stmt]:
    if isinstance(tree, ast.ClassDef):
        return tree.body  # the fields of a class, not its methods
    return [one for one in ast.walk(tree) if isinstance(one, ast.stmt) and one is not tree]


def _head(line: ast.stmt) -> str:
    """The statement's text without the statements inside it."""
    return (
        ast.unparse(line.test)
        if isinstance(line, (ast.If, ast.While))
        else ("" if hasattr(line, "body") else ast.unparse(line))
    )


def _put(tree: Any, index: int, new: ast.stmt) -> None:
    old = _statements(tree)[index]
    for parent in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and any(one is old for one in block):
                block[[one is old for one in block].index(True)] = new
                return
    raise AssertionError(ast.unparse(old))


def _changed(line: ast.stmt, words: tuple[str, ...]) -> Iterator[tuple[str, ast.stmt]]:
    if isinstance(line, ast.If):
        new = copy.deepcopy(line)
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield "turned round", new
    elif isinstance(line, ast.Assert):
        yield "dropped", ast.Pass()
        new_assert = copy.deepcopy(line)
        new_assert.test = ast.UnaryOp(ast.Not(), new_assert.test)
        yield "turned round", new_assert
    elif isinstance(line, (ast.Raise, ast.Expr)):
        if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)):
            yield "dropped", ast.Pass()
    elif isinstance(line, ast.Return) and line.value is not None:
        yield "returns nothing", ast.Return(ast.Constant(None))
    elif isinstance(line, ast.AnnAssign) and line.value is not None:
        if any(ast.unparse(line.target) == word for word in words):
            yield "another default", _with_value(line, _other(line.value))
    elif isinstance(line, (ast.Assign, ast.AugAssign)):
        yield "dropped", ast.Pass()
        if not isinstance(line.value, ast.Dict) and not isinstance(line.value, ast.Tuple):
            yield "another value", _with_value(line, _other(line.value))
    # Entries of a dict display whose key is one of ``words``.
    for number, inner in enumerate(ast.walk(line)):
        if isinstance(inner, ast.Dict) and not hasattr(line, "body"):
            for at, key in enumerate(inner.keys):
                if isinstance(key, ast.Constant) and ("" in words or key.value in words):
                    new_line = copy.deepcopy(line)
                    changed = list(ast.walk(new_line))[number]
                    assert isinstance(changed, ast.Dict)
                    changed.values[at] = _other(changed.values[at])
                    yield f"another {key.value!r}", new_line
                    if isinstance(line, ast.Return):
                        gone = copy.deepcopy(line)
                        less = list(ast.walk(gone))[number]
                        assert isinstance(less, ast.Dict)
                        del less.keys[at], less.values[at]
                        yield f"no {key.value!r}", gone


def _with_value(line: Any, value: ast.expr) -> Any:
    new = copy.deepcopy(line)
    new.value = value
    return new


def _other(value: ast.expr) -> ast.expr:
    """Another value of the same kind."""
    value = copy.deepcopy(value)
    if isinstance(value, ast.Constant) and isinstance(value.value, bool):
        return ast.Constant(not value.value)
    if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)):
        return ast.Constant(value.value + 1)
    if isinstance(value, ast.Constant):
        return ast.Constant(3)
    text = ast.unparse(value)
    if text.startswith("torch.") and text.count(".") == 1:
        return ast.parse("torch.float16", mode="eval").body
    if isinstance(value, ast.IfExp):
        value.body, value.orelse = value.orelse, value.body
        return value
    if isinstance(value, (ast.BoolOp, ast.Compare)):
        return ast.UnaryOp(ast.Not(), value)
    return ast.Constant(None)


@contextlib.contextmanager
def in_place(change: Change) -> Iterator[None]:
    """Replace the original by a changed function or class, also in modules that copied it."""
    module_name, _, attribute = change.target.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = attribute.split(".")
    parent: Any = module
    for part in owners:
        parent = getattr(parent, part)
    old = inspect.getattr_static(parent, name)
    made: dict[str, Any] = {}
    code = ast.fix_missing_locations(ast.Module([change.tree], []))
    exec(compile(code, f"changed {change.target}", "exec"), vars(module), made)
    new = made[name]
    # A method that is compiled without its class cannot call super().
    assert not owners or "super()" not in ast.unparse(change.tree), change.target
    if owners:
        setattr(parent, name, new)
        try:
            yield
        finally:
            setattr(parent, name, old)
        return
    with _swept(old, new):
        yield


@contextlib.contextmanager
def _swept(old: Any, new: Any) -> Iterator[None]:
    places = [
        (names, key)
        for module in list(sys.modules.values())
        if isinstance(names := getattr(module, "__dict__", None), dict)
        for key, value in list(names.items())
        if value is old
    ]
    for names, key in places:
        names[key] = new
    try:
        yield
    finally:
        for names, key in places:
            names[key] = old


def tests_of(framework: str) -> list[Callable[[], None]]:
    """The tests of ``tests/probes`` that pass for the installed framework."""
    names = ["torch", framework.replace("-", "_")]
    if is_there("megatron.core"):
        names.insert(0, "megatron")
    modules = [importlib.import_module(f"tests.probes.test_{name}") for name in names]
    tests = [
        test
        for module in modules
        for name, test in vars(module).items()
        if name.startswith("test_")
    ]
    return [test for test in tests if passes(test)]


def passes(test: Callable[[], None]) -> bool:
    """Whether a test neither fails nor is skipped."""
    try:
        test()
    except (Exception, pytest.skip.Exception, pytest.fail.Exception):
        return False
    return True


def judge(change: Change, tests: list[Callable[[], None]]) -> tuple[str, str]:
    """``test`` and the name of the failing test, or ``survives``."""
    first = sorted(tests, key=lambda test: change.asks not in test.__name__)
    with in_place(change):
        for test in first:
            if not passes(test):
                return "test", test.__name__
    return "survives", "every test passes"


def trials(framework: str, share: int | None = None) -> list[tuple[str, str, str, str, str]]:
    """Class, target, detail, end and reason of each change, all made in this process.

    Args:
        framework: as users write it.
        share: how many changes, drawn by ``SEED``; ``None`` for all.
    """
    standby.stop()
    import_frameworks()
    tests = tests_of(framework)
    packages = entries(third_party=False)[framework].packages
    chosen = list(changes({"torch", "megatron", *packages}))
    if share is not None:
        chosen = random.Random(SEED).sample(chosen, min(share, len(chosen)))
    return [(KIND, one.target, one.detail, *judge(one, tests)) for one in chosen]


def main() -> int:
    """Print how each change ended, survivors last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework")
    parser.add_argument("--share", type=int)
    parser.add_argument("--json", action="store_true", dest="as_json")
    asked = parser.parse_args()
    output, sys.stdout = sys.stdout, sys.stderr  # frameworks print during their import
    ended = trials(asked.framework, asked.share)
    sys.stdout = output
    left = [one for one in ended if one[3] == "survives"]
    if asked.as_json:
        print(json.dumps(ended))
    else:
        print(f"{len(ended)} changes of behaviour, {len(left)} survivors")
        for one in left:
            print(f"  {one[1]}: {one[2]}: {one[4]}")
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
