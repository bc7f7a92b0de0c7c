"""``python -m precision_shim`` runs the command ``precision-shim``."""

from precision_shim_tools.cli import main

if __name__ == "__main__":
    main()
