"""Peers, tables and the bench run. Imports nothing."""
