"""`python -m gradmem` is the command `gradmem`."""

from gradmem.cli import main

if __name__ == "__main__":
    main()
