"""GEM inside other libraries' training loops: one file per library, imported by name."""
