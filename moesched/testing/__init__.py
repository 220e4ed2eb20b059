"""Conformance suites for plug-ins: they check that a policy, device, transport or eviction rule keeps its promises.

Call the suites in tests of your own:

    from moesched.testing import check_policy

    def test_my_policy():
        check_policy(MyPolicy)
"""

from __future__ import annotations

from moesched.testing.device_checks import check_device
from moesched.testing.eviction_checks import check_eviction
from moesched.testing.policy_checks import (
    CLOCKS,
    Case,
    Clock,
    Ended,
    check_policy,
    node_cases,
    policy_cases,
    run_on_symbols,
)
from moesched.testing.transport_checks import check_transport

__all__ = [
    "check_policy",
    "check_device",
    "check_eviction",
    "check_transport",
    "run_on_symbols",
    "Ended",
    "Case",
    "Clock",
    "CLOCKS",
    "policy_cases",
    "node_cases",
]
