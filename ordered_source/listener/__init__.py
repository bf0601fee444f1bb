"""Listeners: functions that Spark's tasks call with messages, in the order of a queue, in that of each key, or in none."""
