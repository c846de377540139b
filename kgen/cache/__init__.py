"""Keys, artifacts and the tuning database. Imports nothing."""
