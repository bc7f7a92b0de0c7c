"""The package's version: the build reads it from the git tag and writes it into ``_version``."""

__all__ = ["__version__"]

try:
    from ._version import __version__
except ModuleNotFoundError:  # this source tree was never built
    __version__ = "0+source"
if __version__ == "0.0.0.dev0":  # ``fallback-version`` in pyproject.toml
    __version__ += "+source.without.git"
