"""Runs: everything that determines one, its folder, and the machine it is made on."""
