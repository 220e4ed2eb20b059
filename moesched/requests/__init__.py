"""Requests: batches and micro-batches, prefill in chunks, beams, sampling, workloads."""
