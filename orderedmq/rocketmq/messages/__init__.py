"""Topics and queues of a cluster: where messages lie, pulling and sending them."""
