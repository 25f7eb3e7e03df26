"""Scripts for those who work on tenure."""
