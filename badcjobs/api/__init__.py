"""What other people's Python calls; the names are given out by ``badcjobs`` itself."""
