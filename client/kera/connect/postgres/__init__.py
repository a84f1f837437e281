"""Tables of PostgreSQL as the source and as the target of a copy, through ADBC (the extra ``postgres``)."""
