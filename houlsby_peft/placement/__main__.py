"""The command `python -m houlsby_peft.placement`; see `placement_map`."""

from .show import main


if __name__ == "__main__":
    main()
