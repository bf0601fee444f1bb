"""Consumer groups of a cluster: members, queue locks, offsets, dead letters."""
