"""How Sphinx builds the site: ``tox run -e docs``.

The pages are Markdown and read as well on GitHub. The API reference is made from the docstrings;
torch is mocked for it, because the shim's modules use it but none of them needs it to be described.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / source) for source in ("shim", "adapters", "tools")]

from sphinx.ext.autodoc.mock import mock  # noqa: E402

import precision_shim  # noqa: E402

project = "precision_shim"
author = "The precision_shim maintainers"
version = release = precision_shim.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

# A link to a heading has the name that GitHub gives the heading.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_mock_imports = ["torch"]
with mock(autodoc_mock_imports):
    # These packages load their names on first use, when torch is no longer mocked.
    for package in ("precision_shim.scaling", "precision_shim_adapters.torch_fp16"):
        loaded = importlib.import_module(package)
        for name in loaded.__all__:
            getattr(loaded, name)
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False

html_theme = "furo"
html_title = "precision_shim"
html_static_path: list[str] = []
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
