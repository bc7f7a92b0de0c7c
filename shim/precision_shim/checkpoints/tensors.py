"""Describe the tensors in files (name, dtype, size), and read their bytes. Needs no torch."""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CheckpointUnreadableError
from ..precision.names import SHORT, SIZES
from .pickles import Made, Name, Persistent, read_pickle

__all__ = ["Archive", "Tensor", "check_archive", "count_of", "dtype_name", "item_size"]


def dtype_name(path: str) -> str:
    """Return a dtype's canonical name: ``"fp32"`` for ``"torch.float32"``.

    Raises:
        ValueError: ``path`` does not name a dtype.
    """
    bare = path.removeprefix("torch.")
    if not re.fullmatch(r"[A-Za-z_]\w{0,31}", bare, re.ASCII):
        raise ValueError(f"{bare[:32]!r} is no dtype")
    return SHORT.get(bare, bare)


def count_of(shape: Any) -> int:
    """Return the number of elements of a tensor with the given shape.

    Raises:
        ValueError: no tensor can have this shape.
    """
    sizes = list(shape)
    if len(sizes) > _DIMENSIONS or not all(
        type(size) is int and 0 <= size < _MOST for size in sizes
    ):
        raise ValueError("a tensor has a shape that no tensor has")
    count: int = math.prod(sizes)
    if count >= _MOST:
        raise ValueError("a tensor has more elements than any tensor")
    return count


def item_size(dtype: str) -> int:
    """Return an element's size in bytes; an unknown dtype's size is computed from its name."""
    if dtype in SIZES:
        return SIZES[dtype]
    bits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, with the shards of all ranks.

    Attributes:
        name: the tensor's key.
        dtype: canonical name of the tensor's dtype.
        elements: number of elements.
        parts: a function for each piece of the tensor; ``parts[0](n)`` returns at most ``n`` bytes
            from the beginning of the first piece. ``parts`` is empty if the bytes cannot be read
            without torch.
    """

    name: str
    dtype: str
    elements: int
    parts: tuple[Callable[[int], bytes], ...] = field(default=(), compare=False, repr=False)

    @property
    def bytes(self) -> int:
        """Size of all elements, in bytes."""
        return self.elements * item_size(self.dtype)


_DIMENSIONS, _MOST = 64, 2**63
"""torch's limits: a tensor's number of dimensions, and its elements per dimension and in total."""

_NO_DATA = ("_spec", "_mesh", "mesh")
"""Fields of a DTensor whose tensors are not the DTensor's data."""


class _Slice(io.RawIOBase):
    def __init__(self, path: Path, offset: int, length: int | None) -> None:
        self._file = path.open("rb")
        size = os.fstat(self._file.fileno()).st_size
        self._start = offset
        self._size = size - offset if length is None else length
        self._at = 0
        if self._size < 0 or offset + self._size > size:
            self._file.close()
            raise EOFError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._start + self._at)
        read = self._file.read(count)
        buffer[: len(read)] = read
        self._at += len(read)
        return len(read)

    def close(self) -> None:
        self._file.close()
        super().close()


