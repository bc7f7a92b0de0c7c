"""Describe the tensors in files (name, dtype, size), and read their first bytes, without torch."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

from precision_shim.errors import CheckpointUnreadableError
from precision_shim.files.metadata import dtype_name
from precision_shim.files.pickles import Made, read_pickle


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager: turn any error into a ``CheckpointUnreadableError`` that names the file."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError("neither a file nor a directory")  # a pipe would not end
        yield
    except CheckpointUnreadableError:
        raise
    except FileNotFoundError:
        raise CheckpointUnreadableError(f"{path}: it is missing.") from None
    except OSError as error:
        where, why = error.filename or path, error.strerror or error
        raise CheckpointUnreadableError(f"{where}: it cannot be read ({why}).") from None
    except Exception as error:  # a damaged file may cause any error
        raise CheckpointUnreadableError(
            f"{path}: it is damaged, cut off, or in a form that is not known ({error!r:.120})."
        ) from None


@lru_cache
def _item_size(dtype: str) -> int:
    """Return an element's size in bytes, which the number of bits in a dtype's name shows."""
    bits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, or a rank's shard.

    Attributes:
        dtype: canonical name of the tensor's dtype.
        elements: number of elements.
        parts: for each piece, a function that returns at most ``n`` bytes from the piece's
            beginning; empty if the bytes cannot be read.
    """

    dtype: str
    elements: int
    parts: tuple[Callable[[int], bytes], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.elements < 1 << 63:
            raise ValueError("a tensor has more elements than torch can count, or fewer than none")

    @property
    def bytes(self) -> int:
        """Size of all elements, in bytes."""
        return self.elements * _item_size(self.dtype)


_NO_DATA = ("_spec", "_mesh", "mesh")
"""Fields of a DTensor whose tensors are not the DTensor's data."""


class _UpTo(io.FileIO):
    """A file that ends at ``end``: zipfile looks for an archive's beginning from its end."""

    def __init__(self, path: Path, end: int | None) -> None:
        super().__init__(path)
        self._end = os.fstat(self.fileno()).st_size if end is None else end

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            return super().seek(self._end + offset)
        return super().seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._end - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left)) or b""


_LENGTHS_AT, _LENGTHS = 26, struct.Struct("<HH")
"""Where a member's header in a zip file has the lengths of the name and of the extra field that
stand between the header and the content (APPNOTE.TXT 4.3.7)."""


class Archive:
    """An archive of ``torch.save``: a zip file, whose pickle is read as plain data (``tree``).

    Args:
        path: the file.
        end: the position in the file at which the archive ends; ``None`` for the file's end.

    Raises:
        CheckpointUnreadableError: the archive is missing or damaged.
    """

    def __init__(self, path: Path, end: int | None = None) -> None:
        self.path = path
        self._end = end
        with reading(path), _UpTo(path, end) as file:
            archive = zipfile.ZipFile(file)
            self._members = {one.filename: one for one in archive.infolist()}
            [name] = [name for name in self._members if name.endswith("data.pkl")]
            self._root = name.removesuffix("data.pkl")
            self.tree: Any = read_pickle(archive.read(name), str(path))

    def tensors(self, tree: Any = None) -> list[tuple[tuple[Any, ...], Tensor]]:
        """Return (keys, tensor) for each tensor in ``tree`` (default: the archive's tree)."""
        with reading(self.path):
            return list(self._tensors(self.tree if tree is None else tree, (), inside=False))

    def _tensors(
        self, node: Any, keys: tuple[Any, ...], *, inside: bool
    ) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        if isinstance(node, Made):
            if node.kind.startswith("torch._utils._rebuild_tensor_v"):
                yield keys, self._tensor(node)
                return
            node, inside = [node.arguments, node.state, node.items, node.members], True
        if isinstance(node, (list, tuple)):
            node = dict(enumerate(node))
        for key, value in node.items() if isinstance(node, dict) else ():
            if not inside:
                yield from self._tensors(value, (*keys, key), inside=False)
            elif key not in _NO_DATA:  # tensors inside of an object have the object's keys
                yield from self._tensors(value, keys, inside=True)

    def _tensor(self, made: Made) -> Tensor:
        (_, storage, label, *_), start, shape = made.arguments[:3]
        typed = made.arguments[6] if made.kind.endswith("v3") else storage  # 3: fp8, for example
        dtype = dtype_name(typed.kind.rpartition(".")[2].removesuffix("Storage").lower())
        elements, size = prod(int(size) for size in shape), _item_size(dtype)
        part = partial(self._read, label, start * size, elements * size)
        return Tensor(dtype, elements, (part,))

    def _read(self, label: str, start: int, size: int, most: int) -> bytes:
        with reading(self.path), _UpTo(self.path, self._end) as file:
            member = self._members[f"{self._root}data/{label}"]
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{member.filename} is compressed")
            # To open a ZipFile for each tensor would parse the list of all members each time.
            file.seek(member.header_offset + _LENGTHS_AT)
            file.seek(sum(_LENGTHS.unpack(file.read(_LENGTHS.size))) + start, os.SEEK_CUR)
            content = file.read(min(most, size, max(0, member.file_size - start)))
            if len(content) == member.file_size and zlib.crc32(content) != member.CRC:
                raise zipfile.BadZipFile(f"Bad CRC-32 for file {member.filename!r}")
            return content
