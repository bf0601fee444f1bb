"""Orderly listeners: functions that Spark's tasks call with the messages of one queue at a time, in order."""
