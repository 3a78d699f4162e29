"""Which heads carry the control: what a prefix does to the next token, what is lost where heads do
not see it, and what they write."""
