"""Benchmarks: each runs the same work through this package and, where there are any, through its peers, in
the same run."""
