"""Makes `python tools/X.py` work from a checkout without installation. Neither a tool nor the package.

Python puts a script's folder, here tools/, on its path, not the checkout. So a tool's `import megafp8` finds this file,
which replaces tools/ by the checkout on the path and imports the package in its place. Therefore tools must import
megafp8 before `tools.*`, as sorted imports do. `python -m tools.X` does not need this file.
"""

import importlib
import sys
from pathlib import Path

_TOOLS = Path(__file__).resolve().parent
sys.path[:] = [str(_TOOLS.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != _TOOLS)]
del sys.modules[__name__]
importlib.import_module(__name__)
