"""Clients that people use, against the API: what they send, what they make of answers."""
