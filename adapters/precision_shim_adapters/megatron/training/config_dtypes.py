"""Coerce the dtype names in the fields of Megatron's configs for the model, the DDP, the optimizer.

The annotations of the installed Megatron tell which fields there are, and whether a field takes a
dtype or one of a few names, as ``moe_router_dtype`` does: Megatron ignores any other name. Delete
this module when Megatron's configs accept dtype names and refuse what they do not know.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from precision_shim.adapting import Call, Findings, is_there, seam, versioned, warn
from precision_shim.errors import DtypeError
from precision_shim.precision.dtypes import coerce_dtype, pick_name
from precision_shim.precision.findings import Problem
from precision_shim.seams import definition, find_spec

from ..installed import FSDP_CLASSES
from ..policy.legality import read_switch
from ..policy.requested import COERCION, FSDP_GROUP, MOSTLY
from .build import megatron_label

_DDP = "megatron.core.distributed"
_RESIDUAL = "fp32_residual_connection"
_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
MODEL = (
    "megatron.core.model_parallel_config:ModelParallelConfig",
    "megatron.core.transformer.transformer_config:TransformerConfig",
)
_LITERAL = r"""['"](\w+)['"]"""


def dtype_fields(kind: type) -> Mapping[str, tuple[str, ...]]:
    """Map each dtype field of a config's class to the names that it takes; none: it takes dtypes.

    A subclass, such as a Megatron-Bridge provider, may annotate Megatron's field more loosely.
    """
    bases = [getattr(base, "__dataclass_fields__", {}) for base in kind.__mro__]
    fields = (field.name for field in dataclasses.fields(kind))
    return _takes(
        {name: " ".join(str(base[name].type) for base in bases if name in base) for name in fields}
    )


def installed_fields() -> Mapping[str, tuple[str, ...]]:
    """The ``dtype_fields`` of the installed TransformerConfig, without an import of Megatron."""
    return _takes(installed_annotations(*MODEL))


def installed_annotations(*targets: str) -> dict[str, str]:
    """The annotations of the fields of Megatron's installed classes, without an import."""
    found = filter(None, map(definition, targets))
    lines = [line for one in found for line in getattr(one.node, "body", ())]
    return {
        ast.unparse(line.target): ast.unparse(line.annotation)
        for line in lines
        if isinstance(line, ast.AnnAssign)
    }


def _takes(annotations: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for field, text in annotations.items():
        if "torch.dtype" in text:
            found[field] = ()
        elif field.endswith("_dtype"):
            names = re.findall(_LITERAL, text) or _compared(field)
            if names:
                found[field] = tuple(dict.fromkeys(names))
    return found


@functools.cache
def _compared(field: str) -> list[str]:
    """The names with which the source of Megatron's layers compares a field that is any string."""
    spec = find_spec("megatron.core.transformer")
    pattern = rf"\b{field} == {_LITERAL}"
    return [
        name
        for folder in (spec and spec.submodule_search_locations) or ()
        for file in sorted(Path(folder).rglob("*.py"))
        for name in re.findall(pattern, file.read_text(encoding="utf-8"))
    ]


def coerce_field(value: Any, names: Sequence[str], key: str, but: Sequence[str] = ("fp8",)) -> Any:
    """Turn a dtype name into what Megatron knows; for ``names`` see ``dtype_fields``.

    ``but``: names that no field takes; ``fp8`` means the bytes of TransformerEngine's moments.

    Raises:
        DtypeError: the name is unknown, or the field does not take this dtype.
    """
    if value is None or not (names or isinstance(value, str)):
        return value
    if names:
        return pick_name(value, names, key=key, where=megatron_label())
    return coerce_dtype(value, key=key, where=megatron_label(), but=but)


def is_switch(annotation: object) -> bool:
    """Whether a config's field with this annotation takes a boolean, and no string."""
    text = str(annotation)
    return "bool" in text and "str" not in text and "Literal" not in text


def coerce_fields(config: Any, but: Sequence[str] = ("fp8",)) -> dict[str, Any]:
    """Coerce the dtype names in a config, and return its dtype fields; see ``coerce_field``.

    Strings in the place of booleans become booleans; see ``read_switch``.
    """
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name, None), f"{type(config).__name__}.{field.name}"
        if isinstance(value, str) and is_switch(field.type):
            setattr(config, field.name, read_switch(value, key, megatron_label()))
    values = {}
    for name, names in dtype_fields(type(config)).items():
        key = f"{type(config).__name__}.{name}"
        values[name] = coerce_field(getattr(config, name), names, key, but)
        setattr(config, name, values[name])
    return values


def refused(written: Mapping[str, Any], targets: tuple[str, ...], key: str, where: str) -> Findings:
    """Find what ``coerce_fields`` would refuse of the fields that a user wrote for a config.

    Of an OptimizerConfig and a DDP's config only booleans are checked: other rules read the dtypes.

    Args:
        written: the fields.
        targets: the config's classes, which are not imported.
        key: the config's key of a field, with ``{}`` for the field.
        where: framework and version, for messages.
    """
    annotations = installed_annotations(*targets) if written else {}
    takes = _takes(annotations) if targets is MODEL else {}
    problems = []
    for name, value in written.items():
        try:
            if name in takes:
                coerce_field(value, takes[name], key.format(name))
            elif is_switch(annotations.get(name, "")):
                read_switch(value, key.format(name), where)
        except DtypeError as error:  # noqa: PERF203
            problems.append(Problem.of(error, "", error.key))
    return Findings(problems=tuple(problems))


_COERCE: dict[str, Any] = {
    "feature": COERCION,
    "delete_when": "Megatron's configs take dtype names and refuse unknown ones",
    **MOSTLY,
}


@seam(
    at=[
        {
            "target": "megatron.core.model_parallel_config:ModelParallelConfig.__post_init__",
            "relies_on": ("params_dtype", "autocast_dtype"),
        },
        f"{_DDP}.distributed_data_parallel_config:DistributedDataParallelConfig.__post_init__",
    ],
    why="every config of a model or a DDP runs it, subclasses and deferred checks included",
    **_COERCE,
)
def coerce_made(call: Call) -> Any:
    """Coerce the dtype names in a config that is made or validated; warn of an unheeded field."""
    coerce_fields(call.instance)
    if getattr(call.instance, _RESIDUAL, False) and not is_there(f"{_LAYER} mentions {_RESIDUAL}"):
        warn(
            f"{megatron_label()}: {_RESIDUAL}=True is not heeded: the layers of this version do "
            "not read it, and add residuals in the dtype in which they compute. Leave it out, or "
            "install a newer megatron-core."
        )
    return call.proceed()


@seam(
    at=[
        "megatron.core.models.common.language_module.language_module:LanguageModule.__init__",
        f"{_DDP}.distributed_data_parallel:DistributedDataParallel.__init__",
        *({**place, "group": FSDP_GROUP} for place in FSDP_CLASSES),
    ],
    why="frameworks set fields on a finished config; nothing is built from it yet",
    **_COERCE,
)
def coerce_late(call: Call, config: Any) -> Any:
    """Coerce the dtype names in the configs from which a model or a DDP is built."""
    for given in (config, call.arguments.get("ddp_config")):
        if dataclasses.is_dataclass(given):
            coerce_fields(given)
    return call.proceed()


@seam(
    "megatron.bridge.utils.activation_map:str_to_dtype",
    why="Megatron-Bridge resolves two fields before Megatron's config is validated",
    only_if=("megatron.bridge.utils.activation_map:str_to_dtype",),
    **_COERCE,
)
def coerce_for_bridge(call: Call, name: str) -> Any:
    """Resolve a dtype name that Megatron-Bridge does not know."""
    try:
        return call.proceed()
    except ValueError:
        where = versioned("megatron-bridge", "megatron.bridge")
        return coerce_dtype(name, key="params_dtype or pipeline_dtype", where=where, but=("fp8",))
