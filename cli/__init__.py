"""`sdcpctl`, the operator's command."""
