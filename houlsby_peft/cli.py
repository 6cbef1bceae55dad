"""The command `houlsby-peft` as a module of the package: `python -m houlsby_peft.cli`. See `houlsby_peft_cli`."""

from houlsby_peft_cli import main as main


if __name__ == "__main__":
    main()
