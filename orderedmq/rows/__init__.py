"""The rows of messages: checks, filters, delays, dead letters, traces. Pure."""
