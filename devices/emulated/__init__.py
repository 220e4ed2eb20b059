"""The emulated device: imitates a machine with an accelerator, by its profile, in slow motion on this machine."""
