"""The cases of tests, which stand as texts in tests/data."""

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"


def read_data(name: str) -> str:
    return (DATA / name).read_text()


def read_lines(name: str) -> list[str]:
    """Return the lines of a file, but for the first, which explains them."""
    return read_data(name).splitlines()[1:]


def read_blocks(name: str) -> list[str]:
    """Return the blocks of a file, each of which has a title after ``===``."""
    return read_data(name).split("=== ")[1:]


def read_parts(name: str) -> dict[str, str]:
    """Return what stands in these blocks, by their titles."""
    return {title: text for title, _, text in (block.partition("\n") for block in read_blocks(name))}
