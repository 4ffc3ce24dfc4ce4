"""Everything that knows transformers, and nothing else does."""
