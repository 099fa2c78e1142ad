"""Secrets: the values of which options and variables are hidden, in texts and in the words of a command."""

import json

from rooms.root import RunSettings, mask, mask_words
from rooms.workers import subject_of
from support.cases import read_data

CASES = read_data("secrets.txt").splitlines()


def test_values_are_hidden_if_one_whole_word_of_their_name_is_a_secrets(pages):
    said = []
    for case in CASES:
        text, _, words = case.partition("words ")
        said.append(mask(text) or json.dumps(mask_words(json.loads(words))))
    masked = "\n".join(said)
    assert "S3" not in masked and masked.count("shown") == "\n".join(CASES).count("shown")
    assert subject_of(RunSettings(engine_args=("--token", "S3"))) == "hawkears --token ***", (
        "the key of what is learned"
    )
    pages({"masked.txt": masked})
