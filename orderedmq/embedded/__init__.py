"""The embedded broker: a durable broker in a directory of this machine, on LMDB. store/layout.py has its databases."""
