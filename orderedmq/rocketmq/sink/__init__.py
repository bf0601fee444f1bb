"""The Outbox over RocketMQ: sends the rows of a micro-batch once, in order."""
