"""`python -m neobert_cli` is the command `neobert`."""

from neobert_cli.commands import main

main()
