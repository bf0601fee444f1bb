"""Parking lots: where messages wait whose key could not be processed.

``rules`` has names, tickets, orders and errors, ``lot`` what the messages of a lot say together; both are pure. ``reading`` reads a lot from
a broker. Each kind of broker has a module of its own that writes to lots: `embedded.parking_lots` and `rocketmq.group.parking_lots`.
"""
