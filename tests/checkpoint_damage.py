"""Random damage to a checkpoint's files, drawn from a seed, and the checkpoint doctor's verdict."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precision_shim.checkpoints.checking import MOST
from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.report import Examined, examine
from precision_shim.errors import CheckpointUnreadableError

KINDS = ("flipped", "zeroed", "cut", "gone")


@dataclass(frozen=True)
class Damage:
    """A change that was made to a file.

    Attributes:
        kind: one of ``KINDS``.
        file: the file's path within the checkpoint.
        places: offsets of the bytes that changed or were cut off.
    """

    kind: str
    file: str
    places: tuple[int, ...]


def draw(folder: Path, seed: int) -> Damage:
    """Damage one file of a folder; the seed determines the file and the kind of damage."""
    chance = random.Random(seed)
    files = [one for one in sorted(folder.rglob("*")) if one.is_file() and one.stat().st_size]
    while True:
        # Small files are damaged as often as large ones: they describe how to read the large ones.
        file, kind = chance.choice(files), chance.choice(KINDS)
        whole = file.read_bytes()
        content = bytearray(whole)
        if kind == "gone":
            file.unlink()
            return Damage(kind, str(file.relative_to(folder)), tuple(range(len(whole))))
        if kind == "flipped":
            for _ in range(chance.choice((1, 1, 4))):
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        else:
            start = chance.randrange(len(content))
            end = len(content) if kind == "cut" else min(len(content), start + chance.randrange(99))
            content[start:end] = bytes(end - start)
            if kind == "cut":
                del content[start:]
        file.write_bytes(content)
        after = bytes(content) + bytes(len(whole) - len(content))
        places = {at for at, (a, b) in enumerate(zip(whole, after, strict=True)) if a != b}
        places |= set(range(len(content), len(whole)))
        if places:  # zeros written over zeros are no damage
            return Damage(kind, str(file.relative_to(folder)), tuple(sorted(places)))


def wrong_answers(
    checkpoint: Path,
    framework: str,
    config: Mapping[str, Any],
    work: Path,
    seeds: range,
    *,
    most: int | None = MOST,
) -> Iterator[str]:
    """Yield each damage that the doctor neither reports as a problem nor lists as not checked.

    Args:
        checkpoint: an undamaged checkpoint that resumes exactly.
        framework: whose it is.
        config: what the job's own config sets.
        work: where the copies go.
        seeds: one for each copy.
        most: see ``examine``.
    """
    here = Here.now(config).but(on=True)
    whole = {
        file.path.relative_to(checkpoint): file
        for one in examine(checkpoint, here, framework, most=most)
        for file in one.checked.files
    }
    for seed in seeds:
        folder = work / f"seed_{seed}" / checkpoint.name
        shutil.copytree(checkpoint, folder)
        damage = draw(folder, seed)
        try:
            found = examine(folder, here, framework, most=most)
        except CheckpointUnreadableError as error:
            fine = Path(damage.file).name in str(error)
            told = str(error)
        else:
            told = "; ".join(f"{one.outcome.verdict}: {one.outcome.because}" for one in found)
            fine = _said(found, damage, folder)
            if damage.kind == "gone":  # a file that is not ``ours`` is never read
                fine = fine or not whole[Path(damage.file)].ours
        shutil.rmtree(folder)
        if not fine:
            few = damage.places[:4]
            yield f"seed {seed}: {damage.file} {damage.kind} at {few}: {told}"


def _said(found: list[Examined], damage: Damage, folder: Path) -> bool:
    """Whether the report lists the damaged file as a problem, or as not checked."""
    name = Path(damage.file).name
    if not all(one.outcome.exact for one in found):
        # If a rank's file is missing, the report names the kind of file, not the file.
        parts = (name, name.partition("_world_size")[0], "no weights", "no optimizer states")
        told = " ".join(f"{one.outcome.because} {one.part.scaler.where}" for one in found)
        missing_record = "no loss scaler" in told and name == "precision_shim_scaler.json"
        return missing_record or any(part in told for part in parts)
    files = {file.path: file for one in found for file in one.checked.files}
    file = files.get(folder / damage.file)
    return file is not None and not any(map(file.is_checked, damage.places))
