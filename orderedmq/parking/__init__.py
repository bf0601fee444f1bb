"""Parking lots, in which messages wait if their key could not be processed. Pure.

``rules`` has names, tickets, operators' commands and errors. ``lot`` computes the state of a lot from its messages, which `orderedmq.pulls`
reads from a broker. Each kind of broker has its own module that writes to lots: `embedded.parking_lots` and `rocketmq.group.parking_lots`.
"""
