"""The detection files of engines: what they say, and what is refused."""

from __future__ import annotations

import pytest
from rooms.model import Detection
from rooms.workers import parse_detections_csv

# Cut from a run of HawkEars 2.3.0.
SCORES = """\
recording,name,start_time,end_time,score
rec_000000_000030,ARTE,1.000,1.500,0.817
rec_000000_000030,ARTE,4.000,4.250,0.831
rec_000000_000030,CMWA,0.000,6.750,0.994
rec_000030_000060,ARTE,4.250,4.500,0.711
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("start_time,end_time,label,score\n0.5,3.5,RUGR,0.81\n", Detection(500, 3500, "RUGR", 0.81)),
        ("label,score,start_time,end_time\nRUGR,0.81,0.5,3.5\n", Detection(500, 3500, "RUGR", 0.81)),
        ("\ufeffstart_time,end_time,label,score\r\n0.5,3.5,RUGR,\r\n\r\n", Detection(500, 3500, "RUGR", None)),
        ("start_time,end_time,label,score,channel\n0.5,3.5,RUGR,0.81,left\n", Detection(500, 3500, "RUGR", 0.81)),
        ('start_time,end_time,label,score\n0.5,3.5,"Owl, Boreal",0.81\n', Detection(500, 3500, "Owl, Boreal", 0.81)),
        ("recording,name,start_time,end_time,score\na,RUGR,0.500,3.500,0.810\n", Detection(500, 3500, "RUGR", 0.81)),
        (
            "filename,start_time,end_time,class_name,class_code,score\na.wav,0.5,3.5,Ruffed Grouse,RUGR,0.81\n",
            Detection(500, 3500, "RUGR", 0.81, "Ruffed Grouse"),
        ),
    ],
    ids=["ours", "other order", "BOM, CRLF, no score", "extra column", "quoted", "HawkEars 2", "HawkEars 1"],
)
def test_every_known_table_is_understood(text, expected):
    assert parse_detections_csv(text) == [expected]


@pytest.mark.parametrize(
    "header",
    [
        "start_time,end_time,label,score\n",
        "recording,name,start_time,end_time,score",
        "filename,start_time,end_time,class_name,class_code,score\n",
    ],
)
def test_header_alone_means_nothing_found(header):
    assert parse_detections_csv(header) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "line 1: column .* is missing; the header is empty"),
        ("start_time,end_time,species,score\n0,1,RUGR,0.9\n", "line 1: column label is missing"),
        ("begin,end\n1,2\n", "line 1: column start_time, end_time, label, score is missing"),
        (
            "start_time,end_time,label,score\n0,1,RUGR,0.9\n1,2,RU",
            r"line 3 has 3 cells, the header has 4 \(column score\)",
        ),
        (
            "start_time,end_time,label,score\n0,1,RUGR,0.9,7\n",
            r"line 2 has 5 cells, the header has 4 \(column number 5\)",
        ),
        ("start_time,end_time,label,score\n0,1,RUGR,0.9\nsoon,2,RUGR,0.9\n", "line 3, column start_time: 'soon'"),
        ("start_time,end_time,label,score\n0,nan,RUGR,0.9\n", "line 2, column end_time: 'nan'"),
        ("start_time,end_time,label,score\n5,2,RUGR,0.9\n", "line 2, column end_time: 2.0 is before the start, 5.0"),
        ("start_time,end_time,label,score\n0,1,,0.9\n", "line 2, column label: empty"),
        ("start_time,end_time,label,score\n0,1,RUGR,loud\n", "line 2, column score: 'loud'"),
        ('start_time,end_time,label,score\n0,1,"RUGR,0.9\n', "line 2: unexpected end of data"),
    ],
)
def test_table_that_is_not_whole_is_refused_with_line_and_column(text, fault):
    with pytest.raises(ValueError, match=fault):
        parse_detections_csv(text)
