"""Where and when recordings were made: cases in tests/data/sources/places.txt, and what comes of them in a page."""

from rooms.model import Place, ProjectPlaces, parse_patterns
from rooms.root import BadInput, RunSettings
from rooms.sources import WHOLE, open_sources_of, place_reader, place_sources, place_words
from support.source_files import read_cases, write_files, write_regions

COUNTIES = [("CA-AB-EI", 1, 51, 53, -115, -112), ("CA-NT-YK", 1, 60, 65, -120, -110)]


def place_recordings(case, folder):
    """Return the place of every recording of a case, and the lines about all of them; or the refusal."""
    options = case.options
    everywhere = Place(region=options.get("region"), recorded_on=options.get("date"))
    areas = {name: Place(region=options[name]) for name in ("Horn", "Nix") if name in options}
    settings = RunSettings(
        source=tuple(case.sources),
        filelist=options.get("filelist"),
        patterns=parse_patterns(["{study_area}/*"])[0] if areas else (),
        places=ProjectPlaces(everywhere, areas),
        engine=options.get("engine", "hawkears"),
        engine_args=tuple(options.get("engine_arg", "").split()),
    )
    try:
        sources = place_sources(settings, open_sources_of(settings, folder), folder)
        names = place_reader(settings, folder)
        chunks = list(open_sources_of(settings, folder).chunks(WHOLE))
    except BadInput as error:
        return [f"refused: {error.what}", *(f"  {line}" for line in (error.why or "").splitlines()), f"  {error.fix}"]
    lines = []
    for chunk in chunks:
        name = names.of(chunk)
        place = name.place
        shown = (place.region, place.latitude, place.longitude, place.recorded_on, place.location_name, name.left_out)
        shown = (*shown, *(["no county"] if name.no_county else []))
        lines.append(f"{chunk.chunk_id}: {' | '.join('-' if value is None else str(value) for value in shown)}")
        assert (chunk.recording_id in sources.left_out) == (name.left_out is not None)
    taken = [chunk.key for chunk in sources.chunks(WHOLE)]
    assert taken == [chunk.key for chunk in chunks if chunk.recording_id not in sources.left_out]
    return [*lines, place_words(sources.places)]


def test_every_recording_has_the_place_that_counts_or_all_mistakes_are_named(tmp_path, monkeypatch, pages):
    said = []
    for number, case in enumerate(read_cases("places")):
        folder = tmp_path / f"{number:02}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_files(case.files.replace("HERE", str(folder)))
        if "regions" in case.options:
            write_regions(folder, COUNTIES)
        said += [f"## {case.name}", *place_recordings(case, folder), ""]
    pages({"places.txt": "\n".join(said).replace(str(tmp_path), "HERE")})
