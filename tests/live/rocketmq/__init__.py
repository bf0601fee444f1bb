"""Tests with real RocketMQ servers.

Because this file exists, fixtures of scope ``package`` end with the last test of the folder, and their servers stop then.
Without it, they would live until the end of the session.
"""
