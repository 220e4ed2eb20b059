"""Transports: they carry out collectives (all-reduce, broadcast, gather) between ranks."""
