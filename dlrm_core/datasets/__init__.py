"""Data sets on disk: made, converted from Criteo's text, read memory-mapped, inspected."""
