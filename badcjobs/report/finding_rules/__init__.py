"""The rules behind findings.py, a family in each module; ``judge_…(facts, summary)`` yields what it finds."""
