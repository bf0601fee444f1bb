"""Listeners: what they are given and answer, and the engines that decide which messages go to them. Pure."""
