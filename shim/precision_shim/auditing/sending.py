"""Audit the weights sent to the rollout: their dtypes, and the share that bf16 represents exactly.

An adapter wraps the framework's stream of weights in ``observe``. The audit changes neither the
tensors in the stream nor their order or timing. At the weight syncs in ``AT``, the device compares
sampled elements with the same elements rounded to bf16. After an audited sync the host reads two
numbers for each group of tensors. The audit of sent weights adds no collective.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..precision.dtypes import name_of
from ..process.session import current_settings
from ..reporting import journal as _journal
from . import files, halves, kept
from .contradictions import contradictions
from .halves import ADAPTERS, BASE, Sent, Weights
from .layers import HEAD_MARK
from .looking import rank_of_job
from .reading import SIXTEEN_BIT, local
from .torch_reader import mixed_dtype, shards_by_gathered

AT = (1, 2, 8, 64, 512, 4096)
"""Numbers of the weight syncs that are audited; the first sync is number 1."""

MOST_TENSORS, MOST_ELEMENTS = 512, 512
"""About the largest number of sampled tensors, and of sampled elements of a tensor."""

_LEAST = 2.0**-14  # fp16's smallest normal number; most subnormal numbers are exact in bf16
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN = (torch.Tensor, torch.nn.Parameter)

T = TypeVar("T")
Named = Iterable[tuple[str, Any]]


@dataclass
class _Asked:
    name: str = ""
    key: str = ""
    not_asked: str = ""
    syncs: int = 0


_rollouts: dict[str, _Asked] = {}


def _rollout(framework: str) -> _Asked:
    if framework not in _rollouts:
        kept.at_clear(_rollouts.clear)
    return _rollouts.setdefault(framework, _Asked())


def tell_asked(framework: str, name: str, key: str, not_asked: str = "") -> None:
    """Record the dtype that this job's config sets for the framework's rollout.

    Args:
        framework: the framework's name.
        name: the dtype name that the engine receives; empty if it is not known.
        key: the config key of the rollout's dtype.
        not_asked: why engines cannot report their weights; empty if they can.
    """
    known = _rollout(framework)
    known.name, known.key, known.not_asked = name, key, not_asked


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
        then: the dtype to which the framework rounds the stream's tensors afterwards; ``None`` if
            the framework does not round them.
        pairs: function that returns the (name, tensor) pairs in an item; ``None`` if each item is
            one such pair.
    """
    if not is_wanted():
        return items
    known = _rollout(framework)
    known.syncs += 1
    if known.syncs not in AT:
        return items
    chunks = kept.model_of(framework, subject) if model is None else _several(model)
    return _observed(items, _Looker(framework, subject, known.syncs, then, chunks), pairs)


def _observed(
    items: Iterable[T], looker: _Looker, pairs: Callable[[T], Named] | None
) -> Iterator[T]:
    looker.begin()
    source = iter(items)
    try:
        while True:
            try:
                item = next(source)
            except StopIteration:
                break
            named: Any = (item,) if pairs is None else pairs(item)
            for name, tensor in named:
                looker.see(name, tensor)
                del tensor
            del named
            yield item
            del (
                item
            )  # without ``del`` the item would stay in memory while the stream makes the next item
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
    looker.end()


def _several(model: Any) -> list[torch.nn.Module]:
    return list(model) if isinstance(model, (list, tuple)) else [model]


@dataclass
class _Group:
    elements: dict[str, int] = field(default_factory=dict)
    counts: list[torch.Tensor] = field(default_factory=list)

    def add(self, tensor: torch.Tensor) -> None:
        name = name_of(tensor.dtype)
        self.elements[name] = self.elements.get(name, 0) + tensor.numel()

    def weights(self) -> Weights:
        for device in {counter.device for counter in self.counts if counter.device.type == "cuda"}:
            torch.cuda.synchronize(device)  # frameworks pack weights on their own CUDA streams
        exact = sampled = 0
        for device in {counter.device for counter in self.counts}:
            mine = [counter for counter in self.counts if counter.device == device]
            both = torch.stack(mine).sum(0).tolist()
            exact, sampled = exact + both[0], sampled + both[1]
        return Weights(self.elements, exact / sampled if sampled else None, sampled)


