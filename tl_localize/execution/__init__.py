"""Where results are kept and who computes them: the store, this process, shards, a Ray cluster. No science."""
