"""Few queries over a long cache, split over keys."""