class _Looker:
    def __init__(
        self,
        framework: str,
        subject: str,
        sync: int,
        then: torch.dtype | None,
        chunks: Sequence[torch.nn.Module],
    ) -> None:
        self._names = (framework, subject)
        self._sync, self._then, self._chunks = sync, then, chunks
        self._sent: dict[str, _Group] = {}
        self._own: dict[str, Weights] = {}
        self._quantised: list[str] = []
        self._every = 1
        self._failed = False
        self._head = ""
        self._computes = ""

    def begin(self) -> None:
        self._guard(self._look_at_own)

    def see(self, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            self._guard(lambda: self._look_at(name, tensor))

    def end(self) -> None:
        self._guard(self._write)
        self._chunks = ()

    def _guard(self, act: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            with torch.no_grad():
                act()
        except Exception as error:  # a failed audit must not end the training run
            self._failed = True
            who = " ".join(self._names)
            _journal.tell(
                f"{who}: the weights that are sent to the rollout are not audited: {error!r}"
            )

    def _look_at_own(self) -> None:
        gathered = shards_by_gathered(self._chunks)
        named = {
            id(parameter): (name, gathered.get(id(parameter), parameter))
            for chunk in self._chunks
            for name, parameter in chunk.named_parameters()
        }
        self._every = max(1, len(named) // MOST_TENSORS)
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            self._head = vars(module).get(HEAD_MARK, self._head)
        held = {parameter.dtype for name, parameter in named.values() if _group_of(name) == BASE}
        computes = mixed_dtype(self._chunks) or (held.pop() if len(held) == 1 else None)
        self._computes = name_of(computes) if computes in SIXTEEN_BIT else ""
        found: dict[str, _Group] = {}
        for name, parameter in named.values():
            group = found.setdefault(_group_of(name), _Group())
            group.add(parameter)
            if zlib.crc32(name.encode()) % self._every == 0 and _can_be_sampled(parameter):
                group.counts.append(_counts(_few(parameter)))
        self._own = {group: counter.weights() for group, counter in found.items()}

    def _look_at(self, name: str, tensor: torch.Tensor) -> None:
        group = self._sent.setdefault(_group_of(name), _Group())
        if tensor.element_size() == 1:
            if name.endswith(".weight"):
                self._quantised.append(name.removesuffix(".weight"))
            return
        group.add(tensor)
        if zlib.crc32(name.encode()) % self._every == 0 and _can_be_sampled(tensor):
            group.counts.append(_counts(_few(tensor), self._then))

    def _write(self) -> None:
        framework, subject = self._names
        asked = _rollout(framework)
        rank, world = rank_of_job()
        sent = Sent(
            framework=framework,
            subject=subject,
            rank=rank,
            world_size=world,
            job=job(),
            asked=asked.name,
            key=asked.key,
            sync=self._sync,
            sent={group: counter.weights() for group, counter in self._sent.items()},
            own=self._own,
            then="" if self._then is None else name_of(self._then),
            quantised=tuple(self._quantised),
            not_asked=asked.not_asked,
            head=self._head,
            computes=self._computes,
        )
        write(sent)
        if rank == 0:
            for contradiction in contradictions([sent], []):
                _journal.warn(
                    f"{framework} {subject}: {contradiction.code}: {contradiction.message}",
                    stacklevel=None,
                )


def write(half: halves.Half) -> None:
    """Write a ``Sent`` or ``Held`` into ``PRECISION_SHIM_AUDIT_DIR``; if writing fails, warn."""
    directory = current_settings()["audit_dir"]
    try:
        halves.write(directory, half)
    except OSError as error:
        _journal.tell(files.not_written(directory, error))


def job() -> str:
    """Return a name that all processes of a Ray job share; empty without Ray."""
    ray = sys.modules.get("ray")
    try:
        if ray is None or not ray.is_initialized():
            return ""
        context = ray.get_runtime_context()
        return f"{context.get_job_id()} of {context.gcs_address}"
    except Exception:  # a version of Ray without these functions
        return ""


def _group_of(name: str) -> str:
    return ADAPTERS if "lora_" in name else BASE


def _can_be_sampled(tensor: torch.Tensor) -> bool:
    own = local(tensor)
    plain = type(own) in _PLAIN and own.dtype in _WIDE
    return plain and own.device.type != "meta" and own.numel() > 0


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements of this rank's shard of a tensor, as a view."""
    own = local(tensor).detach()
    if own.is_contiguous():
        # The distance between elements is odd: an even distance may be a multiple of the row
        # length, so that all elements are from one column.
        return own.view(-1)[:: own.numel() // MOST_ELEMENTS | 1]
    side = max(1, round(MOST_ELEMENTS ** (1 / own.ndim)))
    return own[tuple(slice(None, None, size // side | 1) for size in own.shape)].reshape(-1)


def _counts(values: torch.Tensor, then: torch.dtype | None = None) -> torch.Tensor:
    """Count the values of magnitude ``_LEAST`` or more: first those exact in bf16, then all."""
    wide = (values if then is None else values.to(then)).float()
    normal = wide.abs() >= _LEAST
    exact = normal & (wide == wide.bfloat16().float())
    return torch.stack([exact.sum(), normal.sum()])
