"""The measurements of ``make bench``; no tests."""
