"""Tables of a database in the forms that others read: CSV, JSON, Parquet, and what BADC reads."""
