"""``python -m cuflash`` is the command ``cuflash``."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="python -m cuflash")
