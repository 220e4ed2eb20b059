"""Sustained rates by class of device, one TOML file each; `moesched.machines.sustained` reads them."""
