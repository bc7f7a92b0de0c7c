"""Audit the weights sent to the rollout: their dtypes, and whether they have more bits than bf16.

An adapter wraps the stream of weights in ``observe``, which changes neither tensors nor order nor
timing, and adds no collective. At the syncs in ``AT``, the device compares sampled elements with
their bf16 values, and the host reads the results afterwards.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ..precision.dtypes import live_name, name_of
from ..precision.effect import COMPUTES
from ..precision.lm_head import HEAD_MARK
from ..process.session import current_settings
from ..reporting import journal as _journal
from . import files, latest, sent_weights
from .audits import rank_of_job
from .reading import SIXTEEN_BIT, local
from .sent_weights import ADAPTERS, BASE, BIASES, Sent, Weights
from .torch_reader import mixed_dtypes, shards_by_gathered

AT = (1, 2, 8, 64, 512, 4096)
"""Numbers of the weight syncs that are audited; the first sync is number 1."""

MOST_TENSORS, MOST_ELEMENTS = 512, 512
"""About the largest number of sampled tensors, and of sampled elements of a tensor."""

_LEAST = 2.0**-14  # fp16's smallest normal number; most subnormal numbers are exact in bf16
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_Groups = dict[str, tuple[Counter[str], list[torch.Tensor]]]
"""Elements by dtype, and whether bf16 represents each sample, of each group of tensors."""

T = TypeVar("T")
Named = Iterable[tuple[str, Any]]


def tell_asked(framework: str, name: str, key: str) -> None:
    """Record the config's dtype name for a framework's rollout (empty for none), and its key."""
    latest.rollouts[framework] = name, key


def is_wanted() -> bool:
    """Whether audits are written to files."""
    return bool(current_settings()["audit_dir"])


def observe(
    items: Iterable[T],
    framework: str,
    subject: str,
    *,
    model: Any = None,
    then: torch.dtype | None = None,
    pairs: Callable[[T], Named] | None = None,
) -> Iterable[T]:
    """Return a stream of the unchanged ``items``, and audit their weights at the syncs in ``AT``.

    If ``PRECISION_SHIM_AUDIT_DIR`` is unset or ``AT`` lacks the sync, the result is ``items``.

    Args:
        items: the stream.
        framework: the framework's name.
        subject: name of the model, such as ``"actor"``.
        model: the trainer's modules; ``None`` to use the modules that ``watch`` stored.
        then: the dtype to which the framework rounds the stream's tensors afterwards, if it does.
        pairs: function of an item to its (name, tensor) pairs; ``None``: items are pairs.
    """
    if not is_wanted():
        return items
    latest.syncs[framework] += 1
    sync = latest.syncs[framework]
    if sync not in AT:
        return items
    if model is None:
        model = latest.model_of(framework, subject)
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    asked, key = latest.rollouts.get(framework, ("", ""))
    rounded = "" if then is None else name_of(then)
    record = Sent(framework, subject, rank_of_job()[0], asked, key, sync, {}, {}, rounded)
    return _observed(items, _Looker(record, then, chunks), pairs)


def _observed(
    items: Iterable[T], looker: _Looker, pairs: Callable[[T], Named] | None
) -> Iterator[T]:
    looker.guard(looker.look_at_own)
    source = iter(items)
    try:
        for item in source:
            named: Any = (item,) if pairs is None else pairs(item)
            for name, tensor in named:
                looker.guard(looker.look_at, name, tensor)
                del tensor
            del named
            yield item
            # Without ``del`` the item would stay in memory while the stream makes the next item.
            del item
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
    looker.guard(looker.write)


class _Looker:
    """Audits the weights of one sync."""

    def __init__(
        self, record: Sent, then: torch.dtype | None, chunks: list[torch.nn.Module]
    ) -> None:
        self._record, self._then, self._chunks = record, then, chunks
        self._who = f"{record.framework} {record.subject}"
        self._sent: _Groups = {}
        self._own: _Groups = {}
        self._every, self._quantised = 1, 0
        self._failed = False

    def guard(self, act: Callable[..., None], *args: Any) -> None:
        """Call a method; if it fails, warn once and audit nothing more."""
        if self._failed:
            return
        try:
            with torch.no_grad():
                act(*args)
        except Exception as error:  # a failed audit must not end the training run
            self._failed = True
            _journal.warn_or_say(
                f"{self._who}: the weights that are sent to the rollout are not audited: {error!r}"
            )

    def look_at_own(self) -> None:
        """Read the trainer's parameters, and the routers' biases, which may be buffers."""
        gathered = shards_by_gathered(self._chunks)
        named = [
            (name, gathered.get(id(parameter), parameter))
            for chunk in self._chunks
            for name, parameter in chunk.named_parameters()
        ]
        self._every = max(1, len(named) // MOST_TENSORS)
        buffers = (one for chunk in self._chunks for one in chunk.named_buffers())
        biases = [one for one in buffers if _group_of(one[0]) == BIASES]
        for name, tensor in [*named, *biases]:
            self._add(self._own, name, tensor)
        heads = [
            head
            for chunk in self._chunks
            for module in chunk.modules()
            if (head := vars(module).get(HEAD_MARK))
        ]
        held = {parameter.dtype for name, parameter in named if _group_of(name) == BASE}
        computes = mixed_dtypes(self._chunks).get(COMPUTES) or (len(held) == 1 and held.pop())
        self._record = replace(
            self._record,
            head=heads[-1] if heads else "",
            computes=name_of(computes) if computes in SIXTEEN_BIT else "",
        )

    def _add(
        self, groups: _Groups, name: str, tensor: torch.Tensor, then: torch.dtype | None = None
    ) -> None:
        elements, exact = groups.setdefault(_group_of(name), (Counter(), []))
        elements[live_name(tensor.dtype)] += tensor.numel()
        if zlib.crc32(name.encode()) % self._every == 0 and _can_be_sampled(tensor):
            exact.append(_is_exact(_few(tensor), then))

    def look_at(self, name: str, tensor: Any) -> None:
        """Read a tensor that is sent."""
        if not isinstance(tensor, torch.Tensor):
            return
        if tensor.element_size() == 1:
            self._quantised += name.endswith(".weight")
        else:
            self._add(self._sent, name, tensor, self._then)

    def write(self) -> None:
        """Write the record into ``PRECISION_SHIM_AUDIT_DIR``, and warn of its contradictions."""
        sent = replace(
            self._record,
            sent=_weights(self._sent),
            own=_weights(self._own),
            quantised=self._quantised,
        )
        directory = current_settings()["audit_dir"]
        try:
            sent_weights.write(directory, sent)
        except OSError as error:
            _journal.warn_or_say(files.not_written(directory, error))
        if sent.rank == 0:
            for code, message in sent.contradictions():
                _journal.warn(f"{self._who}: {code}: {message}", stacklevel=None)


def _weights(groups: _Groups) -> dict[str, Weights]:
    # Frameworks pack weights on other CUDA streams.
    for device in {one.device for _, exact in groups.values() for one in exact if one.is_cuda}:
        torch.cuda.synchronize(device)
    return {
        group: Weights(dict(elements), all(map(bool, exact)) if exact else None)
        for group, (elements, exact) in groups.items()
    }


def _group_of(name: str) -> str:
    if name.endswith(("expert_bias", "e_score_correction_bias")):
        return BIASES
    return ADAPTERS if "lora_" in name else BASE


def _can_be_sampled(tensor: torch.Tensor) -> bool:
    shard = local(tensor)
    plain = type(shard) in _PLAIN and shard.dtype in _WIDE
    return plain and shard.device.type != "meta" and shard.numel() > 0


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements of this rank's shard of a tensor, as a view."""
    shard = local(tensor).detach()
    side = max(1, round(MOST_ELEMENTS ** (1 / max(1, shard.ndim))))
    # The distance is odd: an even one may only meet one kind of column, such as one head's.
    return shard[tuple(slice(None, None, size // side | 1) for size in shard.shape)]


def _is_exact(values: torch.Tensor, then: torch.dtype | None) -> torch.Tensor:
    """Whether bf16 represents each value of magnitude ``_LEAST`` or more, on the device."""
    wide = (values if then is None else values.to(then)).float()
    return (~(wide.abs() >= _LEAST) | (wide == wide.bfloat16().float())).all()
