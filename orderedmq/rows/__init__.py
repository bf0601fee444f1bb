"""What a message's row must look like and says: checks, filters, delays, dead letters, traces. Pure."""
