"""`python -m pipeline` does what `latentmill` does."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
