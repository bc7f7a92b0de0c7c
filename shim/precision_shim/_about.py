"""The package's version, which the build reads from the git tag and writes into ``_version``."""

__all__ = ["__version__"]

try:
    from ._version import __version__
except ModuleNotFoundError:  # run from a source tree that was never built
    __version__ = "0+source"
