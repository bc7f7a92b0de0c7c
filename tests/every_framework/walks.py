"""The walks of CONTRIBUTING.md: how long each is in a real run, and whether its table is true.

``pytest -s -k walk`` prints how many files and functions of ours a run calls, and how many calls
lead from one of these files into another. The stand-ins in ``testing`` do not count.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import precision_shim
import precision_shim_adapters
import precision_shim_tools

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
_ROOMS = tuple(
    f"{Path(str(one.__file__)).parent}/"
    for one in (precision_shim, precision_shim_adapters, precision_shim_tools)
)
_ROW = re.compile(
    r"^\| (\d+) \| `([\w.]+)`, (?:`[.\w]+?/([\w/]+\.py)`|the file of step (\d+)) \|", re.MULTILINE
)


class Walk:
    """What a run calls of ours; what happens while a module is imported does not count.

    Attributes:
        called: the functions, in the order of their first calls.
        moves: the number of calls from one of our files into another.
    """

    def __init__(self) -> None:
        self.called: dict[CodeType, None] = {}
        self.moves = 0

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Count a call; the function for ``sys.setprofile``."""
        code = frame.f_code
        caller = frame.f_back.f_code if frame.f_back is not None else code
        if event == "call" and _is_ours(code) and caller.co_name != "<module>":
            self.called.setdefault(code)
            self.moves += _is_ours(caller) and caller.co_filename != code.co_filename

    def __str__(self) -> str:
        files = {code.co_filename for code in self.called}
        return f"{len(files)} files, {len(self.called)} functions, {self.moves} moves"


def _is_ours(code: CodeType) -> bool:
    ours = code.co_filename.startswith(_ROOMS) and "_tools/testing/" not in code.co_filename
    return ours and code.co_name != "<module>"


@contextmanager
def walking(title: str) -> Iterator[None]:
    """Follow the table ``title`` in CONTRIBUTING.md while the ``with`` block runs.

    Raises:
        AssertionError: a function of the table is not called, or not in the table's order.
    """
    walk = Walk()
    sys.setprofile(walk.note)
    try:
        yield
    finally:
        sys.setprofile(None)
    print(f"\n{title}: {walk}")
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition(f"**{title}.**")[2].partition("\n\n**")[0].partition("\n## ")[0]
    rows = _ROW.findall(table)
    assert len(rows) == len(re.findall(r"^\| \d", table, re.MULTILINE)) > 0
    files: dict[str, str] = {}
    order = []
    for number, name, file, step in rows:
        files[number] = file or files[step]
        first = [
            place
            for place, code in enumerate(walk.called)
            if code.co_filename.endswith(f"/{files[number]}")
            and code.co_name == name.rpartition(".")[2]
        ]
        assert first, f"step {number}: {name} of {files[number]} is not called"
        order.append(first[0])
    assert order == sorted(order)
