"""The paper made again: which runs, their results kept, each number beside the published one."""
