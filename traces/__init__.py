"""Routing traces: what they are, how they are recorded, read, imported and described."""
