"""Looks at this machine, and says what will work and how to mend what will not."""
