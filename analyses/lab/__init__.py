"""What the scripts of `analyses/` share: the items, tables, claims and numbers of the paper."""
