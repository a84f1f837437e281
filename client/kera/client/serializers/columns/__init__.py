"""Models as columns: the schema of a dataclass or pydantic model, its instances as a batch, rows as its instances."""

from kera.client.serializers.columns.models import ModelColumns, arrow_schema_of, columns_of

__all__ = ["ModelColumns", "arrow_schema_of", "columns_of"]
