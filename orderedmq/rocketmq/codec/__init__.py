"""Converts messages between RocketMQ's stored form and Arrow columns. Pure."""
