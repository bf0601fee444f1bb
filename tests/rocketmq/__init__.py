"""Tests with real RocketMQ servers. Fixtures of this package end with its last test: servers stop then."""
