"""Whether what a store has is what was written: seals of values, pages, and the rules between its databases."""
