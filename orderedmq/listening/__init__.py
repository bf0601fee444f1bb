"""Listeners: their arguments and answers, and the engines that decide which messages they get. Pure: no clock, no effects."""
