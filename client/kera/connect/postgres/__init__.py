"""Tables of PostgreSQL as the source and as the target of a copy, by ADBC (the extra ``postgres``)."""
