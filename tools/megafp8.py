"""Lets `python tools/X.py` run from a checkout in which nothing is installed; no tool, and not the package.

Python puts the folder of a script on its path, here tools/, and not the checkout. So a tool's `import megafp8` finds
this file first, which puts the checkout in the place of tools/ and hands the name over to the package. Tools import
megafp8 before `tools.*`, as sorted imports do. `python -m tools.X` has the checkout on its path and never comes here.
"""

import importlib
import sys
from pathlib import Path

_TOOLS = Path(__file__).resolve().parent
sys.path[:] = [str(_TOOLS.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != _TOOLS)]
del sys.modules[__name__]
importlib.import_module(__name__)
