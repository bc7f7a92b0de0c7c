"""Measures a file's fingerprint in a scaler's record: bytes read and seconds, by the file's size.

Run: ``python benchmarks/fingerprints.py [GIBIBYTES ...]`` (default: 0.001 0.1 1). ``torch.save``
writes each file, with GIBIBYTES of optimizer state in tensors of 4 MiB. The program computes the
fingerprint right after it has written the file, as the shim does.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from precision_shim.scaling import belonging

TENSOR = 1 << 20
"""Number of elements in a tensor, which has 4 MiB in float32."""


def bytes_read() -> int:
    """Number of bytes that this process has read so far, as Linux counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def main(sizes: list[float]) -> None:
    """Print one line of figures for each size."""
    print(f"{'file':>12} {'tensors':>8} {'saved in':>10} {'read':>12} {'fingerprint in':>15}")
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            count = max(1, round(size * (1 << 30) / (4 * TENSOR)))
            state = {index: torch.rand(TENSOR) for index in range(count)}
            path = Path(folder, "optim_world_size_1_rank_0.pt")
            start = time.perf_counter()
            torch.save(state, path)
            saved = time.perf_counter() - start
            before, start = bytes_read(), time.perf_counter()
            belonging.fingerprint(path)
            took, read = time.perf_counter() - start, bytes_read() - before
            print(
                f"{path.stat().st_size / (1 << 20):8.0f} MiB {count:8} {saved:8.3f} s "
                f"{read / 1024:8.0f} KiB {took * 1000:12.1f} ms"
            )


if __name__ == "__main__":
    main([float(one) for one in sys.argv[1:]] or [0.001, 0.1, 1.0])
