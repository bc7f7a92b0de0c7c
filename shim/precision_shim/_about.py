"""The version. It is written into ``_version`` when the package is built, from the tag in git."""

__all__ = ["__version__"]

try:
    from ._version import __version__
except ModuleNotFoundError:  # run from a source tree that nothing was built in
    __version__ = "0+source"
