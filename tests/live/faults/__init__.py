"""Tests that kill or pause processes.

This file makes the folder a package, so that fixtures of scope ``package`` (and their Spark) end with the folder's last test
instead of at the end of the session.
"""
