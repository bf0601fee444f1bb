"""Listeners: functions that Spark's tasks call with messages, in the order of a queue, in the order of each key, or in no order."""
