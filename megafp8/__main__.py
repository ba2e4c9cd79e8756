"""`python -m megafp8`: the command `megafp8`, also as the module that a launcher starts on each rank."""

import sys

from megafp8.commands import main

if __name__ == "__main__":
    sys.exit(main())
