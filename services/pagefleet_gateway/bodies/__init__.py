"""What clients may send: types, ranges and bounds of every route."""
