"""Where a library that an integration is for is not installed, its docstrings are not collected."""

from importlib.util import find_spec

NEEDS = {
    "lightning": ["lightning.py"],
    "transformers": ["trainer_callback.py", "transformers.py"],
}

collect_ignore = [
    f"src/gradmem/integrations/{file}"
    for library, files in NEEDS.items()
    if find_spec(library) is None
    for file in files
]
