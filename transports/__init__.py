"""Transports: what carries collectives between ranks."""
