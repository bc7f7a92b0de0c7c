"""The package's version: the build reads it from the git tag and writes it into ``_version``."""

__all__ = ["__version__"]

try:
    from ._version import __version__
except ModuleNotFoundError:  # this source tree was never built
    __version__ = "0+source"
