"""Hydra composes a job's config once for all plans of the tests, and parses each YAML file once.

Both take most of a plan's time. Only configs in installed packages are kept, because a test may
write others anew.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_INSTALLED = sysconfig.get_path("purelib").rpartition("/lib/")[2]
_kept: dict[Any, bytes] = {}
"""Pickled: OmegaConf's ``deepcopy`` takes fifteen times as long."""


def _once(key: Any, make: Callable[[], Any]) -> Any:
    if key in _kept:
        return pickle.loads(_kept[key])
    made = make()
    _kept[key] = pickle.dumps(made)
    return made


@contextlib.contextmanager
def composed_once() -> Iterator[None]:
    """Keep what Hydra composes in the block, once a first plan has imported Hydra."""
    hydra = sys.modules.get("hydra")
    if hydra is None or not hasattr(hydra, "compose"):
        yield
        return
    kind = importlib.import_module("hydra._internal.core_plugins.file_config_source")
    loader = importlib.import_module("hydra._internal.config_loader_impl").ConfigLoaderImpl
    instance = importlib.import_module("hydra.core.global_hydra").GlobalHydra.instance
    compose, load = hydra.compose, kind.FileConfigSource.load_config
    merge = loader._compose_config_from_defaults_list

    def installed(places: Any) -> bool:
        return all(_INSTALLED in one.path for one in places if one.path.startswith("file:"))

    def composed(config_name: str, overrides: list[str], **more: Any) -> Any:
        places = instance().hydra.config_loader.get_search_path().get_path()
        key = (*(one.path for one in places), config_name, *overrides, *more.items())
        if installed(places):
            return _once(key, lambda: compose(config_name, overrides, **more))
        return compose(config_name, overrides, **more)

    def merged(self: Any, defaults: Any, repo: Any) -> Any:
        key = (*(one.path for one in repo.get_sources()), *map(repr, defaults))
        if all(_INSTALLED in one.path for one in repo.get_sources() if one.scheme() == "file"):
            return _once(key, lambda: merge(self, defaults, repo))
        return merge(self, defaults, repo)

    def loaded(self: Any, config_path: str) -> Any:
        if _INSTALLED in self.path:
            return _once((self.path, config_path), lambda: load(self, config_path))
        return load(self, config_path)

    with (
        mock.patch.object(hydra, "compose", composed),
        mock.patch.object(loader, "_compose_config_from_defaults_list", merged),
        mock.patch.object(kind.FileConfigSource, "load_config", loaded),
    ):
        yield
