"""``python -m orderedmq``: the command, if its script is not on the path."""

from orderedmq.cli import app

app()
