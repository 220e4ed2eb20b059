"""The emulated device: any machine profile with an accelerator, in slow motion on this machine's cores."""
