"""The rows of messages: checks, filters, dead letters. Pure."""
