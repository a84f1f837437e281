"""What all pages share: who may ask, parameters, errors, and how things look."""
