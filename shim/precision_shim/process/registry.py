"""Which adapters there are: our own as declared, third parties' through an entry point.

An entry point of the group ``precision_shim.adapters`` names a ``seams.Adapter`` object; its name
is the framework's. Ours are declared in ``precision_shim_adapters.frameworks``. Either's modules
are imported only when one of the framework's packages is.
"""

from __future__ import annotations

from dataclasses import dataclass

from precision_shim_adapters.frameworks import FRAMEWORKS, MEGATRON_EFFECTS

from ..errors import SeamError
from ..seams import Adapter
from ..seams._wrapper import resolve
from .names import ENTRY_POINTS
from .settings import FEATURES


@dataclass(frozen=True)
class Entry:
    """How to find an adapter without importing it.

    Attributes:
        framework: the name users write.
        distribution: name of the framework's distribution.
        packages: top-level packages whose import wakes the adapter.
        tested: versions that the test environments pin; of a third party's only its adapter knows.
        adapter: ``"module:attribute"`` of the ``Adapter``.
        effects: where a feature first takes effect, should the adapter itself be broken.
        probes: see ``Adapter``.
        plan: ``"module:function"``, from a launch line to the models of its job; empty where the
            adapter plans none.
    """

    framework: str
    distribution: str
    packages: tuple[str, ...]
    adapter: str
    tested: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()
    plan: str = ""

    def load(self) -> Adapter:
        """Import the adapter.

        Raises:
            SeamError: its module cannot be imported, or holds something else, or its table names
                a feature that there is not.
        """
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


def entries(*, third_party: bool = True) -> dict[str, Entry]:
    """All known adapters by framework name; ours cannot be displaced by an entry point."""
    ours = (Entry(adapter=place, **declared) for place, declared in FRAMEWORKS.items())
    found = {one.framework: one for one in ours}
    if third_party:
        from importlib.metadata import entry_points

        for point in entry_points(group=ENTRY_POINTS):
            name = point.name.strip().lower()
            found.setdefault(
                name,
                Entry(
                    name,
                    name,
                    (name.replace("-", "_"),),
                    point.value,
                    effects=MEGATRON_EFFECTS,
                ),
            )
    return found


def is_tested(version: str, tested: tuple[str, ...]) -> bool:
    """Whether a version is among the tested ones; what a build has added to it does not count."""
    return version.partition("+")[0] in tested
