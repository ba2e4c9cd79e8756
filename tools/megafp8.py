"""Bootstrap that makes `python tools/X.py` work from a checkout without installation. It is not a tool.

Python puts a script's folder, here tools/, on its path, but not the checkout. So `import megafp8` in a tool finds this
file, which replaces tools/ by the checkout on the path and imports the package instead. Therefore tools must import
megafp8 before `tools.*`, as sorted imports do. `python -m tools.X` does not need this file.
"""

import importlib
import sys
from pathlib import Path

_TOOLS = Path(__file__).resolve().parent
sys.path[:] = [str(_TOOLS.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != _TOOLS)]
del sys.modules[__name__]
importlib.import_module(__name__)
