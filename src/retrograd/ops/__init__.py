"""The public functions: check the arguments, call the engine, return named results."""
