"""Kinds and names of a model's layers in trainers and rollout engines; pure functions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence

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
"""Layers that engines fuse from several layers, with the names of these."""

_EXPERT = re.compile(r"\.experts\..*$")


def kind_of(name: str) -> str:
    """Return the kind of layer that a tensor or a module belongs to, by its name."""
    for kind, pattern in _KINDS:
        if re.search(pattern, name):
            return kind
    return "other"


def joined(layer: str) -> str:
    """Return a layer's name in engines: from its number on, that of the fused layer if fused."""
    _, numbered, rest = layer.rpartition("layers.")
    whole, _, last = f"{numbered}{rest}".rpartition(".")
    last = next((one for one, parts in _JOINED.items() if last in parts), last)
    return _EXPERT.sub(".experts", f"{whole}.{last}" if whole else last)


def _spellings(layer: str) -> Iterator[str]:
    """Yield a layer's name, and the names of the layers that it was fused from."""
    yield layer
    whole, _, last = layer.rpartition(".")
    for part in _JOINED.get(last, ()):
        yield f"{whole}.{part}"


def is_named(layer: str, ignored: Sequence[str]) -> bool:
    """Whether a list names a layer, a layer fused into it, or a module that contains it.

    Args:
        layer: the layer's name.
        ignored: the list's entries: names, or parts of names between dots; patterns with ``*``;
            regular expressions that begin with ``re:``.
    """
    return any(_names(one, name) for one in ignored for name in _spellings(layer))


def _names(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    if "*" in entry:
        return fnmatch.fnmatch(name, entry) or fnmatch.fnmatch(name, f"*.{entry}")
    if f".{entry}." in f".{name}.":
        return True
    # The entry may name the layer with another prefix, such as "language_model.model.layers.0".
    both = (one.rpartition("layers.")[1:] for one in (entry, name))
    one, other = ("".join(parts) for parts in both)
    return one.startswith("layers.") and f"{other}.".startswith(f"{one}.")


def holds_a_word_of(layer: str, ignored: Sequence[str]) -> str:
    """Return the first entry of a list that is a substring of a layer's name; empty for none."""
    for one in ignored:
        if not one.startswith("re:") and any(one in name for name in _spellings(layer)):
            return one
    return ""
