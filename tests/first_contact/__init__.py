"""The first hour with tenure: what users of other locks type, and the errors that they read."""
