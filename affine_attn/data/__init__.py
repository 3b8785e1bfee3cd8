"""Text to the sequences that models train on: where it comes from, its tokens, their shards and their order."""
