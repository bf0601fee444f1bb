"""The embedded broker: a durable broker in a directory of this machine, on LMDB. ARCHITECTURE.md describes its layout."""
