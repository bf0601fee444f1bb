"""Messages as RocketMQ stores them, to and from Arrow columns. Pure."""
