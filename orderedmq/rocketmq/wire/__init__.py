"""Requests and answers of RocketMQ's remoting protocol, and what they say. Pure."""
