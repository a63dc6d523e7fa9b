"""The functions: arguments in, engine called, named results out."""
