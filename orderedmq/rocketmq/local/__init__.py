"""Runs RocketMQ servers on this machine, for trials and tests."""
