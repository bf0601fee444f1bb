"""The command's work, apart from its display."""
