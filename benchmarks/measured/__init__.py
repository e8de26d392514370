"""Tables and plots of what was measured, which `benchmarks/result_tables.py` writes into docs/. One topic a file."""
