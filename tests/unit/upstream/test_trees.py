"""Inspecting a wheel or a folder imports nothing; an error names any other kind of path."""

from __future__ import annotations

import sys
import zipfile

import pytest

from precision_shim.errors import SourceError
from precision_shim.seams import look
from precision_shim.seams._source import looking_at
from precision_shim_tools.upstream.trees import open_tree, over

FILES = {
    "toy/__init__.py": "raise AssertionError('imported')\n",
    "toy/ops.py": "raise AssertionError('imported')\n\n\ndef scale(value):\n    return value\n",
    "toy/bare/ops.py": "def deep(value):\n    pass\n",
    "space/toy/__init__.py": "",
    "space/toy/ops.py": "def wide(value):\n    pass\n",
}
METADATA = "Metadata-Version: 2.1\nName: The_Toy\nVersion: 2.5\nDescription: x\n\nName: other\n"
PACKAGES = ("toy", "space.toy")


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def wheel(root, files, name="the_toy-2.5-py3-none-any.whl"):
    root.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(root / name, "w") as made:
        for one, text in files.items():
            made.writestr(one, text)
    return root / name


def places(kind, root):
    """Write the same packages in each form that a path may have; returns the path to open."""
    if kind == "folder":
        return write(root, FILES)
    if kind == "package":
        return write(root, FILES) / "toy"
    if kind == "checkout":
        return write(root, {f"src/{name}": text for name, text in FILES.items()} | {"README": ""})
    if kind == "site-packages":
        return write(root, {**FILES, "the_toy-2.5.dist-info/METADATA": METADATA})
    if kind == "environment":
        files = {f"lib/python3.12/site-packages/{name}": text for name, text in FILES.items()}
        return write(root, files)
    beneath = "the_toy-2.5.data/purelib/" if kind == "wheel with data" else ""
    files = {f"{beneath}{name}": text for name, text in FILES.items()}
    return wheel(root, {**files, "the_toy-2.5.dist-info/METADATA": METADATA})


KINDS = (
    "folder",
    "package",
    "checkout",
    "site-packages",
    "environment",
    "wheel",
    "wheel with data",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_goes_into_it_and_imports_nothing(kind, tmp_path):
    path = places(kind, tmp_path / "given")
    before = sorted(tmp_path.rglob("*"))
    with looking_at(open_tree(path, PACKAGES).find):
        assert look("toy.ops:scale").parameters == ("value",)
        assert look("toy.bare.ops:deep").found
        assert look("space.toy.ops:wide").found
        assert not look("toy.ops:gone").found
        assert look("toy.ops:gone").module_found
        assert not look("toy.gone:scale").module_found
        assert not look("toy.ops.deeper:scale").module_found
        assert not look("space:scale").found
        assert not look("sys:exit").module_found
    assert not look("toy.ops:scale").module_found
    assert not {"toy", "toy.ops", "space"} & set(sys.modules)
    assert sorted(tmp_path.rglob("*")) == before


def test_beneath_it_is_what_is_installed_but_for_packages_that_it_has(tmp_path, write_modules):
    write_modules(
        {
            "toy/__init__.py": "",
            "toy/older.py": "def f(a):\n    pass\n",
            "space/other/__init__.py": "",
            "space/other/ops.py": "def g(a):\n    pass\n",
        }
    )
    tree = open_tree(places("wheel", tmp_path / "given"), PACKAGES)
    assert not tree.complete
    with looking_at(over(tree)):
        assert look("toy.ops:scale").found
        assert not look("toy.older:f").module_found  # The new release lacks this module.
        assert look("space.other.ops:g").found  # This module is of another distribution.
        assert look("ast:parse").found


def test_a_site_packages_is_all_there_is(tmp_path, write_modules):
    write_modules({"other/__init__.py": "", "other/ops.py": "def g(a):\n    pass\n"})
    tree = open_tree(places("site-packages", tmp_path / "given"), PACKAGES)
    assert tree.complete
    with looking_at(over(tree)):
        assert look("toy.ops:scale").found
        assert not look("other.ops:g").module_found


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({}, "unknown"),
        ({"the_toy-2.5.dist-info/METADATA": METADATA}, "2.5"),
        ({"the_toy.egg-info/PKG-INFO": METADATA}, "2.5"),
        ({"toy/__init__.py": "__version__ = '3.1.dev0'\n"}, "3.1.dev0"),
        ({"toy/_version.py": "__version__ = version = '3.2'\n"}, "3.2"),
        ({"toy/version.py": "__version__ = get()\n"}, "unknown"),
        ({"toy/version.py": "def broken(:\n", "toy/package_info.py": "MAJOR = 0\n"}, "unknown"),
        (
            {"toy/package_info.py": "MAJOR = 0\nMINOR = 7\nPATCH = 1\nPRE_RELEASE = 'rc2'\n"},
            "0.7.1rc2",
        ),
        ({"toy/version/version": "0.10.0.dev\n"}, "0.10.0.dev"),
        ({"pyproject.toml": '[project]\nname = "the-toy"\nversion = "4.0"\n[x]\n'}, "4.0"),
        ({"pyproject.toml": '[tool.x]\nversion = "4.0"\n'}, "unknown"),
        ({"pyproject.toml": '[project]\nname = "the-job"\nversion = "4.0"\n'}, "unknown"),
        (
            {
                "pyproject.toml": '[project]\nname = "The_Toy"\ndynamic = ["version"]\n'
                '[tool.setuptools.dynamic]\nversion = {file = "assets/version.txt"}\n',
                "assets/version.txt": "4.1\n",
            },
            "4.1",
        ),
    ],
)
def test_the_version_is_read_and_nothing_is_run(files, version, tmp_path):
    tree = open_tree(write(tmp_path, FILES | files), PACKAGES)
    assert tree.version_of("the-toy", "toy") == version


def broken_wheel(root):
    path = places("wheel", root)
    data = bytearray(path.read_bytes())
    data[data.index(b"raise AssertionError")] ^= 0xFF
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda root: root / "nowhere", "does not exist"),
        (lambda root: write(root, {"README": ""}), "holds no framework"),
        (lambda root: write(root, {"python": "#!/bin/sh\n", "src": ""}), "holds no framework"),
        (lambda root: write(root, {"other/__init__.py": "", "docs/toy/x.md": ""}), "holds no"),
        # A folder of checkouts is neither a checkout nor a package.
        (lambda root: write(root, {"toy/src/toy/__init__.py": ""}), "holds no framework"),
        (lambda root: wheel(root, {"other/__init__.py": ""}), "holds no framework"),
        (lambda root: write(root, {"toy-1.whl": "no zip"}) / "toy-1.whl", "no wheel"),
        (lambda root: write(root, {"toy-1.whl": ""}) / "toy-1.whl", "no wheel"),
        (broken_wheel, "damaged"),
    ],
)
def test_a_path_that_holds_no_framework_is_named(make, told, tmp_path):
    path = make(tmp_path / "given")
    with pytest.raises(SourceError, match=told) as caught:
        open_tree(path, PACKAGES)
    assert str(path) in str(caught.value)
    if "wheel" not in told and told != "damaged":
        assert "Looked for: toy, space.toy." in str(caught.value)
