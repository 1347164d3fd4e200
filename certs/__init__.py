"""Certificates that name instances: a small authority, and what `sdcpctl certs` does."""

from certs.authority import (
    ROLES,
    Authority,
    CertsError,
    Leaf,
    create_authority,
    issue,
    load_authority,
)

__all__ = [
    "ROLES",
    "Authority",
    "CertsError",
    "Leaf",
    "create_authority",
    "issue",
    "load_authority",
]
