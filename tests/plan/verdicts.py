"""Compares the plan with the worker on generated configs.

A framework's test draws launch lines from a schema of keys, and plans each line. The framework's
real code builds the same job, and ``disagreement`` compares the two. ``disagreement`` covers
whether the job is refused, the dtype of its computation, the loss scaler's first scale, and the
dtypes of parameters, gradient buckets and optimizer states.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from precision_shim.precision.dtypes import name_of

from ..every_framework.shim_warnings import ours
from ..processes.commands import command
from ..stand_ins.optimizer_states import step_on_made_up_gradients

NAMES = ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16")
ODD = ("half", "FP16", "torch.bfloat16", "16", "32")
"""Other spellings of dtypes, which some frameworks accept."""

WRONG = ("fp61", "int8", "null", "true", "fp8", "''")
DTYPES = (*NAMES, *NAMES, *ODD)


@dataclass(frozen=True)
class Key:
    """A key of a config.

    Attributes:
        name: with its dots.
        good: values that are mostly valid.
        bad: values that are mostly invalid.
    """

    name: str
    good: Sequence[str] = DTYPES
    bad: Sequence[str] = WRONG


SEEDS = ((1, 5), (2, 35))
"""Seeds, and the number of configs that each of them draws."""


@dataclass(frozen=True)
class Drawn:
    """One config: the keys that are written, and the shim's settings."""

    written: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(
            f"{key}={value}" for key, value in {**self.settings, **self.written}.items()
        )


SETTINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss_scale_init", ("1024", "4")),
    ("growth_interval", ("7",)),
    ("optimizer_states", ("follow-model", "as-configured")),
    ("grad_bucket", ("align",)),
)
"""The shim's settings that change a verdict."""


def draw(keys: Sequence[Key], seed: int, count: int) -> list[Drawn]:
    """Draw configs; the same seed draws the same configs."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        written = {}
        for key in chance.sample(keys, k=min(chance.choice((1, 1, 2, 2, 3)), len(keys))):
            wrong = chance.random() < 0.2 and key.bad
            name = misspelt(key.name, chance) if chance.random() < 0.12 else key.name
            written[name] = chance.choice(key.bad if wrong else key.good)
        name, values = chance.choice(SETTINGS)
        settings = {name: chance.choice(values)} if chance.random() < 0.3 else {}
        found.append(Drawn(written, settings))
    return found


def singles(keys: Sequence[Key]) -> list[Drawn]:
    """Some configs with one key, so that no problem hides another."""
    return [one for one in draw(keys, 3, 30) if len(one.written) == 1]


def misspelt(name: str, chance: random.Random) -> str:
    """The key with one letter of its last word dropped, doubled or swapped."""
    path, dot, word = name.rpartition(".")
    place = chance.randrange(1, len(word) - 1)
    changed = chance.choice(
        (
            word[:place] + word[place + 1 :],
            word[:place] + word[place] + word[place:],
            word[: place - 1] + word[place] + word[place - 1] + word[place + 1 :],
        )
    )
    return f"{path}{dot}{changed}"


# -- verdicts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What becomes of a config.

    Attributes:
        refused: why the config is refused; empty if it runs.
        computes: the dtype of the model's computation.
        scale: the loss scaler's first scale, if there is one.
        held: component to its dtypes.
        told: notes or warnings.
    """

    refused: str = ""
    computes: str = ""
    scale: float | None = None
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)
    told: Sequence[str] = ()


def of_plan(words: Sequence[str], drawn: Drawn, *options: str) -> Verdict:
    """The plan's verdict on a launch line, from the command ``plan`` itself.

    Args:
        words: the line.
        drawn: the config; its settings are put before the line.
        options: of the command.
    """
    # A worker does not read the rollout's config, in which the plan would find a problem.
    front = ["PRECISION_SHIM_ROLLOUT=follow"]
    front += [f"PRECISION_SHIM_{name.upper()}={value}" for name, value in drawn.settings.items()]
    code, out, said = command(
        "plan", "--parameters", "1M", "--json", *options, "--", *front, *words
    )
    assert "Report this line" not in said, said
    assert code in (0, 1, 2), said
    if code == 2:
        return Verdict(said.strip())
    plan = json.loads(out)
    if code == 1:
        problems = [f"{one['key']}: {one['message']}. {one['remedy']}" for one in plan["problems"]]
        return Verdict("; ".join(problems))
    model = plan["models"][0]
    scales = [
        float(found.group(1))
        for one in model["decisions"]
        if one["feature"] == "fp16-scaling"
        and (found := re.search(r"from ([\d.e+]+),", one["chosen"]))
    ]
    held = {
        name: tuple(one["dtypes"])
        for part in model["with_shim"][0]["parts"]
        for name, one in {**part["at_step"], **part["components"]}.items()
    }
    scale = scales[0] if scales else None
    lost = [one.rpartition(". ")[0] for one in model["warnings"]]  # the remedy has the whole key
    told = (*plan["notes"], *model["notes"], *lost)
    return Verdict("", model["computes"], scale, held, told)


