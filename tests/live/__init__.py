"""Tests with real Spark, real servers, real processes and a real browser."""
