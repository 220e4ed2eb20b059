"""Write, run and compare schedules of Mixture-of-Experts inference for models whose weights do not fit fast memory.

A few lines of Python do what each command of the command line does:

    import moesched
    measured = moesched.run_model("models/mine", ["Once upon"], policy="cgopipe", budgets={"host": "600MB"})
    predicted = moesched.simulate_model("mixtral-8x7b", machine="t4", policy="cgopipe", workload="mtbench")

Each public name is imported from its module when it is first used, so that `import moesched` alone loads almost
nothing.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("moesched")
    from moesched.system.lazy_names import load

    return load(__name__, name)


def __dir__() -> list[str]:
    from moesched.system.lazy_names import load

    return sorted({*globals(), *load(__name__, "__all__")})
