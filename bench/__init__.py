"""What ``make bench`` measures; no tests."""
