"""sdcpd: coordination of speculative decoding between routers, drafters and verifiers (SDCP)."""

__version__ = "0.1.0"
