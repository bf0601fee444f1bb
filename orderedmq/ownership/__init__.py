"""Who owns a queue, and how far it is processed: locks, members, strategies, offsets, micro-batches, and the Owner. Pure."""
