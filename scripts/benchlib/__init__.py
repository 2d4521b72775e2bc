"""Benchmarks behind `scripts/bench.py`: one module per subcommand, with what they share in `workloads` and `report`."""
