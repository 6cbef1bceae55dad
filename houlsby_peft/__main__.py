"""`python -m houlsby_peft` is `houlsby-peft`."""

from houlsby_peft_cli import main


if __name__ == "__main__":
    main()
