"""Conditions over samples, and their statistics."""
