"""``python -m orderedmq`` runs the command ``orderedmq`` where its script is not on the PATH."""

from orderedmq.cli import app

app()
