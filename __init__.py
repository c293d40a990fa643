"""moe_spac: simulate and run mixture-of-experts models whose experts do not fit in GPU memory.

Read in the order in which data flows: `traces` (what the routers decided), `policies` (who stays, moves and runs
where), `simulator` (what that costs on a machine), `executor` (the same policies on real tensors).
"""

__version__ = "0.1.0"
