"""The embedded broker: a durable broker in a directory of this machine, built on LMDB. store/layout.py lists the store's databases."""
