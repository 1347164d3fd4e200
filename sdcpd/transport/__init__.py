"""HTTP between peers: requests and responses over mutually authenticated TLS 1.3."""
