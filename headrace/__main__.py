"""`python -m headrace` is the command line."""

from .cli import main

main()
