"""Requests: batches and micro-batches, chunked prefill, beam search and sampling."""
