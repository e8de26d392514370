"""What an operation does, step by step, and how it is undone: one sequence a file."""
