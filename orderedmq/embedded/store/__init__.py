"""The file of a store: one LMDB environment, its transactions, pages and layout."""
