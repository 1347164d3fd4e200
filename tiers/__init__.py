"""The embedded multi-level cache (Section 3): object tiers, their stack, commit logs, HTTP.

Knows nothing of models or roles. Others use `api` (the interfaces), `build` (from configuration
to tiers) and `resource` (what is served below a base URI).
"""
