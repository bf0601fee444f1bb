"""Parking lots, in which messages wait if their key could not be processed.

``rules`` has names, tickets, operators' commands and errors. ``lot`` computes the state of a lot from its messages. Both are pure.
``reading`` reads a lot from a broker. Each kind of broker has its own module that writes to lots: `embedded.parking_lots` and
`rocketmq.group.parking_lots`.
"""
