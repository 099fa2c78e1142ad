"""What HawkEars' table of places says, and one that cannot be read."""

import pytest
from rooms.model import Place
from rooms.sources import read_regions
from support.source_files import write_regions

AREAS = [
    ("CA", 0, None, None, None, None),
    ("CA-NT", 0, None, None, None, None),
    ("CA-AB-EI", 1, 51, 53, -115, -112),
    ("CA-YT-XX", 1, None, None, None, None),
    ("CA-YT-YY", 1, None, 65, -130, -120),
]


@pytest.fixture
def root(tmp_path):
    write_regions(tmp_path, AREAS)
    return tmp_path


def test_a_region_is_the_beginning_of_the_code_of_a_county_and_a_point_is_in_one(root):
    regions = read_regions(root)
    codes = ("CA", "CA-AB", "CA-AB-EI", "CA-YT", "CA-NT", "ca-ab", "AB", "")
    assert [code for code in codes if regions.has(code)] == ["CA", "CA-AB", "CA-AB-EI", "CA-YT"]
    points = [(52, -113), (51, -115), (50.9, -113), (52, -111), (-113, 52)]
    assert [point for point in points if regions.covers_place(Place(*point))] == [(52, -113), (51, -115)]
    assert regions.covers_place(Place()) and regions.covers_place(Place(0, 0, "CA-AB")), "the region counts"


@pytest.mark.parametrize("content", [None, b"", b"no database" * 100])
def test_without_a_readable_table_the_regions_are_not_known_and_no_file_is_made(root, content):
    path = root / "data" / "locations.db"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert read_regions(root) is None
    assert path.exists() == (content is not None)
