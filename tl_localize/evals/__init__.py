"""The two benchmarks."""
