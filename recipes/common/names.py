"""What a name on the command line may stand for."""

from pathlib import Path


# Values of --method that leave the encoder's weights as they are and add some; the others train weights of its own.
ADDING = ("houlsby", "lora")


def looks_like_a_path(name: str) -> bool:
    """Whether the name can be no name on the Hub, or there is a file or folder of that name."""
    path = Path(name)
    return path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists()
