"""The embedded broker: a durable broker in a directory of this machine, on LMDB. layout.py has its databases."""
