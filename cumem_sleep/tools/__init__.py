"""The command line: the demo, the doctor, the benchmark."""
