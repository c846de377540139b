"""Strategies, workers and the tuning loop. Imports nothing."""
