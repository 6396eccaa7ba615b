"""`python -m bespoke`: the command line."""

from bespoke.cli import main

main()
