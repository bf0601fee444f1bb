"""Which queue a row goes to: selectors and hashes of keys. Pure."""
