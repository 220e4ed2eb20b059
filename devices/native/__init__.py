"""The native library: kernels in C for the CPU, compiled to a shared library that is called through ctypes."""
