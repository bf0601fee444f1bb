"""Tests that kill or pause processes. Fixtures of this package end with its last test: its Spark stops then."""
