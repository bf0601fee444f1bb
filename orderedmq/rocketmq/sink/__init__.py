"""The Outbox over RocketMQ: rows of a micro-batch sent once, in order."""
