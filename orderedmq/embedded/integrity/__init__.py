"""Checks that a store still has what was written to it: the seals of values, the pages, and the rules between databases."""
