"""A device that computes on symbols: every value is a hash (the "symbol") of the values that it was computed from.

Two runs end with the same symbols only if every task read the data that it was meant to read. The device also notes the
times at which each piece of data was read and written, and raises an error if tasks touched it at the same time. It
runs under both drivers, needs no weights, and takes microseconds a task: a schedule can be tested without a model.

The engine takes the dependencies of tasks from the table in `moesched/steps/verbs/table.py`. This device does not use
the table: the function of each verb states anew what the verb reads and writes, so that errors in the table are found.
"""
