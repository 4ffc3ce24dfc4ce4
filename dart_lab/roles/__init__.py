"""What visual tokens are for: which words they lie next to, and the roles that follow from it."""
