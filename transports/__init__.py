"""Transports: they carry out collectives between ranks."""
