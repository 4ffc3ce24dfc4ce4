"""Pictures: plain data in, matplotlib figure out."""
