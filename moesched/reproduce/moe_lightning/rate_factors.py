"""Factors that multiply the rates stated in a machine's profile, to get rates that the paper does not give."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from moesched.machines import Machine
from moesched.machines.estimates import Estimate
from moesched.machines.sustained import at_peak, rates_of

CACHE_TRAFFIC = 9.0
"""Bytes that FlexGen's CPU attention moves for each byte of the KV cache."""

HALF_PRODUCTS = Estimate(
    low=2.2e9,
    expected=2.7e9,
    high=5e9,
    source="caoshiyi/artifacts, benchmarks/mtbench/mtbench_moel_p_t4.jsonl, rows that may set rates: least squares "
    "over the runs of 32, 64 and 256 new tokens; the range is assumed",
)
"""Bytes of the KV cache that MoE-Lightning's CPU attention reads in a second on CPUs without AVX-512.

`cpu_flash_decode_gqa` of fastmoe/csrc/flashattention.cpp multiplies a head's keys and values by `cblas_gemm_f16f16f32`
of MKL, which converts them first. Such products are slow where a CPU has none of 16 bits (pytorch/pytorch#146508).
"""


class RateFactors(msgspec.Struct, frozen=True, kw_only=True):
    """Factors by which rates that a machine's profile states are multiplied; 1 leaves a rate as it is.

    Attributes:
        link: factor of the bandwidth of all links to and from the accelerator.
        kernels: factor of the accelerator's FLOP/s and of its memory's bandwidth.
        flexgen_attention: factor of the host's FLOP/s and memory bandwidth, for systems in which FlexGen's kernel
            computes attention on the CPU.
    """

    link: float = 1.0
    kernels: float = 1.0
    flexgen_attention: float = 1.0


def machine_at(machine: Machine, factors: RateFactors, *, attends_as_flexgen: bool = False) -> Machine:
    """Return a machine whose rates are those stated in its profile (not the sustained rates) times `factors`.

    Args:
        attends_as_flexgen: whether FlexGen's kernel computes attention on the CPU. Only then does the factor
            `flexgen_attention` apply to the host's rates; otherwise they stay as stated.
    """
    machine = at_peak(machine)
    fast, slow = machine.accelerator.memory, machine.host.memory
    attention = factors.flexgen_attention if attends_as_flexgen else 1.0
    links = [
        replace(link, bandwidth=link.bandwidth * factors.link)
        if fast in (link.source, link.destination)
        else link
        for link in machine.links
    ]
    changed = _with_processor(replace(machine, links=links), machine.roles.accelerator, factors.kernels)
    changed = _with_processor(changed, machine.roles.host, attention)
    memories = dict(changed.memories)
    memories[fast] = replace(memories[fast], bandwidth=memories[fast].bandwidth * factors.kernels)
    memories[slow] = replace(memories[slow], bandwidth=memories[slow].bandwidth * attention)
    return replace(changed, memories=memories)


def copying_caches(machine: Machine) -> Machine:
    """Return a machine at sustained rates, whose host computes attention as slowly as FlexGen's published code.

    `mha_gen` in pytorch_backend.py converts the cache to float32, and multiplies transposed views of it. For every two
    bytes of cache, two are read and four written to convert them, four read and four written to make the views
    contiguous, and four read to multiply: nine times the bytes of a kernel that reads the cache in place.
    """
    host = machine.host
    slower = {
        name: Estimate(
            low=each.low / CACHE_TRAFFIC,
            expected=each.expected / CACHE_TRAFFIC,
            high=each.high / CACHE_TRAFFIC,
        )
        for name, each in rates_of(host).items()
        if name in ("attention", "prompts")
    }
    changed = replace(host, rates=host.rates | slower)
    return replace(machine, processors=machine.processors | {machine.roles.host: changed})


def multiplying_in_half(machine: Machine) -> Machine:
    """Return a machine at sustained rates, whose host computes attention as slowly as MoE-Lightning without AVX-512."""
    host = machine.host
    bandwidth = machine.memories[host.memory].bandwidth
    share = Estimate(
        low=HALF_PRODUCTS.low / bandwidth,
        expected=HALF_PRODUCTS.expected / bandwidth,
        high=HALF_PRODUCTS.high / bandwidth,
        source=HALF_PRODUCTS.source,
    )
    changed = replace(host, rates=host.rates | {"attention": share})
    return replace(machine, processors=machine.processors | {machine.roles.host: changed})


def _with_processor(machine: Machine, name: str, share: float) -> Machine:
    processor = machine.processors[name]
    flops = {dtype: rate * share for dtype, rate in processor.flops.items()}
    return replace(machine, processors={**machine.processors, name: replace(processor, flops=flops)})
