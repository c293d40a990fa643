"""Real inference under the same policies."""