def of_audit(audit: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Maps each component of a live model and optimizer to its dtypes, from an audit."""
    return {
        name: tuple(one["dtypes"])
        for part in audit["parts"]
        for name, one in part["components"].items()
        if name != "other" and one["bytes"]
    }


def disagreement(drawn: Drawn, plan: Verdict, worker: Verdict) -> str:
    """How two verdicts differ; empty if they agree."""
    if bool(plan.refused) != bool(worker.refused):
        said = plan.refused or "legal"
        return f"plan: {said[:300]}; worker: {worker.refused[:300] or 'runs'}"
    if "unexpected precision" in worker.refused:
        return f"the worker names no key: {worker.refused}"
    if plan.refused:
        named = [key for key in drawn.written if key.rpartition(".")[2] in plan.refused]
        return "" if named else f"the plan names none of the keys: {plan.refused[:300]}"
    differ = [
        f"{name}: plan {getattr(plan, name)}, worker {getattr(worker, name)}"
        for name in ("computes", "scale")
        if getattr(plan, name) != getattr(worker, name)
    ]
    differ += [
        f"{name}: plan {plan.held.get(name)}, worker {dtypes}"
        for name, dtypes in worker.held.items()
        if tuple(plan.held.get(name, ())) != tuple(dtypes)
    ]
    differ += [
        f"the plan does not tell: {text}"
        for text in worker.told
        if not any(one.rstrip(".") in text for one in plan.told)
    ]
    return "; ".join(differ)


def megatron_scale(optimizer: Any) -> float | None:
    """The first scale of the dynamic loss scaler in Megatron's optimizer, chained or not."""
    chained = getattr(optimizer, "chained_optimizers", (optimizer,))
    scalers = [getattr(one, "grad_scaler", None) for one in chained]
    (scale,) = {
        float(one.scale) if type(one).__name__ == "DynamicGradScaler" else None for one in scalers
    }
    return scale


def by_worker(
    look: Callable[[], Verdict], drawn: Drawn, *, named: str = "", **arguments: Any
) -> Verdict:
    """The verdict of a worker that is built with the shim on, or why it is refused.

    A warning of a dtype without effect counts as a refusal, because it is an error under strict.

    Args:
        look: builds the worker.
        drawn: the config.
        named: a regular expression that matches the framework's own errors about precision, which
            name no key of ``drawn``.
        arguments: further arguments of ``install``.

    Raises:
        Exception: an error that is neither the shim's nor about a key of ``drawn``.
    """
    import precision_shim

    precision_shim.install(settings={**drawn.settings, "log": "quiet"}, **arguments)
    try:
        with ours() as said:
            found = look()
        ineffective = [text for text in said if " has no effect: " in text]
        return replace(found, refused="; ".join(ineffective), told=said)
    except precision_shim.PrecisionShimError as error:
        return refused(error)
    except Exception as error:
        verdict = refused(error)
        names = [re.escape(key.rpartition(".")[2]) for key in drawn.written]
        if not re.search("|".join([*names, *filter(None, [named])]), verdict.refused):
            raise
        return verdict
    finally:
        precision_shim.uninstall()


def refused(error: Exception) -> Verdict:
    """The verdict of a worker that ended in an error."""
    return Verdict(f"{type(error).__name__}: {' '.join(str(error).split())}")


def hold(
    drawn: Iterable[Drawn], plan: Callable[[Drawn], Verdict], workers: Iterable[Verdict]
) -> Counter[str]:
    """Compare plan and worker on all configs; returns how many configs ended in which way.

    Args:
        drawn: the configs.
        plan: returns the plan's verdict on a config.
        workers: the workers' verdicts, in the configs' order.

    Raises:
        AssertionError: plan and worker disagree on a config; the message names all such configs.
    """
    ended: Counter[str] = Counter()
    wrong = []
    for one, found in zip(drawn, workers, strict=True):
        expected = plan(one)
        ended["refused" if found.refused else f"{found.computes}, scale {found.scale}"] += 1
        differs = disagreement(one, expected, found)
        if differs:
            wrong.append(f"{one}\n    {differs}")
    print(dict(ended))
    assert not wrong, f"{len(wrong)} of {sum(ended.values())} differ\n" + "\n".join(wrong)
    return ended


def on_megatron(chunks: Any, optimizer: Any) -> Verdict:
    """The verdict of a model and its optimizer on Megatron after a step on made-up gradients."""
    import precision_shim

    step_on_made_up_gradients(chunks, optimizer)
    (computes,) = {one.dtype for chunk in chunks for one in chunk.parameters()}
    return Verdict(
        computes=name_of(computes),
        scale=megatron_scale(optimizer),
        held=of_audit(precision_shim.audit(chunks, optimizer).to_dict()),
    )


def agree(
    drawn: Sequence[Drawn],
    plan: Callable[[Drawn], Verdict],
    look: Callable[[Drawn], Verdict],
    **how: Any,
) -> None:
    """Compare the plan with workers that ``look`` builds; ``how``: further ones of ``by_worker``.

    Raises:
        AssertionError: they disagree, or all of many configs end in the same way.
    """
    workers = [by_worker(lambda one=one: look(one), one, **how) for one in drawn]
    assert len(hold(drawn, plan, workers)) >= min(2, len(drawn))
