"""The native library: kernels in C for the CPU, in a shared library that Python calls through ctypes."""
