"""Dtype names, and the dtype keys of a config: what an adapter may import of both."""

from __future__ import annotations

from ..precision.dtypes import DTYPES, any_dtype, coerce_dtype, name_of, parse_dtype
from ..precision.effect import COMPUTES, REDUCES, Written, names_precision, values_of
from ..precision.names import ALIASES

__all__ = ["ALIASES", "COMPUTES", "DTYPES", "REDUCES", "Written", "any_dtype", "coerce_dtype"]
__all__ += ["name_of", "names_precision", "parse_dtype", "values_of"]
