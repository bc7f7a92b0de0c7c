"""``python -m precision_shim`` is ``precision-shim``."""

from precision_shim.cli import main

if __name__ == "__main__":
    main()
