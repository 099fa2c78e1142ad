"""As much of polars as HawkEars needs to write its table, with pandas: the real one has 50 MB."""

import pandas


class DataFrame:
    """A table."""

    def __init__(self, table):
        self.table = table

    def sort(self, columns):
        return DataFrame(self.table.sort_values(columns, kind="stable"))

    def write_csv(self, path, float_precision):
        self.table.to_csv(path, index=False, float_format=f"%.{float_precision}f")


def concat(tables, how):
    return DataFrame(pandas.concat([each.table for each in tables if len(each.table)] or [tables[0].table]))


from_pandas = DataFrame
