"""Checks of a policy over a grid of cases on the virtual clock, as `moesched check` runs them.

To find faults, the policy first runs small models on a device that computes hashes ("symbols"), with tight memory and
uneven durations; then it is compared with other policies on real models and machines. All cases run in a child process,
so that a policy that never ends can be killed.
"""
