"""The files of a store: the index in SQLite with its tables, locks and transactions, and the segments."""
