"""Orderly listeners: a function that is called with the messages of one queue at a time."""
