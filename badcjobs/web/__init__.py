"""The live page and its API: who may ask, what they may ask, and what they are told. Leaves looking to its callers."""
