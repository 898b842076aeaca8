"""Measurements, side by side in one run. Not tests: nothing here fails because it is slow."""
