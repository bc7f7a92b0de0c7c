"""The record of a framework, and that of a backend that several frameworks are built on.

A process reads these before it imports a framework, Ray's agents among them. So this module imports
nothing: neither ``dataclasses`` nor ``typing``, which take 10 to 25 ms.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from ..seams import Adapter


class _Record:
    """Named values that stay as they are."""

    def __setattr__(self, name: str, value: object) -> "NoReturn":
        raise AttributeError(f"{type(self).__name__}.{name}: a record is not changed")

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"


class Checkpoints(_Record):
    """How a framework's checkpoints are called, and what foretells a resume from them.

    Attributes:
        steps: regular expression of a step's directory; its one group is the step's number.
        models: names of the models' directories in it; empty where it holds one model.
        resuming: kind of files (``"megatron"``, ``"dcp"``, ``"shards"``, ``"safetensors"``) to the
            ``"module:function"`` that tells from a ``Part`` and ``Here`` what a resume makes of it.
        fields: fields of the framework's own config that it may go by, to the words allowed there,
            the default first.
        fields_are: what users call these, for ``--config``.
    """

    steps: str
    models: "tuple[str, ...]"
    resuming: "Mapping[str, str]"
    fields: "Mapping[str, tuple[str, ...]]"
    fields_are: str

    def __init__(
        self,
        steps: str,
        models: "tuple[str, ...]" = (),
        resuming: "Mapping[str, str] | None" = None,
        fields: "Mapping[str, tuple[str, ...]] | None" = None,
        fields_are: str = "",
    ) -> None:
        vars(self).update(
            steps=steps,
            models=models,
            resuming=resuming or {},
            fields=fields or {},
            fields_are=fields_are,
        )


class Framework(_Record):
    """A framework, and how to find its adapter without importing it.

    Attributes:
        framework: the name that users write, such as ``"verl"``.
        distribution: the name of its distribution, for its version.
        packages: top-level packages whose import wakes the adapter.
        adapter: ``"module:attribute"`` of the ``Adapter``.
        tested: versions that the test environments pin; of a third party's only its adapter knows.
        effects: places where a DDP or an optimizer is built, on each path through the framework.
            Under strict a fault is raised there and nowhere earlier, also where the adapter itself
            is broken. A place that a version lacks is skipped.
        probes: modules whose functions ask whether what the rules assume still holds.
        plan: ``"module:function"`` from a launch line to the models of its job, for
            ``precision-shim plan``; empty where the adapter plans none.
        checkpoints: how its checkpoints are called; ``None`` where nobody foretells a resume.
        audit_readers: top-level package of an optimizer's class to the ``"module:function"`` that
            reads such optimizers for the audit; others are read as torch's own.
        checkpoint_readers: kind of a checkpoint's files to what sorts their tensors; others are
            sorted as torch's own.
    """

    framework: str
    distribution: str
    packages: "tuple[str, ...]"
    adapter: str
    tested: "tuple[str, ...]"
    effects: "tuple[str, ...]"
    probes: "tuple[str, ...]"
    plan: str
    checkpoints: "Checkpoints | None"
    audit_readers: "Mapping[str, str]"
    checkpoint_readers: "Mapping[str, str]"

    def __init__(
        self,
        framework: str,
        distribution: str,
        packages: "tuple[str, ...]",
        adapter: str,
        *,
        tested: "tuple[str, ...]" = (),
        effects: "tuple[str, ...]" = (),
        probes: "tuple[str, ...]" = (),
        plan: str = "",
        checkpoints: "Checkpoints | None" = None,
        audit_readers: "Mapping[str, str] | None" = None,
        checkpoint_readers: "Mapping[str, str] | None" = None,
    ) -> None:
        vars(self).update(
            framework=framework,
            distribution=distribution,
            packages=packages,
            adapter=adapter,
            tested=tested,
            effects=effects,
            probes=probes,
            plan=plan,
            checkpoints=checkpoints,
            audit_readers=audit_readers or {},
            checkpoint_readers=checkpoint_readers or {},
        )

    def load(self) -> "Adapter":
        """Import the adapter.

        Raises:
            SeamError: its module cannot be imported, or holds something else, or its table names
                a feature that there is not.
        """
        from ..errors import SeamError
        from ..seams import Adapter
        from ..seams._wrapper import resolve
        from .settings import FEATURES

        try:
            adapter = resolve(self.adapter)
        except (Exception, SystemExit) as error:  # nothing here may end the process
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
        adapter.check(FEATURES)
        return adapter

    def as_said(self) -> "Framework":
        """The same with all that its adapter says, which is loaded for it.

        Raises:
            SeamError: as of ``load``.
        """
        said = vars(self.load())
        return Framework(**{**vars(self), **{key: said[key] for key in vars(self) if key in said}})


class Config(_Record):
    """The config of an optimizer that frameworks are built on.

    Attributes:
        name: what users call it.
        place: ``"module:Class.__init__"``, whose parameters are its fields.
        fields: those that a resume may go by: all that is known where it is not installed.
        beside: fields of other configs that a resume goes by as well.
        numbers: those of the fields that are numbers.
        remedies: values of fields that may make a resume exact, in the order to try.
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
    """What several frameworks are built on, such as Megatron.

    Attributes:
        config: its optimizer's config.
        limits: ``"module:function"`` that tells from a framework's name and seams and from
            TransformerEngine's version, or why it cannot be imported, what that rules out; for the
            doctor.
        shared: packages that seams are in, to their distributions' names.
        audit_readers: see ``Framework``.
        checkpoint_readers: see ``Framework``.
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
