"""Twiddler, also known as Fiddler (Kamahori et al., ICLR 2025): its figures, simulated."""
