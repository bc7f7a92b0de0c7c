"""Pack the proof for a machine with a GPU and no network into pieces of a bounded size.

    python benchmarks/gpu/bundle.py FOLDER              # FOLDER/proof.tar.00, .01, ..., unpack.sh
    sh unpack.sh FOLDER TARGET                          # on that machine; prints the command

The pieces contain the wheels of requirements.txt, and this repository as committed. Packing needs
pip, git and a package index. No index has the wheel of transformer-engine-torch: it is copied from
the folder into which ``tox run -e te`` writes it, or from ``--find-links``.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "requirements.txt"
BUILT = ROOT / ".tox" / "transformer-engine"
BINDING = "transformer-engine-torch"
PYTHON = "3.12"
GLIBC = (17, 24, 27, 28, 31, 34, 35)
"""Minor glibc versions of the manylinux tags: pip accepts only tags that are named."""
PIECE_MIB = 60
ARCHIVE, SUMS, UNPACK = "proof.tar", "SHA256SUMS", "unpack.sh"


def requirements(without: Sequence[str] = ()) -> list[str]:
    """The pins in requirements.txt, except those of the packages in ``without``."""
    text = re.sub(r"#.*", "", REQUIREMENTS.read_text(encoding="utf-8"))
    pins = text.split()
    unknown = set(without) - {pin.partition("==")[0] for pin in pins}
    if unknown:
        raise SystemExit(f"--without {', '.join(sorted(unknown))}: not in {REQUIREMENTS.name}")
    return [pin for pin in pins if pin.partition("==")[0] not in without]


def binding(places: Sequence[Path], pin: str) -> Path:
    """Find the wheel of transformer-engine-torch."""
    version = pin.partition("==")[2]
    tag = PYTHON.replace(".", "")
    pattern = f"{BINDING.replace('-', '_')}-{version}-cp{tag}-*x86_64.whl"
    for place in places:
        for found in sorted(place.rglob(pattern)):
            return found
    raise SystemExit(
        f"no {pattern} in {', '.join(map(str, places))}. Make it with `tox run -e te` (ten "
        "minutes, no GPU), or name the folder that has it with --find-links."
    )


def download(pins: Sequence[str], target: Path) -> None:
    """Download wheels for the GPU machine's platform, whatever platform this machine has."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command += [word for one in platforms for word in ("--platform", one)]
    subprocess.run([*command, "--dest", str(target), *pins], check=True)


def pieces(archive: Path, folder: Path, size: int) -> Iterator[Path]:
    """Split a file into numbered pieces of at most ``size`` bytes."""
    with archive.open("rb") as whole:
        for number in range(100):
            chunk = whole.read(size)
            if not chunk:
                return
            piece = folder / f"{ARCHIVE}.{number:02}"
            piece.write_bytes(chunk)
            yield piece
    raise SystemExit(f"{archive} has more than 100 pieces of {size} bytes: allow larger ones")


def pack(content: Path, folder: Path, size: int) -> list[Path]:
    """Pack a folder's content into pieces; add their checksums and the script that unpacks."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch, ARCHIVE)
        subprocess.run(["tar", "-cf", str(archive), "-C", str(content), "."], check=True)
        made = list(pieces(archive, folder, size))
    sums = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in made]
    (folder / SUMS).write_text("".join(sums), encoding="utf-8")
    shutil.copy(HERE / UNPACK, folder)
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the pieces go; empty or new")
    parser.add_argument("--mib", type=int, default=PIECE_MIB, help="of a piece (%(default)s)")
    parser.add_argument("--find-links", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument(
        "--without", default="", metavar="NAMES", help="packages that the machine has already"
    )
    options = parser.parse_args(argv)
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty")
    pins = requirements([one for one in options.without.split(",") if one])
    with tempfile.TemporaryDirectory() as scratch:
        content, wheels = Path(scratch), Path(scratch, "wheels")
        wheels.mkdir()
        for pin in [pin for pin in pins if pin.startswith(BINDING)]:
            pins.remove(pin)
            shutil.copy(binding([*options.find_links, BUILT], pin), wheels)
        download(pins, wheels)
        with Path(content, "repository.tar").open("wb") as file:
            command = ["git", "-C", str(ROOT), "archive", "--format=tar", "HEAD"]
            subprocess.run(command, stdout=file, check=True)
        made = pack(content, options.folder, options.mib << 20)
    for piece in made:
        print(f"{piece.stat().st_size:>12,}  {piece}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
