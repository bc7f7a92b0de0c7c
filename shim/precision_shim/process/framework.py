"""Classes for facts about a framework, and about a backend that several frameworks share.

Every process that imports a framework or Ray, such as Ray's agents, first imports this module. This
module therefore imports nothing at its top, not even ``dataclasses`` or ``typing``, whose import
takes 10 to 25 ms.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from ..seams import Adapter


class _Record:
    def __setattr__(self, name: str, value: object) -> "NoReturn":
        raise AttributeError(f"{type(self).__name__}.{name}: a record is not changed")

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"


class Checkpoints(_Record):
    """The names of a framework's checkpoints, and the functions that predict if a resume is exact.

    Attributes:
        steps: regular expression for a step's directory; its one group is the step's number.
        models: names of the models' directories in a step's directory; empty if a step's directory
            contains one model.
        resuming: maps each kind of checkpoint files (``"megatron"``, ``"dcp"``, ``"shards"``,
            ``"safetensors"``) to the ``"module:function"`` that predicts whether a resume from
            these files is exact.
        fields: fields of the framework's own config that a resume may depend on, each with its
            allowed values; the first value is the default.
    """

    steps: str
    models: "tuple[str, ...]"
    resuming: "Mapping[str, str]"
    fields: "Mapping[str, tuple[str, ...]]"

    def __init__(
        self,
        steps: str,
        models: "tuple[str, ...]" = (),
        resuming: "Mapping[str, str] | None" = None,
        fields: "Mapping[str, tuple[str, ...]] | None" = None,
    ) -> None:
        vars(self).update(
            steps=steps,
            models=models,
            resuming=resuming or {},
            fields=fields or {},
        )


def _wrong(checkpoints: object) -> str:
    import re

    if checkpoints is None:
        return ""
    if not isinstance(checkpoints, Checkpoints):
        kind = type(checkpoints).__name__
        return f"a {kind}, allowed: precision_shim.adapting.Checkpoints"
    models: object = checkpoints.models
    if not isinstance(models, tuple):
        return f"models={models!r}, allowed: a tuple of names"
    try:
        groups = re.compile(checkpoints.steps).groups
    except (re.error, TypeError) as error:
        return f"steps={checkpoints.steps!r} is no regular expression: {error}"
    if groups != 1:
        return f"steps={checkpoints.steps!r} has {groups} groups, allowed: one, the step's number"
    return ""


class Framework(_Record):
    """A framework's record, which names the framework's adapter without importing it.

    ``seams.Adapter`` documents the attributes that are not listed here.

    Attributes:
        adapter: ``"module:attribute"`` of the ``Adapter``.
        by_name: whether the shim patches this framework only if the user names it. If
            ``frameworks`` is unset, the shim patches only frameworks without ``by_name``.
    """

    framework: str
    distribution: str
    packages: "tuple[str, ...]"
    adapter: str
    tested: "tuple[str, ...]"
    effects: "tuple[str, ...]"
    plan: str
    checkpoints: "Checkpoints | None"
    audit_readers: "Mapping[str, str]"
    checkpoint_readers: "Mapping[str, str]"
    by_name: bool

    def __init__(
        self,
        framework: str,
        distribution: str,
        packages: "tuple[str, ...]",
        adapter: str,
        *,
        tested: "tuple[str, ...]" = (),
        effects: "tuple[str, ...]" = (),
        plan: str = "",
        checkpoints: "Checkpoints | None" = None,
        audit_readers: "Mapping[str, str] | None" = None,
        checkpoint_readers: "Mapping[str, str] | None" = None,
        by_name: bool = False,
    ) -> None:
        vars(self).update(
            framework=framework,
            distribution=distribution,
            packages=packages,
            adapter=adapter,
            tested=tested,
            effects=effects,
            plan=plan,
            checkpoints=checkpoints,
            audit_readers=audit_readers or {},
            checkpoint_readers=checkpoint_readers or {},
            by_name=by_name,
        )

    def load(self) -> "Adapter":
        """Import the adapter.

        Raises:
            SeamError: the adapter cannot be imported or is not an ``Adapter``, or its seams or
                ``checkpoints`` are invalid.
        """
        from ..errors import SeamError
        from ..seams import Adapter
        from ..seams._wrapper import resolve
        from .settings import FEATURES

        try:
            adapter = resolve(self.adapter)
        except (Exception, SystemExit) as error:  # a bad adapter must not end the process
            raise SeamError(
                f"{self.framework}: the adapter {self.adapter} cannot be loaded: {error!r}. "
                f"Repair or remove it, or leave {self.framework} out with "
                "PRECISION_SHIM_FRAMEWORKS."
            ) from error
        if not isinstance(adapter, Adapter):
            raise SeamError(
                f"{self.framework}: {self.adapter} is a {type(adapter).__name__}, allowed: "
                "precision_shim.adapting.Adapter. Correct the entry point."
            )
        try:
            adapter.check(FEATURES)
        except SeamError:
            raise
        except Exception as error:
            raise SeamError(
                f"{self.framework}: the seams of {self.adapter} cannot be read: {error!r}. "
                "Correct the adapter."
            ) from error
        wrong = _wrong(adapter.checkpoints)
        if wrong:
            raise SeamError(
                f"{self.framework}: the checkpoints of {self.adapter}: {wrong}. "
                "Correct the adapter."
            )
        return adapter

    def as_said(self) -> "Framework":
        """Load the adapter, and return this record updated with the adapter's fields.

        Raises:
            SeamError: see ``load``.
        """
        said = vars(self.load())
        return Framework(**{**vars(self), **{key: said[key] for key in vars(self) if key in said}})


class Config(_Record):
    """The config of a backend's optimizer.

    Attributes:
        name: what users call this config.
        place: the function whose parameters are the config's fields, as
            ``"module:Class.__init__"``.
        fields: fields that a resume may depend on. If the backend is not installed, the shim
            accepts only these fields.
        beside: fields of other configs that a resume also depends on.
        numbers: the fields whose values are numbers.
        remedies: field values that may make a resume exact, in the order in which to try them.
    """

    name: str
    place: str
    fields: "tuple[str, ...]"
    beside: "tuple[str, ...]"
    numbers: "tuple[str, ...]"
    remedies: "tuple[Mapping[str, object], ...]"

    def __init__(
        self,
        name: str,
        place: str,
        fields: "tuple[str, ...]",
        *,
        beside: "tuple[str, ...]" = (),
        numbers: "tuple[str, ...]" = (),
        remedies: "tuple[Mapping[str, object], ...]" = (),
    ) -> None:
        vars(self).update(
            name=name,
            place=place,
            fields=fields,
            beside=beside,
            numbers=numbers,
            remedies=remedies,
        )


class Backend(_Record):
    """A library that several frameworks are built on, such as Megatron.

    Attributes:
        config: the config of the backend's optimizer.
        limits: the ``"module:function"`` that returns the text that ``precision-shim doctor``
            prints about the installed TransformerEngine, given a framework's name and seams,
            TransformerEngine's version, and the reason why TransformerEngine cannot be imported.
        shared: the backend's packages that contain seams, each with its distribution's name.
        audit_readers, checkpoint_readers: see ``seams.Adapter``.
    """

    config: Config
    limits: str
    shared: "Mapping[str, str]"
    audit_readers: "Mapping[str, str]"
    checkpoint_readers: "Mapping[str, str]"

    def __init__(
        self,
        config: Config,
        limits: str,
        shared: "Mapping[str, str]",
        *,
        audit_readers: "Mapping[str, str] | None" = None,
        checkpoint_readers: "Mapping[str, str] | None" = None,
    ) -> None:
        vars(self).update(
            config=config,
            limits=limits,
            shared=shared,
            audit_readers=audit_readers or {},
            checkpoint_readers=checkpoint_readers or {},
        )
