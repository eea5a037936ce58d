"""What Headrace costs, measured: `python -m benchmarks.NAME [--quick] [--json]`, from the root of the repository."""
