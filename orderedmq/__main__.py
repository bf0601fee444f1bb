"""``python -m orderedmq``: the command, where its script is not on the path."""

from orderedmq.cli import app

app()