class Archive:
    """An archive of ``torch.save``: a zip file, whose pickle is read as plain data.

    Attributes:
        path: the file.
        tree: the content of the pickle, as plain data.

    Args:
        path: the file.
        offset: the position in the file at which the archive begins.
        length: size of the archive; ``None`` for the rest of the file.

    Raises:
        CheckpointUnreadableError: the archive is missing or damaged.
    """

    def __init__(self, path: Path, offset: int = 0, length: int | None = None) -> None:
        self.path = path
        self._place = path, offset, length
        self._root = ""
        self.tree: Any = None
        with self._open() as archive:
            pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
            if len(pickles) != 1:
                raise CheckpointUnreadableError(f"{path}: a zip file that torch did not write.")
            self._root = pickles[0].removesuffix("data.pkl")
            self._sizes = {info.filename: info.file_size for info in archive.infolist()}
            self.tree = read_pickle(self._member(archive, pickles[0]), str(path))
            order = f"{self._root}byteorder"
            self._little = order not in archive.namelist() or (
                self._member(archive, order).strip() == b"little"
            )

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        path, offset, length = self._place
        try:
            raw = _Slice(path, offset, length)
        except FileNotFoundError:
            raise CheckpointUnreadableError(f"{path}: it is missing.") from None
        except EOFError:
            reason = "it ends before its content does"
            raise CheckpointUnreadableError(f"{path}: {reason}.") from None
        except OSError as error:
            reason = f"it cannot be read ({error.strerror or error})"
            raise CheckpointUnreadableError(f"{path}: {reason}.") from None
        with io.BufferedReader(raw) as file:
            try:
                archive = zipfile.ZipFile(file)
            except Exception:  # a zip file's damaged central directory may cause any error
                reason = "it is damaged, cut off, or not written by torch.save"
                raise CheckpointUnreadableError(f"{path}: {reason}.") from None
            with archive:
                if not _has_checksums(archive):
                    for info in archive.infolist():
                        del info.CRC  # without CRC, zipfile compares no checksum
                yield archive

    def _member(self, archive: zipfile.ZipFile, name: str, start: int = 0, most: int = -1) -> bytes:
        try:
            if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
                # A few compressed kilobytes may expand to any number of gigabytes.
                raise ValueError("it is compressed, which torch.save never does")
            with archive.open(name) as member:
                if start:
                    member.seek(start)
                return member.read(most)
        except Exception as error:  # a damaged file within the zip archive may cause any error
            why = " ".join(str(error).split())[:120]
            raise CheckpointUnreadableError(
                f"{self.path}: {name} in it is damaged or missing ({why})."
            ) from None

    def tensors(self, tree: Any = None) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        """Yield (keys, tensor) for each tensor in ``tree`` (default: the archive's tree)."""
        seen: set[int] = set()
        waiting: list[tuple[tuple[Any, ...], Any]] = [((), self.tree if tree is None else tree)]
        inside: set[int] = set()  # ids of a ``Made``'s values, which get the ``Made``'s keys
        while waiting:
            keys, node = waiting.pop()
            if isinstance(node, Made):
                tensor = self._tensor(keys, node)
                if tensor is not None:
                    yield keys, tensor
                    continue
            if isinstance(node, (Made, dict, list, tuple)):
                if id(node) in seen:
                    continue
                seen.add(id(node))
            if isinstance(node, Made):
                inner = [*node.arguments, node.state, node.items, *node.members]
                inside.update(map(id, inner))
                waiting += [(keys, value) for value in reversed(inner)]
                continue
            if not isinstance(node, (dict, list, tuple)):
                continue
            named = node.items() if isinstance(node, dict) else enumerate(node)
            own = id(node) in inside
            for key, value in reversed(list(named)):
                if own and key in _NO_DATA:
                    continue
                if own:
                    inside.add(id(value))
                waiting.append((keys if own else (*keys, key), value))

    def _tensor(self, keys: tuple[Any, ...], made: Made) -> Tensor | None:
        if made.kind != "torch._utils._rebuild_tensor_v2" or len(made.arguments) < 4:
            return None
        storage, start, shape, stride = made.arguments[:4]
        label = storage.label if isinstance(storage, Persistent) else None
        if not isinstance(label, tuple) or len(label) < 3 or not isinstance(shape, tuple):
            return None
        if not isinstance(label[1], Name) or not isinstance(label[2], str):
            return None
        kind = label[1].path
        bare = kind.rpartition(".")[2]
        dtype = SHORT.get(bare.removesuffix("Storage").lower()) or dtype_name(bare)
        elements = count_of(shape)
        parts: tuple[Callable[[int], bytes], ...] = ()
        known = type(start) is int and 0 <= start < _MOST
        has = self._sizes.get(f"{self._root}data/{label[2]}")
        needed = start + _reach(shape, stride) if known and elements else 0
        if has is None or has < needed * item_size(dtype):
            fault = "is missing" if has is None else f"has {has} bytes, too few"
            name = f"data/{label[2][:64]}"
            raise CheckpointUnreadableError(f"{self.path}: its record {name!r} {fault}.")
        if known and self._little and _is_contiguous(shape, stride):
            size = item_size(dtype)
            parts = (partial(self._piece, label[2], start * size, elements * size),)
        return Tensor(".".join(map(str, keys)), dtype, elements, parts)

    def _piece(self, key: str, start: int, size: int, most: int) -> bytes:
        """Read at most ``most`` of the ``size`` bytes at byte ``start`` of the storage ``key``."""
        with self._open() as archive:
            return self._member(archive, f"{self._root}data/{key}", start, min(most, size))


def _reach(shape: tuple[int, ...], stride: Any) -> int:
    """Return the number of storage elements from a tensor's first element to its last."""
    if not isinstance(stride, tuple) or not all(type(number) is int for number in stride):
        return 0
    reach: int = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=False))
    return reach


def check_archive(path: Path, offset: int = 0, length: int | None = None) -> list[tuple[int, int]]:
    """Read an archive of ``torch.save`` and compare its records with their checksums.

    torch compares no checksum: it loads a changed record without an error.

    Returns:
        The returned list contains the spans of bytes with correct checksums; it is empty for an
        archive without checksums. The zip format's bytes between the records have no checksums.

    Raises:
        CheckpointUnreadableError: a record or the archive is damaged.
    """
    held = []
    archive = Archive(path, offset, length)
    for _ in archive.tensors():  # tensors() raises an error if a tensor's record is missing
        pass
    with archive._open() as file:
        if not _has_checksums(file):
            return []
        raw = file.fp
        assert raw is not None
        for info in file.infolist():
            start = _begin(raw, info)
            summed, left = 0, info.file_size
            while left:
                content = raw.read(min(left, _CHUNK))
                if not content:
                    break
                summed, left = zlib.crc32(content, summed), left - len(content)
            if start is None or left or summed != info.CRC:
                name = info.filename.partition("/")[2]
                raise CheckpointUnreadableError(
                    f"{path}: its record {name[:64]!r} is damaged: the checksum does not hold."
                )
            held.append((offset + start, offset + start + info.file_size))
    return held


def _has_checksums(archive: zipfile.ZipFile) -> bool:
    """Whether torch wrote checksums; after ``set_crc32_options(False)`` torch writes only zeros.

    Damage may set a record's checksum to 0, but then the other records' checksums are not 0.
    """
    return any(getattr(info, "CRC", 0) for info in archive.infolist())


def _begin(raw: Any, info: zipfile.ZipInfo) -> int | None:
    """Seek to a record's first byte, and return its offset; ``None`` if the header is damaged."""
    raw.seek(info.header_offset)
    header = raw.read(_HEADER)
    if len(header) < _HEADER or header[:4] != b"PK\x03\x04":
        return None
    named, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    start = info.header_offset + _HEADER + named + extra
    raw.seek(start)
    return start


_HEADER, _CHUNK = 30, 1 << 20
"""Bytes in the header of a zip file's record, and bytes to read at once."""


def _is_contiguous(shape: tuple[int, ...], stride: Any) -> bool:
    if not isinstance(stride, tuple) or len(stride) != len(shape):
        return False
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
