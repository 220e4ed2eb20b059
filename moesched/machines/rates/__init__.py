"""Sustained rates of each class of device, in one TOML file each; `moesched.machines.sustained` reads the files."""
