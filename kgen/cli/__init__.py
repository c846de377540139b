"""The `kgen` command, one module a subcommand. Imports nothing."""
