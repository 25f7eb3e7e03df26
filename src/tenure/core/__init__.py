"""The rules of the model, with no clock, no I/O and no asyncio."""
