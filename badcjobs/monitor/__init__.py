"""The live view: what is known at this moment, how it is added up, ordered and drawn. Leaves reading to its callers."""
