"""The emulated device: imitates a machine with an accelerator, given by its profile, in slow motion."""
