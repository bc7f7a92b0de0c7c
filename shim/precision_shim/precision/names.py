"""Tables of the dtypes' spellings and sizes; this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "float32": "fp32",
    "float": "fp32",
    "32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "16": "fp16",
    "float8": "fp8",
    "uint8": "fp8",
}
"""Maps a dtype's name in a config to its canonical name; only verl's configs use 16 and 32."""

SHORT: Mapping[str, str] = {
    **{alias: name for alias, name in ALIASES.items() if alias.isidentifier() and name != "fp8"},
    "double": "float64",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
    "bool": "bool",
}
"""Maps torch's name of a tensor's dtype to this project's name; a dtype that is not listed keeps
torch's name. A file's ``uint8`` is ``uint8``, but a config's ``uint8`` means fp8."""

SIZES: Mapping[str, int] = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Maps this project's dtype name to bytes per element; remainders of masters are ``int16``."""
