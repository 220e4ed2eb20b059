"""Reproduction of Twiddler, also known as Fiddler (Kamahori et al., ICLR 2025): the paper's figures, simulated."""
