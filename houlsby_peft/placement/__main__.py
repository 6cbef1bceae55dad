"""The command `python -m houlsby_peft.placement`; see `placement_map`."""

from .map import main


if __name__ == "__main__":
    main()
