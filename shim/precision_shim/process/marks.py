"""Each rank leaves a mark in the default process group's store, and reads the others' marks once.

A collective operation that only some ranks call ends the job with a message about sizes, or never.
A rank leaves its mark when its process group is made: a rank without the shim goes through the
same places later, so a missing mark stands for it.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from .._about import __version__
from ..errors import PartialInstallationError
from ..reporting import journal as _journal
from .settings import PREFIX, TABLE, Settings
from .wrapping import Wrapping

PATIENCE = 60.0
"""Maximum time to wait for all marks, in seconds: a rank may call ``install()`` late."""

_C10D = "torch.distributed.distributed_c10d"
_MADE = "_update_default_pg"
"""torch calls this function of ``_C10D`` with each new default process group, whoever makes it."""


class Marks:
    """This rank's mark during one ``install()``, and what it knows of the other ranks' marks."""

    def __init__(self, settings: Settings) -> None:
        rows = (row.name for row in TABLE.values() if row.feature)
        self._mine = json.dumps(
            {
                "version": __version__,
                "features": ",".join(settings.features),
                "frameworks": ",".join(settings.frameworks or ()),
                **{name: settings[name] for name in rows},
            }
        )
        self._wrapping = Wrapping([f"{_C10D}:{_MADE}"], self._wrapper)
        self._alike: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()

    def enter(self) -> None:
        """Leave the mark now, or when the default process group is made."""
        self._wrapping.enter()

    def leave(self) -> None:
        """Take the mark back, and restore torch's function."""
        was_on = self._wrapping.on
        self._wrapping.leave()
        if was_on:
            self._write(sys.modules[_C10D], "")

    def _wrapper(self, _: str, original: Any) -> Callable[..., Any]:
        module = sys.modules[_C10D]

        def made(group: Any) -> None:
            original(group)
            if self._wrapping.on:
                self._write(module, self._mine)

        self._write(module, self._mine)
        return made

    def _write(self, c10d: Any, mark: str) -> None:
        try:
            if c10d.is_initialized():
                c10d._get_default_store().set(_key(c10d.get_rank()), mark)
        except Exception as error:  # a process group must not fail because of a mark
            _journal.log(f"this rank could not leave its mark in the group's store: {error!r}")

    def check(self, group: Any) -> None:
        """Compare the marks of a process group's ranks (``None``: of all ranks), once."""
        c10d: Any = sys.modules.get(_C10D)
        if c10d is None or not c10d.is_initialized() or c10d.get_backend() == "fake":
            return  # all ranks of a fake backend but this one exist in name only
        world = c10d._get_default_group()
        alike = self._alike.setdefault(world, {c10d.get_rank()})
        try:
            ranks = {*c10d.get_process_group_ranks(world if group is None else group)} - alike
            unlike = self._unlike(c10d, sorted(ranks)) if ranks else {}
        except Exception as error:  # a group or a store of another kind than torch's
            _journal.log(f"whether all ranks have the shim is not known: {error!r}")
            return
        if unlike:
            raise PartialInstallationError(self._message(unlike, world.size()))
        alike |= ranks

    def _unlike(self, c10d: Any, ranks: list[int]) -> dict[int, str]:
        """Wait until all marks are like this rank's; return the marks that are not."""
        store, keys = c10d._get_default_store(), [_key(rank) for rank in ranks]
        self._write(c10d, self._mine)
        until = time.monotonic() + PATIENCE
        while True:
            last = time.monotonic() > until
            if store.check(keys):
                found = store.multi_get(keys)
            else:
                found = [store.get(key) if last and store.check([key]) else b"" for key in keys]
            unlike = {
                rank: mark.decode()
                for rank, mark in zip(ranks, found, strict=True)
                if mark.decode() != self._mine
            }
            if last or not unlike:
                return unlike
            time.sleep(0.05)

    def _message(self, unlike: dict[int, str], ranks: int) -> str:
        from ..auditing.ranks import grouped, numbers  # only an error needs them

        found = grouped((self._difference(mark), rank) for rank, mark in unlike.items())
        each = "; ".join(f"{numbers(some)}: {what}" for what, some in found.items())
        return (
            f"precision_shim {__version__}: of {ranks} ranks, {each}. Their collective operations "
            "would not match this rank's. Give every process the same package and variables "
            f"({PREFIX}, {PREFIX}_...), or set {PREFIX}=0 for all."
        )

    def _difference(self, mark: str) -> str:
        if not mark:
            return "without the shim, or no longer running"
        mine, theirs = json.loads(self._mine), json.loads(mark)
        names: Iterable[str] = dict.fromkeys((*mine, *theirs))
        return ", ".join(
            f"{name}={theirs.get(name)} (here {mine.get(name)})"
            for name in names
            if mine.get(name) != theirs.get(name)
        )


def _key(rank: int) -> str:
    return f"precision_shim/{rank}"
