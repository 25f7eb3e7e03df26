"""Tests of the PostgreSQL engine."""
