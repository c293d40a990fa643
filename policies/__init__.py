"""The policy contract and the policies. No torch, no simpy, no clock."""
