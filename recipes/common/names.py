"""What a name on the command line may stand for."""

from pathlib import Path


def looks_like_a_path(name: str) -> bool:
    """Whether the name can be no name on the Hub, or there is a file or folder of that name."""
    path = Path(name)
    return path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists()
