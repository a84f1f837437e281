"""Models as columns: makes schemas of dataclasses or pydantic models, batches of instances, and instances of rows."""

from kera.client.serializers.columns.models import ModelColumns, arrow_schema_of, columns_of

__all__ = ["ModelColumns", "arrow_schema_of", "columns_of"]
