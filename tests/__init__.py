"""The tests.

Without this file pytest would import tests/live/rocketmq/test_sink.py as ``rocketmq.test_sink``, and Spark's workers would not find it.
"""
