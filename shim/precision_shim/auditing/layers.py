"""Find the kinds of layers, and compare layer names of trainers and rollout engines."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence

HEAD_MARK = "precision_shim_computes"
"""Attribute that the shim adds to a changed LM head: canonical name of the head's compute dtype."""

MATRICES = ("attention", "mlp", "experts", "embedding", "head")
"""Kinds of layers whose weights an engine either quantises or keeps in its compute dtype."""

_KINDS = (
    ("adapters", r"(^|[._])lora_"),
    ("norm", r"norm|(^|\.)ln_"),
    ("router", r"(^|\.)(gate|router|shared_expert_gate)(\.|$)|e_score_correction_bias"),
    ("experts", r"experts"),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|feed_forward|ffn"),
    ("head", r"(^|\.)(lm_head|output_layer|score)(\.|$)|^output\."),
    ("embedding", r"embed|(^|\.)wte(\.|$)"),
)
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Maps a layer that engines fuse from several layers to the names of those layers."""

_EXPERT = re.compile(r"\.experts\..*$")


def kind_of(name: str) -> str:
    """Return the kind of layer, such as ``"mlp"``, that the name of a tensor or module shows."""
    for kind, pattern in _KINDS:
        if re.search(pattern, name):
            return kind
    return "other"


def joined(layer: str) -> str:
    """Return a layer's name without its prefix; layers that engines fuse (q, k, v) share a name."""
    _, numbered, rest = layer.rpartition("layers.")
    whole, _, last = f"{numbered}{rest}".rpartition(".")
    last = next((joined for joined, parts in _JOINED.items() if last in parts), last)
    return _EXPERT.sub(".experts", f"{whole}.{last}" if whole else last)


def _spellings(layer: str) -> Iterator[str]:
    """Yield a layer's name, and for a fused layer also the names of its original layers."""
    yield layer
    whole, _, last = layer.rpartition(".")
    for part in _JOINED.get(last, ()):
        yield f"{whole}.{part}"


def is_named(layer: str, ignored: Sequence[str]) -> bool:
    """Whether an ignore list names a layer, a part of a fused layer, or the layer's parent module.

    Args:
        layer: the layer's name.
        ignored: the entries of the ignore list. An entry is a name, a dot-separated component of a
            name, a pattern with ``*``, or a regular expression that begins with ``re:``.
    """
    return any(_names(entry, name) for entry in ignored for name in _spellings(layer))


def _names(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    if "*" in entry:
        return fnmatch.fnmatch(name, entry) or fnmatch.fnmatch(name, f"*.{entry}")
    if f".{entry}." in f".{name}.":
        return True
    # An entry such as "language_model.model.layers.0" may have a prefix that layers' names lack.
    both = (path.rpartition("layers.")[1:] for path in (entry, name))
    one, other = ("".join(parts) for parts in both)
    return one.startswith("layers.") and f"{other}.".startswith(f"{one}.")


def holds_a_word_of(layer: str, ignored: Sequence[str]) -> str:
    """Return the first entry of an ignore list that is a substring of a layer's name, or ``""``."""
    for entry in ignored:
        if not entry.startswith("re:") and any(entry in name for name in _spellings(layer)):
            return entry
    return ""
