"""The command line: one file per command. Nothing imports this package."""
