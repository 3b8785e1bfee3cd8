"""What a command leaves on disk, in which format, and how it survives a kill."""
