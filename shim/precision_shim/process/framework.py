"""Records of facts about a framework, and about a backend that several frameworks share.

Every process that imports a framework or Ray, such as Ray's agents, first imports this module, so
it imports nothing at its top, not even ``dataclasses`` or ``typing``, which take 10 to 25 ms.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

    from typing_extensions import Self, dataclass_transform

    from ..seams._seam import Seam
else:

    def dataclass_transform(**_):  # noqa: D103
        return lambda kind: kind


_NONE: "Mapping[str, Any]" = {}


@dataclass_transform(frozen_default=True)
class _Record:
    """An immutable record of the annotated attributes, like a frozen dataclass."""

    def __init__(self, *values: object, **named: object) -> None:
        kind = type(self)
        names = tuple(kind.__annotations__)
        given = {**dict(zip(names, values)), **named}  # noqa: B905  # the lengths are compared below
        if len(given) < len(values) + len(named) or not given.keys() <= set(names):
            raise TypeError(f"{kind.__name__} takes each of {', '.join(names)} once, not {given}")
        missing = [name for name in names if name not in given and not hasattr(kind, name)]
        if missing:
            raise TypeError(f"{kind.__name__} needs {', '.join(missing)}")
        vars(self).update({name: given.get(name, getattr(kind, name, None)) for name in names})

    def __setattr__(self, name: str, value: object) -> "NoReturn":
        raise AttributeError(f"{type(self).__name__}.{name}: a record is not changed")

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def replace(self, **changes: object) -> "Self":
        """Return a copy of this record with other values."""
        return type(self)(**{**vars(self), **changes})


class Checkpoints(_Record):
    """The names of a framework's checkpoints, and the functions that predict if a resume is exact.

    Attributes:
        steps: regular expression for a step's directory; its one group is the step's number.
        models: directories of models in a step's directory; empty if it contains one model.
        resuming: maps a kind of files (``"megatron"``, ``"dcp"``, ``"shards"``, ``"safetensors"``)
            to the ``"module:function"`` that predicts whether a resume from them is exact.
        fields: config fields that a resume may depend on, with allowed values, default first.
    """

    steps: str
    models: "tuple[str, ...]" = ()
    resuming: "Mapping[str, str]" = _NONE
    fields: "Mapping[str, tuple[str, ...]]" = _NONE


class Adapter(_Record):
    """A framework's facts and table of seams; the one record that an adapter declares.

    The table of seams is imported only if the framework is imported: until ``registry.load`` has
    imported ``place``, ``seams`` is empty. A third party's adapter passes ``seams``.

    Attributes:
        framework: the name that users write, such as ``"verl"``.
        distribution: the name of the framework's distribution, whose version is read.
        packages: top-level packages whose import shows that the framework is in use.
        tested: versions that the test environments pin.
        seams: the table of seams that ``collect`` makes; of several seams on one target the first
            is the innermost wrapper.
        effects: functions, ``"module:attribute"``, that build an optimizer or a DDP. In strict mode
            their calls, not imports, raise a seam's or adapter's error. Absent ones are skipped.
        paths: maps a group to the part's name for users: ``{"fsdp": "FSDP engine"}``. A group that
            only supports others ends in brackets, ``"FSDP engine (metrics)"``; ``str(status())``
            shows it only if it was refused or the feature has no other group.
        place: ``"module:attribute"`` of ``seams``, or of an ``Adapter`` as in an entry point.
        plan: ``"module:function"`` that finds a job's models from the launch command, or empty.
        checkpoints: names of checkpoints, and what predicts if a resume is exact; see
            ``Checkpoints``.
        audit_readers: maps a package of optimizers to the ``"module:function"`` that reads them.
        checkpoint_readers: maps a kind of checkpoint files to the ``"module:function"`` that
            assigns their tensors to components.
        actors: regular expression for the Ray actors and tasks that must have the shim: matched
            against ``"module.Class first-argument"``, also of the base classes. Empty: none is
            asked.
        by_name: whether the shim patches this framework only if the user names it.
    """

    framework: str
    distribution: str
    packages: "tuple[str, ...]"
    tested: "tuple[str, ...]" = ()
    seams: "tuple[Seam, ...]" = ()
    effects: "tuple[str, ...]" = ()
    paths: "Mapping[str, str]" = _NONE
    place: str = ""
    plan: str = ""
    checkpoints: "Checkpoints | None" = None
    audit_readers: "Mapping[str, str]" = _NONE
    checkpoint_readers: "Mapping[str, str]" = _NONE
    actors: str = ""
    by_name: bool = False


class Config(_Record):
    """The config of a backend's optimizer.

    Attributes:
        name: what users call this config.
        place: the function whose parameters are the fields, as ``"module:Class.__init__"``.
        fields: fields that a resume may depend on; without the backend, all that are accepted.
        beside: fields of other configs that a resume also depends on.
        numbers: the fields whose values are numbers.
        remedies: field values that may make a resume exact, in the order in which to try them.
    """

    name: str
    place: str
    fields: "tuple[str, ...]"
    beside: "tuple[str, ...]" = ()
    numbers: "tuple[str, ...]" = ()
    remedies: "tuple[Mapping[str, object], ...]" = ()


class Backend(_Record):
    """A library that several frameworks are built on, such as Megatron.

    Attributes:
        config: the config of the backend's optimizer.
        limits: ``"module:function"`` that returns the doctor's text on TransformerEngine, given a
            framework's name and seams, its version, and the reason why it cannot be imported.
        shared: the backend's packages that contain seams, each with its distribution's name.
        audit_readers, checkpoint_readers: see ``Adapter``.
    """

    config: Config
    limits: str
    shared: "Mapping[str, str]"
    audit_readers: "Mapping[str, str]" = _NONE
    checkpoint_readers: "Mapping[str, str]" = _NONE
