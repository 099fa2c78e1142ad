"""The two live files of a task that runs, and the one file that is published from them."""
