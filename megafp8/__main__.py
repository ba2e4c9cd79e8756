"""Entry point of `python -m megafp8`: the command `megafp8`, which a launcher also starts on each rank."""

import sys

from megafp8.commands import main

if __name__ == "__main__":
    sys.exit(main())
