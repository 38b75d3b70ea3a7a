"""``python -m flowcredit``: the same as the command ``flowcredit``."""

from flowcredit.cli import main

main()
