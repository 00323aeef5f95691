"""What is measured, and against whom: `python -m bench.NAME [--full] [--json FILE]`."""
