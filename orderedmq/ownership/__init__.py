"""The ownership of queues and the progress of queries: locks, members, strategies, offsets, micro-batches, and the Owner. Pure."""
