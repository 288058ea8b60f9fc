"""What does `python -m moetrain` do? (The same as the console script.)"""

from moetrain.cli import main

if __name__ == "__main__":
    main()
