"""Chooses the queue of each row: selectors and hashes of keys. Pure."""
