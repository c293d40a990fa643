"""A discrete-event model of one machine, and everything that is computed from its runs."""
