"""What is special about GPUs: which one is current, and steps recorded as CUDA graphs."""
