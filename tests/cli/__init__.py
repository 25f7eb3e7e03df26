"""The command line, run as a person or a script runs it: as processes."""
