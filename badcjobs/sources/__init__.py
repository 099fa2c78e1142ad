"""SOURCE arguments → chunks: manifests, folders and lists, and the audio behind them."""
