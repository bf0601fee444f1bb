"""The embedded broker: a durable broker in a directory of this machine, built on SQLite. store/schema.py has the tables of its index."""
