"""Other libraries' trainers and aggregators with gradmem inside; each file needs its library."""
