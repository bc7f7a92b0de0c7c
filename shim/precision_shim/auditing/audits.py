"""``precision_shim.audit``: audit a model and its optimizer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import AuditError
from ..process.versions import version_of
from . import latest, meters, rules
from .counting import Measured, component_of, measure
from .ranks import shown, signature, unlike
from .readers import read_optimizers
from .reading import Reading
from .record import COMPONENTS, OF_MODEL, Audit, AuditPart, Finding


def audit(
    model: Any,
    optimizer: Any,
    *,
    scaler: Any = None,
    expected: Mapping[str, Any] | None = None,
    group: Any = None,
) -> Audit:
    """Read from a live model and optimizer which dtypes are really in use.

    The audit works in any job on Megatron or torch (FSDP2, DTensor), even with the shim off. It
    changes nothing, accesses no device, and communicates only over ``group``. Before the first
    step, it lists the dtypes that the optimizer declares for its states, if any, and is not
    ``complete``.

    Args:
        model: a module, Megatron's model chunks, or ``None`` to read the optimizer alone.
        optimizer: a Megatron optimizer (chained or single), a torch optimizer, or a list of them.
        scaler: the loss scaler of torch optimizers; a Megatron optimizer has one itself.
        expected: dtype names by component, as ``dict(exp_avg="bf16")``, instead of the config's.
        group: a process group whose ranks are compared; all ranks of the group must call ``audit``.

    Raises:
        AuditError: the model or optimizer cannot be read, ``expected`` has an unknown component, or
            this rank is not in ``group``.
        DtypeError: a dtype name in ``expected`` is unknown.
    """
    if group is None:
        return look(model, optimizer, scaler=scaler, expected=expected)
    if torch.distributed.get_rank(group) < 0:
        raise AuditError(
            f"audit(group=...): rank {rank_of_job()[0]} is not in the group. Pass one that this "
            "rank is in, or leave it out."
        )
    try:
        found = look(model, optimizer, scaler=scaler, expected=expected)
    except Exception as error:  # the other ranks are waiting in all_gather_object
        _gather({_FAILED: f"{type(error).__name__}: {error}"}, group)
        raise
    return _compare(found, group)


def look(
    model: Any,
    optimizer: Any,
    *,
    scaler: Any = None,
    expected: Mapping[str, Any] | None = None,
    framework: str = "",
    subject: str = "",
    whole: bool = True,
    fp32_key: str = "",
) -> Audit:
    """Make the audit that ``audit`` returns, with the framework's and the model's names set.

    An empty ``framework`` means the name of the optimizer's package. ``whole`` is whether
    ``optimizer`` includes all of the model's optimizers. For ``fp32_key`` see ``rules.find``, for
    all other arguments ``audit``.
    """
    named = rules.parse_expected(expected)
    readings = read_optimizers(model, optimizer, scaler, whole=whole)
    measured = measure(readings)
    parts = tuple(_part(*pair) for pair in zip(readings, measured, strict=True))
    package = readings[0].framework
    where = where_of(framework, package)
    wrote = latest.written(stepper for reading in readings for stepper in reading.steppers)
    problems: list[Finding] = []
    notes: list[Finding] = []
    for reading, part in zip(readings, parts, strict=True):
        expects = dict(named)
        if part is not parts[0]:  # the first has the model's frozen parameters and buffers
            for name in ("frozen", "other"):
                if not part.components[name].dtypes:
                    expects.pop(name, None)
        wrong, noted = rules.find(reading, part, expects, where, fp32_key, wrote=wrote)
        problems, notes = problems + wrong, notes + noted
    rank, world = rank_of_job()
    every = [size for sizes in measured for size in sizes.values()]
    totals = {
        "bytes": sum(size.bytes for size in every),
        "allocated": sum(size.allocated for size in every),
        "host": sum(size.host for size in every),
        # torch's allocator counts allocated bytes on the host: reading the count accesses no GPU.
        "cuda_allocated": int(torch.cuda.memory_allocated()),
    }
    return Audit(
        framework or package, subject, rank, world, parts, totals, tuple(problems), tuple(notes)
    )


def _part(reading: Reading, measured: Mapping[str, Measured]) -> AuditPart:
    parameters, owned = reading.parameters, reading.owned_parameters
    covered = dict.fromkeys(COMPONENTS, owned) | dict.fromkeys(OF_MODEL, parameters)
    meter = meters.by_stepper.get(reading.steppers[0]) if reading.steppers else None
    return AuditPart(
        name=reading.name,
        optimizer=reading.optimizer,
        data_parallel_size=reading.data_parallel_size,
        parameters=parameters,
        owned=owned,
        scaler=reading.scaler_name,
        components={
            name: component_of(reading, name, measured[name], covered[name]) for name in COMPONENTS
        },
        updates=None if meter is None else meter.figures,
        shards=reading.shards or reading.data_parallel_size,
        routers="+".join(sorted({computes for _, computes in reading.routers})),
    )


@functools.cache  # versions are read from files
def where_of(framework: str, package: str) -> str:
    """Return the names and versions of a framework and a package, for messages."""
    names = filter(None, dict.fromkeys((framework, package)))
    return ", ".join(f"{name} {version_of(name, ()) or ''}".strip() for name in names)


def rank_of_job() -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks of its job."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


_FAILED = "failed"


def _gather(said: dict[str, Any], group: Any) -> list[tuple[int, dict[str, Any]]]:
    everyone: list[tuple[int, dict[str, Any]]]
    everyone = [(0, {})] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, (rank_of_job()[0], said), group=group)
    return everyone


def _compare(found: Audit, group: Any) -> Audit:
    """Add to an audit how the group's ranks differ from its first rank."""
    everyone = _gather(signature(found.parts, found.problems), group)
    for rank, statement in everyone:
        if _FAILED in statement:
            raise AuditError(
                f"audit(group=...): rank {rank} could not be audited, and nothing was compared: "
                f"{statement[_FAILED]}"
            )
    (first, said), *others = everyone
    differ = {rank: what for rank, statement in others if (what := unlike(said, statement))}
    problems = found.problems
    if differ:
        rank = min(differ)
        key, (expected, there) = next(iter(differ[rank].items()))
        named = ", ".join(map(str, sorted(differ)))
        text = (
            f"{where_of('', found.framework)}: of {len(everyone)} ranks these differ from rank "
            f"{first}: {named}; {key} is {shown(expected)} on rank {first} and {shown(there)} on "
            f"rank {rank}. Give every rank the same config and environment."
        )
        as_on = f"as on rank {first}"
        problems += (Finding("rank-differs", None, None, as_on, f"ranks {named}", text),)
    ranks = {"compared": len(everyone), "differ": sorted(differ)}
    return replace(found, problems=problems, ranks=ranks)
