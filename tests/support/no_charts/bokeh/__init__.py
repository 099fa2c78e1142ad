"""Takes Bokeh's place on PYTHONPATH where a test is not about charts: importing it takes longer than a whole merge."""

raise ImportError("this test is not about charts")
