"""Turn SOURCE arguments into chunks: manifests, folders and lists of audio, and the audio files."""
