"""`python -m netlab`."""

import sys

from netlab.cli import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m netlab"))
