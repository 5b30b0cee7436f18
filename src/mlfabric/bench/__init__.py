"""Benchmarks of the library's own parts, on instances that follow from a seed."""
