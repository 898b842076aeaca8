"""Reproducing the paper: its runs, their results as small files, and a page that compares."""
