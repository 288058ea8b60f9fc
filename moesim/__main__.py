"""What does `python -m moesim` do? (The same as `moesim`.)"""

from moesim.cli import main

if __name__ == "__main__":
    main()
