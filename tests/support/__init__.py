"""What tests share: one comparator, one tolerance table, poison, trees, weights."""
