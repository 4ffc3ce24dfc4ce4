"""Observers and their records."""
