"""Connections to the servers of a cluster, and requests to one or many of them."""
