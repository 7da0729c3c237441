"""`python -m moedoctor`: the command line, where no console script is on the path."""

import sys

from moedoctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
