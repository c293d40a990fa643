"""The embedded pair: a tiny Qwen3-MoE target and a tiny dense Qwen3 draft, really trained."""
