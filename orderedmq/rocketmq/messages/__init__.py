"""Topics and queues of a cluster: finding, pulling and sending messages."""
