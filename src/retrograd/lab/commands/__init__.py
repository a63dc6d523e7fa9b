"""The commands ``retrograd info``, ``verify`` and ``bench``. Their parsers import nothing that they only run."""
