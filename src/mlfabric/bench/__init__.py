"""Benchmarks: each runs the same work through this package and through its peers, in the same run."""
