"""Load tests: the open-loop client, the demo, baselines and benchmarks. Not part of the product."""
