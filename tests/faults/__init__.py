"""Tests that kill or pause processes.

With this file, fixtures of scope ``package`` end with the last test of the folder, and so their Spark stops then. Without it
they would live until the end of the session.
"""
